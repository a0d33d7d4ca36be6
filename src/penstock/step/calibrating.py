"""Calibration: the numbers of the cost model, measured on the ranks that will run.

Each axis is asked for small and for large moves, by each algorithm that it has: the small ones tell
the latency, the large ones the rate, and the processor time that they took tells what they take
from computation. Memory and arithmetic are measured on all ranks at once, as they are used. Every
number is the middle of what the ranks found, so all ranks have the same costs.

What a program itself does is learned from running it: `learned` takes the times of its tasks.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import distributed

from penstock.program.cost import Costs, Link, kernel_amount, kernel_name
from penstock.program.plan import COMPUTE, Plan, net_lane
from penstock.step.comm import Comm, Handle
from penstock.step.groups import Groups
from penstock.step.lanes import Lived
from penstock.step.tune_cache import keep, kept, key_of

__all__ = ["calibrate", "learned"]

_SMALL_BYTES = 4 << 10
_LARGE_BYTES = 4 << 20
_SMALL_RUNS = 9
_LARGE_RUNS = 3
_SLOW_S = 0.5
"""A link that takes longer than this for a large move is asked once."""
_ALGOS = {
    "all_reduce": ("direct", "ring", "native"),
    "reduce_scatter": ("direct", "ring"),
    "all_gather": ("direct", "ring"),
}
Sample = dict[str, float]


def calibrate(groups: Groups, *, cache: str | Path | None = None) -> Costs:
    """Return the costs of the machine and the network that some groups run on.

    Args:
        groups: of this rank; all ranks of the mesh come here together.
        cache: a folder where costs are kept by mesh, hosts and versions; None keeps nothing.
    """
    hosts = _gathered(groups, platform.node())
    key = key_of("costs", str(groups.mesh), *hosts, torch.__version__, _cores(), _threads())
    found = _from_first(groups, kept(cache, key))
    if found is not None:
        return Costs.from_json(found)
    links: list[tuple[str, Link]] = []
    for axis, size in groups.mesh.axes:
        if size > 1:
            comm = groups.comm(axis, net_lane((axis,)))
            links += _links(comm, axis, groups)
    mine = _machine()
    machine = _middle(groups, mine)
    costs = Costs(
        links=tuple(links),
        memory_bytes_s=machine["memory_bytes_s"],
        flops_s=machine["flops_s"],
        ops_s=machine["ops_s"],
        task_s=machine["task_s"],
        cores=max(0.1, _cores() / max(1, hosts.count(platform.node()))),
        threads=float(_threads()),
        measured=f"{len(hosts)} ranks on {len(set(hosts))} hosts, torch {torch.__version__}",
    )
    costs = replace(costs, cores=_middle(groups, {"cores": costs.cores})["cores"])
    if groups.rank == 0:
        keep(cache, key, costs.to_json())
    return costs


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _threads() -> int:
    return torch.get_num_threads()


# -- links -------------------------------------------------------------------------------------


def _links(comm: Comm, axis: str, groups: Groups) -> list[tuple[str, Link]]:
    """Return what an axis takes, for each operation and algorithm, and for all others."""
    out: list[tuple[str, Link]] = []
    for op, algos in _ALGOS.items():
        found = {}
        for algo in algos:
            sample = _sampled(comm, op, algo, groups)
            if sample is not None:
                found[algo] = Link(**sample)  # type: ignore[arg-type]
        out += [(f"{axis}/{op}/{algo}", link) for algo, link in found.items()]
        if found:
            first = found.get("direct") or next(iter(found.values()))
            out.append((f"{axis}/{op}", first))
    named = dict(out)
    out.append((axis, named.get(f"{axis}/reduce_scatter", Link())))
    return out


def _sampled(comm: Comm, op: str, algo: str, groups: Groups) -> Sample | None:
    """Return latency, rate and processor time of one operation; None where there is none."""
    try:
        latency_s = median(_timed(comm, op, algo, _SMALL_BYTES) for _ in range(_SMALL_RUNS))
    except (ValueError, NotImplementedError):
        # Refused before anything is sent, and alike on all ranks.
        return None
    sent, cpu_s = comm.sent_bytes, time.process_time()
    taken: list[float] = []
    while len(taken) < _LARGE_RUNS:
        taken.append(_timed(comm, op, algo, _LARGE_BYTES))
        if _middle(groups, {"s": taken[0]})["s"] > _SLOW_S:
            break
    sent_bytes = max(1, (comm.sent_bytes - sent) // len(taken))
    cpu_s = (time.process_time() - cpu_s) / len(taken)
    rate = sent_bytes / max(1e-7, min(taken) - latency_s)
    mine = {"latency_s": latency_s, "bytes_s": rate, "cpu_s": cpu_s / sent_bytes}
    return _middle(groups, mine)


def _timed(comm: Comm, op: str, algo: str, size_bytes: int) -> float:
    count = size_bytes // 4 // comm.size * comm.size
    whole = torch.zeros(count)
    part = torch.zeros(count // comm.size)
    calls: dict[str, Callable[[], Handle]] = {
        "all_reduce": lambda: comm.all_reduce(whole, algo=algo),
        "reduce_scatter": lambda: comm.reduce_scatter(part, whole, algo=algo),
        "all_gather": lambda: comm.all_gather(whole, part, algo=algo),
    }
    comm.barrier()
    start_s = time.perf_counter()
    calls[op]().wait()
    return time.perf_counter() - start_s


# -- the machine -------------------------------------------------------------------------------


def _machine() -> Sample:
    """Return what one rank's memory and arithmetic do, while the others do the same."""
    a, b, out = (torch.zeros(2 << 20) for _ in range(3))
    x, y = torch.zeros(512, 512), torch.zeros(512, 512)
    tile = torch.zeros(16 << 10)
    into = torch.empty_like(tile)
    few = torch.zeros(1)
    pass_s = _best(lambda: torch.add(a, b, out=out), 5)
    product_s = _best(lambda: x @ y, 5)
    exp_s = _best(lambda: torch.exp(tile, out=into), 20)
    return {
        "memory_bytes_s": 3 * a.numel() * 4 / pass_s,
        "flops_s": 2 * 512**3 / product_s,
        "ops_s": 10 * tile.numel() / exp_s,
        "task_s": 10e-6 + _best(lambda: few.add_(1.0), 50),
    }


def _best(work: Callable[[], object], times: int) -> float:
    work()
    out = []
    for _ in range(times):
        start_s = time.perf_counter()
        work()
        out.append(time.perf_counter() - start_s)
    return max(1e-9, min(out))


# -- what ranks have found ---------------------------------------------------------------------


def _gathered(groups: Groups, mine: object) -> list[str]:
    if groups.mesh.num_ranks == 1:
        return [str(mine)]
    everyones: list[object] = [None] * groups.mesh.num_ranks
    distributed.all_gather_object(everyones, mine)
    return [str(each) for each in everyones]


def _from_first(groups: Groups, mine: str | None) -> str | None:
    """Return what the first rank has: others may see another disk."""
    if groups.mesh.num_ranks == 1:
        return mine
    said: list[str | None] = [mine]
    distributed.broadcast_object_list(said, src=0)
    return said[0]


def _middle(groups: Groups, mine: Sample) -> Sample:
    """Return of each number the middle of what the ranks have."""
    if groups.mesh.num_ranks == 1:
        return mine
    everyones: list[Sample] = [{} for _ in range(groups.mesh.num_ranks)]
    distributed.all_gather_object(everyones, mine)
    return middle(everyones)


def middle(several: Sequence[Mapping[str, float]]) -> Sample:
    """Return of each number the middle of several; numbers that all have."""
    names = [name for name in several[0] if all(name in each for each in several)]
    return {name: median(each[name] for each in several) for name in names}


def learned(
    plan: Plan, runs: Iterable[Sequence[Lived]], costs: Costs
) -> tuple[dict[str, float], dict[str, float]]:
    """Return what runs of a plan tell: seconds by function, and rates by kernel."""
    times: dict[str, list[float]] = {}
    for run in runs:
        for lived in run:
            if lived.lane == COMPUTE:
                times.setdefault(lived.task, []).append(lived.stop_s - lived.start_s)
    calls: dict[str, float] = {}
    kernels: dict[str, list[float]] = {}
    for name, several in times.items():
        task = plan.by_name[name]
        seconds = max(1e-7, min(several) - costs.task_s)
        nodes = [plan.program[node] for node in task.nodes]
        if task.kind == "call":
            calls[str(nodes[0].attr("function"))] = seconds
        elif task.touched_bytes:
            rate = kernel_amount(task, plan) / seconds
            kernels.setdefault(kernel_name(nodes, plan.program), []).append(rate)
    return calls, {name: median(rates) for name, rates in kernels.items()}
