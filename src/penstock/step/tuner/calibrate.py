"""Calibration: the numbers of the cost model, measured on the ranks that will run.

Each axis is asked for small and for large moves, by each algorithm that it has: the small ones tell
the latency, the large ones the rate, and the processor time that they took tells what they take
from computation. Large ones follow each other, so that a wire which lends some bytes for a start
has them back before the end. Memory and arithmetic are measured on all ranks at once, as they are
used. Every number is the middle of what the ranks found, so all ranks have the same costs.

What a program itself does is learned from running it: `learned` takes the times of its tasks.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from torch import distributed

from penstock.errors import OptionError, ProgramError
from penstock.step.comms.comm import Comm, Handle
from penstock.step.groups import Groups
from penstock.step.lanes import TaskTime
from penstock.step.program.cost import Link, MachineCosts, kernel_amount, kernel_name
from penstock.step.program.plan import COMPUTE, Plan, net_lane
from penstock.step.tuner.cache import keep, kept, key_of, versions

__all__ = ["calibrate", "is_like", "learned", "middle", "speeds"]

_SMALL_BYTES = 4 << 10
_LARGE_BYTES = 4 << 20
"""Sent by a rank."""
_LOOK_BYTES = 1 << 20
_SMALL_RUNS = 9
_LARGE_RUNS = 3
_SLOW_S = 0.5
"""A link that takes longer than this for a large move is asked once."""
_LOOKS = 5
_ALIKE = 3.0
"""A network that is faster or slower than it was by more than this is another one; a busy machine
makes that much of it."""
_OPS: dict[str, tuple[str | None, ...]] = {
    "all_reduce": ("native", "direct", "ring"),
    "reduce_scatter": (None, "direct", "ring"),
    "all_gather": (None, "direct", "ring"),
}
"""By operation its algorithms over gloo, first the one that is used where nobody says another."""
Sample = dict[str, float]
T = TypeVar("T")


def calibrate(groups: Groups, *, cache: str | Path | None = None) -> MachineCosts:
    """Return the costs of the machine and the network that some groups run on.

    Args:
        groups: of this rank; all ranks of the mesh come here together.
        cache: a folder where costs are kept by mesh, hosts and versions, for a network that is as
            fast as it was; None keeps nothing. That of the first rank counts.
    """
    hosts = _gathered(groups, platform.node())
    backends = [groups.backend_of(axis) for axis in groups.mesh.names]
    facts = (
        groups.mesh,
        backends,
        *hosts,
        versions(),
        _threads(),
        *_gathered(groups, _gpu(groups)),
    )
    key = key_of("costs", *facts, *map(sorted, _gathered(groups, _cores())))
    seen = speeds(groups) if _from_first(groups, cache is not None) else {}
    found = _from_first(groups, kept(cache, key) if groups.rank == 0 else None)
    if found is not None and (costs := _costs_for(found, seen)) is not None:
        return costs
    links: list[tuple[str, Link]] = []
    for axis, size in groups.mesh.axes:
        if size > 1:
            links += _MeasuredAxis(groups, axis).links()
    machine = _middle(groups, _machine(_device(groups)) | {"cores": _cores_each(groups)})
    costs = MachineCosts(
        links=tuple(links),
        memory_bytes_s=machine["memory_bytes_s"],
        flops_s=machine["flops_s"],
        ops_s=machine["ops_s"],
        task_s=machine["task_s"],
        cores=machine["cores"],
        threads=float(_threads()),
        measured=f"{len(hosts)} ranks on {len(set(hosts))} hosts, torch {torch.__version__}",
    )
    if groups.rank == 0:
        keep(cache, key, json.dumps({"speeds": seen, "costs": costs.to_json()}))
    return costs


def speeds(groups: Groups) -> dict[str, float]:
    """Return by axis about how many bytes a second a rank sends: a quick look, together."""
    mine = {}
    for axis, size in groups.mesh.axes:
        if size > 1:
            asked = _MeasuredAxis(groups, axis)
            op, algo = "all_reduce", asked.algos("all_reduce")[0]
            taken_s = [asked.taken_s(op, algo, _LOOK_BYTES) for _ in range(_LOOKS)]
            mine[axis] = _LOOK_BYTES / min(taken_s)
    return _middle(groups, mine)


def is_like(seen: Mapping[str, float], was: Mapping[str, float]) -> bool:
    """Whether a network is about as fast as it was."""
    if seen.keys() != was.keys():
        return False
    return all(1 / _ALIKE < rate / max(1e-9, was[axis]) < _ALIKE for axis, rate in seen.items())


def _costs_for(text: str, seen: Mapping[str, float]) -> MachineCosts | None:
    """Return costs that were kept, if they are of a network like this one."""
    try:
        said = json.loads(text)
        return MachineCosts.from_json(said["costs"]) if is_like(seen, said["speeds"]) else None
    except (ProgramError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        return None
    except RecursionError:
        return None


def _cores() -> list[str]:
    """Return the cores that this rank may use, each with its machine.

    Containers of one machine have names of their own and cores in common, so a machine is what was
    started at once.
    """
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = platform.node()
    return [f"{machine}/{core}" for core in sorted(os.sched_getaffinity(0))]


def _cores_each(groups: Groups) -> float:
    """Return how many cores a rank has when all are at work."""
    everyones = _gathered(groups, _cores())
    return sum(1 / sum(core in theirs for theirs in everyones) for core in _cores())


def _threads() -> int:
    return torch.get_num_threads()


def _device(groups: Groups) -> torch.device:
    on_gpu = any(groups.backend_of(axis) in ("nccl", "peer") for axis in groups.mesh.names)
    return torch.device("cuda" if on_gpu and torch.cuda.is_available() else "cpu")


def _gpu(groups: Groups) -> str:
    device = _device(groups)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


# -- links -------------------------------------------------------------------------------------


class _MeasuredAxis:
    """One axis, asked for moves."""

    def __init__(self, groups: Groups, axis: str) -> None:
        self._groups, self._axis = groups, axis
        self._comm: Comm = groups.comm(axis, net_lane((axis,)))
        self._backend, self._device = groups.backend_of(axis), _device(groups)

    def algos(self, op: str) -> tuple[str | None, ...]:
        """Return what there is to choose from, first what is taken where nobody chooses."""
        return _OPS[op] if self._backend == "gloo" else (None,)

    def links(self) -> list[tuple[str, Link]]:
        """Return what an axis takes, for each operation and algorithm, and for all others."""
        out: dict[str, Link] = {}
        for op in _OPS:
            for algo in self.algos(op):
                sample = self._sampled(op, algo)
                if sample is None:
                    continue
                is_memory = self._backend in ("shm", "peer")
                link = Link(**sample, is_memory=is_memory)  # type: ignore[arg-type]
                out.setdefault(f"{self._axis}/{op}", link)
                if algo is not None:
                    out[f"{self._axis}/{op}/{algo}"] = link
        out[self._axis] = out.get(f"{self._axis}/reduce_scatter", Link())
        return list(out.items())

    def _sampled(self, op: str, algo: str | None) -> Sample | None:
        """Return latency, rate and processor time of one operation; None where there is none."""
        try:
            small = sorted(self.taken_s(op, algo, _SMALL_BYTES) for _ in range(_SMALL_RUNS))
        except (OptionError, ValueError, NotImplementedError):
            # Refused before anything is sent, and alike on all ranks.
            return None
        # What others do on the machine makes some late; the wire does not.
        latency_s = small[len(small) // 4]
        sent, cpu_s = self._comm.sent_bytes, time.process_time()
        taken_s, runs = self.taken_s(op, algo, _LARGE_BYTES), 1
        if _middle(self._groups, {"s": taken_s})["s"] < _SLOW_S:
            taken_s = self.taken_s(op, algo, _LARGE_BYTES, times=_LARGE_RUNS)
            runs += _LARGE_RUNS
        sent_bytes = max(1, (self._comm.sent_bytes - sent) // runs)
        cpu_s = (time.process_time() - cpu_s) / runs
        rate = sent_bytes / max(1e-7, taken_s - latency_s)
        mine = {"latency_s": latency_s, "bytes_s": rate, "cpu_s": cpu_s / sent_bytes}
        return _middle(self._groups, mine)

    def taken_s(self, op: str, algo: str | None, sent_bytes: int, *, times: int = 1) -> float:
        """Return how long a move takes for which a rank sends so much, of several in a row."""
        comm = self._comm
        shares = 2 if op == "all_reduce" else 1
        part = max(1, sent_bytes // 4 // shares // (comm.size - 1))
        wholes = [torch.zeros(part * comm.size, device=self._device) for _ in range(times)]
        parts = [torch.zeros(part, device=self._device) for _ in range(times)]
        calls: dict[str, Callable[[int], Handle]] = {
            "all_reduce": lambda n: comm.all_reduce(wholes[n], algo=algo),
            "reduce_scatter": lambda n: comm.reduce_scatter(parts[n], wholes[n], algo=algo),
            "all_gather": lambda n: comm.all_gather(wholes[n], parts[n], algo=algo),
        }
        comm.barrier()
        _synchronize(self._device)
        start_s = time.perf_counter()
        for handle in [calls[op](number) for number in range(times)]:
            handle.wait()
        _synchronize(self._device)
        return (time.perf_counter() - start_s) / times


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- the machine -------------------------------------------------------------------------------


def _machine(device: torch.device) -> Sample:
    """Return what one rank's memory and arithmetic do, while the others do the same."""
    a, b, out = (torch.zeros(2 << 20, device=device) for _ in range(3))
    x, y = torch.zeros(512, 512, device=device), torch.zeros(512, 512, device=device)
    tile = torch.zeros(16 << 10, device=device)
    into = torch.empty_like(tile)
    few = torch.zeros(1, device=device)
    pass_s = _best(lambda: torch.add(a, b, out=out), 5, device)
    product_s = _best(lambda: x @ y, 5, device)
    exp_s = _best(lambda: torch.exp(tile, out=into), 20, device)
    return {
        "memory_bytes_s": 3 * a.numel() * 4 / pass_s,
        "flops_s": 2 * 512**3 / product_s,
        "ops_s": 10 * tile.numel() / exp_s,
        "task_s": 10e-6 + _best(lambda: few.add_(1.0), 50, device),
    }


def _best(work: Callable[[], object], times: int, device: torch.device) -> float:
    work()
    out = []
    for _ in range(times):
        _synchronize(device)
        start_s = time.perf_counter()
        work()
        _synchronize(device)
        out.append(time.perf_counter() - start_s)
    return max(1e-9, min(out))


# -- what ranks have found ---------------------------------------------------------------------


def _gathered(groups: Groups, mine: T) -> list[T]:
    if groups.mesh.num_ranks == 1:
        return [mine]
    everyones = [mine] * groups.mesh.num_ranks
    distributed.all_gather_object(everyones, mine)
    return everyones


def _from_first(groups: Groups, mine: T) -> T:
    """Return what the first rank has: others may see another disk."""
    if groups.mesh.num_ranks == 1:
        return mine
    said = [mine]
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
    plan: Plan, runs: Iterable[Sequence[TaskTime]], costs: MachineCosts
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
            chunks = 1 if task.region is None else plan.program.region(task.region).num_chunks
            calls[str(nodes[0].attr("function"))] = seconds * chunks
        elif task.touched_bytes:
            rate = kernel_amount(task, plan) / seconds
            kernels.setdefault(kernel_name(nodes, plan.program), []).append(rate)
    return calls, {name: median(rates) for name, rates in kernels.items()}
