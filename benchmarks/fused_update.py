"""What does one fused pass over shared memory save, beside all_reduce and Adam one after the other?

    python -m benchmarks.fused_update [--rounds 12] [--ranks 2] [--params 8388608] [--compile]
    python -m benchmarks.fused_update --quick

Ranks are processes of one host with one thread each; their gradients are flat and are reduced in
place. Everybody takes a turn in each round: a barrier, the update, the time of the slowest rank.
`CPU` is what a rank used, its threads included. Rows:

    all_reduce                gloo alone: what it would cost if Adam cost nothing
    all_reduce, staged        of any tensor, over shared memory
    all_reduce, shared        of a tensor that lives there
    gloo, Adam                and torch.optim.Adam as it is by default (H2)
    gloo, fused Adam          and its fused kernel (H1): 1.00 here
    gloo's halves             reduce_scatter, fused Adam on a part, all_gather, all of gloo's own
    our halves                the same with our collectives over sockets, whole and in chunks (H3)
    shared, W replicas        one pass over shared memory, each rank has weights of its own
    shared, one copy          and one copy of the weights for all ranks
    shared, one copy, eager   by plain operations on tiles, without the fused kernel
    shared, compiled          torch.compile's kernel, which adds the gradients in registers
    copying                   memcpy of as many bytes as `one copy` reads and writes: the limit
                              (it writes half of them; the pass writes 3 of 8 words, and may
                              win; more ranks than cores do not copy at the same time, and seem
                              to copy faster than they can)

Weights are compared in the same run with those of one process that adds all gradients in the order
of ranks and steps torch's Adam as often: to the bit where the order is the same. Elsewhere nearly,
and not where gradients cancel out: Adam divides by their size, so there rounding is all there is.
A round begins when the cores are idle, or after a while anyway.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed

from benchmarks.compare import conditions
from penstock.program.layouts import part
from penstock.program.mesh import mesh
from penstock.step.groups import Groups
from penstock.step.native import all_gather_flat, reduce_scatter_flat
from penstock.step.shm import ShmComm
from penstock.step.shm_adam import EagerAdam, FusedAdam
from penstock.step.shm_fused import FusedPass
from penstock.step.shm_memory import Arena, meeting

LR, CANCELLED = 1e-3, 1e-3
CHUNK_ELEMENTS, CHUNKS_MAX = 2**20, 8
BASE, DEFAULT = "gloo, fused Adam", "gloo, Adam"
IDLE_SHARE, IDLE_S_MAX = 0.8, 3.0


@dataclass(kw_only=True)
class Way:
    """One way to update: its gradient is filled anew before each turn."""

    name: str
    run: Callable[[], object]
    grad: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    is_fused: bool = True
    """Whether its Adam is the fused one: the other rounds otherwise."""
    is_exact: bool = True
    """Whether it has the operations and the order of the reference."""
    times_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


# -- ways ------------------------------------------------------------------------------------


class Ways:
    """The tensors of a rank, and what can be done with them."""

    def __init__(self, rank: int, size: int, length: int, stack: ExitStack) -> None:
        self.rank, self.size, self.length = rank, size, length
        self.first = torch.randn(length, generator=torch.Generator().manual_seed(99))
        self.given = torch.randn(length, generator=torch.Generator().manual_seed(rank))
        self.start, self.stop = part(length, size, rank)
        self.chunks = chunks_of(length)
        size_bytes = 4 * length * 10 + ShmComm.need_bytes(size) + 2**20
        arena = Arena(meeting(), rank=rank, size=size, size_bytes=size_bytes)
        self.arena = stack.enter_context(arena)
        self.comm = stack.enter_context(ShmComm(self.arena))
        groups = stack.enter_context(Groups(mesh(dp=size)))
        self.scatter, self.gather = groups.comm("dp", "scatter"), groups.comm("dp", "gather")

    def state(self, count: int) -> list[torch.Tensor]:
        return [torch.zeros(count) for _ in range(2)]

    def reduced(self, name: str, grad: torch.Tensor) -> Way:
        return Way(name=name, run=lambda: self.comm.all_reduce(grad).wait(), grad=grad)

    def adam(self, name: str, **options: object) -> Way:
        """All_reduce in place, then torch's optimizer."""
        weight = torch.nn.Parameter(self.first.clone())
        weight.grad = torch.zeros(self.length)
        optimizer = torch.optim.Adam([weight], lr=LR, **options)  # type: ignore[arg-type]

        def run() -> None:
            distributed.all_reduce(weight.grad)
            optimizer.step()

        way = Way(name=name, run=run, grad=weight.grad, weight=weight.detach())
        way.is_fused, way.is_exact = bool(options), self.size == 2
        return way

    def gloos_halves(self) -> Way:
        weight, grad = self.first.clone(), torch.zeros(self.length)
        adam, state = FusedAdam(lr=LR), self.state(self.stop - self.start)
        mine, out = weight[self.start : self.stop], torch.zeros(self.stop - self.start)

        def run() -> None:
            reduce_scatter_flat(out, grad)
            adam.begin()
            adam(out, mine, *state)
            all_gather_flat(weight, mine)

        is_exact = self.size == 2
        return Way(name="gloo's halves", run=run, grad=grad, weight=weight, is_exact=is_exact)

    def our_halves(self, chunks: int) -> Way:
        """Chunks are reduced while others are updated and gathered: two lanes."""
        weight, grad = self.first.clone(), torch.zeros(self.length)
        bounds = [part(self.length, chunks, index) for index in range(chunks)]
        pieces = []
        for lo, hi in bounds:
            start, stop = part(hi - lo, self.size, self.rank)
            mine = weight[lo + start : lo + stop]
            out = grad[lo + start : lo + stop]
            pieces.append((grad[lo:hi], out, weight[lo:hi], mine, self.state(stop - start)))
        adam = FusedAdam(lr=LR)

        def run() -> None:
            adam.begin()
            scatters = [self.scatter.reduce_scatter(out, whole) for whole, out, *_ in pieces]
            gathers = []
            for scatter, (_, out, whole, mine, state) in zip(scatters, pieces, strict=True):
                scatter.wait()
                adam(out, mine, *state)
                gathers.append(self.gather.all_gather(whole, mine))
            for gather in gathers:
                gather.wait()

        name = "our halves" if chunks == 1 else f"our halves, {chunks} chunks"
        return Way(name=name, run=run, grad=grad, weight=weight)

    def shared(self, name: str, region: Any, copies: int, **options: Any) -> Way:
        grad, replica = self.arena.take(self.length), self.arena.take(self.length)
        weights = self.comm.everyones(replica)[:copies]
        weight = weights[self.rank if copies > 1 else 0]
        weight[self.start : self.stop] = self.first[self.start : self.stop]
        if copies > 1:
            weight.copy_(self.first)
        state = self.state(self.stop - self.start)
        grads = self.comm.everyones(grad)
        run = FusedPass(self.comm, region, grads=grads, weights=weights, state=state, **options)
        return Way(name=name, run=run, grad=grad, weight=weight)

    def copying(self) -> Way:
        count = (self.size + 6) * (self.stop - self.start) // 2
        source, target = torch.ones(count), torch.zeros(count)
        return Way(name="copying", run=lambda: target.copy_(source))

    def all(self, *, compiles: bool) -> list[Way]:
        plain = torch.zeros(self.length)
        ways = [
            Way(name="all_reduce", run=lambda: distributed.all_reduce(plain), grad=plain),
            self.reduced("all_reduce, staged", torch.zeros(self.length)),
            self.reduced("all_reduce, shared", self.arena.take(self.length)),
            self.adam(DEFAULT),
            self.adam(BASE, fused=True),
            self.our_halves(1),
            self.our_halves(self.chunks),
            self.shared(f"shared, {self.size} replicas", FusedAdam(lr=LR), self.size),
            self.shared("shared, one copy", FusedAdam(lr=LR), 1),
            self.shared("shared, one copy, eager", EagerAdam(lr=LR), 1, tile_elements=32 * 1024),
            self.copying(),
        ]
        ways[-2].is_fused = False
        if self.length % self.size == 0:  # gloo's own take equal parts only
            ways.insert(5, self.gloos_halves())
        if compiles:
            region = CompiledAdam(lr=LR)
            ways.insert(-1, self.shared("shared, compiled", region, 1, sums=True, **WHOLE))
            ways[-2].is_exact = False
        return ways

    def checks(self, ways: list[Way], num_steps: int) -> dict[str, float]:
        """Return how far the weights of each way are from the reference; fail if it is too far."""
        total = torch.zeros(self.length)
        for rank in range(self.size):
            total += torch.randn(self.length, generator=torch.Generator().manual_seed(rank))
        wholes = self.length % (64 * self.size * self.chunks) == 0
        worst = {}
        for is_fused in (True, False):
            weight = torch.nn.Parameter(self.first.clone())
            weight.grad = total
            optimizer = torch.optim.Adam([weight], lr=LR, fused=is_fused)
            for _ in range(num_steps):
                optimizer.step()
            for way in (way for way in ways if way.weight is not None and way.is_fused == is_fused):
                apart = (way.weight - weight.detach()).abs()
                if way.is_exact and wholes:
                    assert not apart.any(), f"{way.name}: {apart.max()} from the reference"
                worst[way.name] = float(apart[total.abs() > CANCELLED].max())
                assert worst[way.name] < 1e-5, f"{way.name}: {worst[way.name]} from the reference"
        return worst


def chunks_of(length: int) -> int:
    return min(CHUNKS_MAX, max(2, length // CHUNK_ELEMENTS))


WHOLE = {"tile_elements": 2**20}


class CompiledAdam:
    """Adam as torch.compile makes it, with the sum of all gradients inside."""

    def __init__(self, *, lr: float) -> None:
        self.lr, self.step = lr, 0
        self._size = self._scale = torch.zeros(())
        self._update = torch.compile(self._eager, dynamic=True)

    def begin(self) -> None:
        self.step += 1
        self._size = torch.tensor(self.lr / (1 - 0.9**self.step))
        self._scale = torch.tensor((1 - 0.999**self.step) ** -0.5)

    def __call__(self, grads: tuple[torch.Tensor, ...], *mine: torch.Tensor) -> None:
        self._update(grads, *mine, (self._size, self._scale))

    @staticmethod
    def _eager(
        grads: tuple[torch.Tensor, ...],
        weight: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        factors: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        size, scale = factors
        grad = grads[0]
        for other in grads[1:]:
            grad = grad + other
        exp_avg.copy_(exp_avg + (grad - exp_avg) * 0.1)
        exp_avg_sq.copy_(exp_avg_sq * 0.999 + grad * grad * 0.001)
        weight.copy_(weight - size * exp_avg / (exp_avg_sq.sqrt() * scale + 1e-8))


# -- one rank --------------------------------------------------------------------------------


def be_rank(rank: int, options: argparse.Namespace, store: str, told: Connection) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(store, options.ranks),
        rank=rank,
        world_size=options.ranks,
    )
    with ExitStack() as stack:
        made = Ways(rank, options.ranks, options.params, stack)
        ways = made.all(compiles=options.compile)
        waited = [idle_waited(rank) for _ in range(options.rounds + 1) if turn(ways, made.given)]
        checks = made.checks(ways, num_steps=options.rounds + 1)
        told.send(
            {
                # The first round is for first touches, connections and compilers.
                "times_s": {way.name: way.times_s[1:] for way in ways},
                "cpu_s": {way.name: way.cpu_s[1:] for way in ways},
                "checks": checks,
                "busy": sum(waited_s >= IDLE_S_MAX for waited_s in waited),
            }
        )
        distributed.barrier()
    distributed.destroy_process_group()


def turn(ways: list[Way], given: torch.Tensor) -> bool:
    for way in ways:
        if way.grad is not None:
            way.grad.copy_(given)
        distributed.barrier()
        cpu_s, begin_s = time.process_time(), time.perf_counter()
        way.run()
        way.times_s.append(time.perf_counter() - begin_s)
        way.cpu_s.append(time.process_time() - cpu_s)
    return True


def idle_waited(rank: int) -> float:
    """Wait until the cores are idle, all ranks together; return how long it took."""
    begin_s = time.monotonic()
    is_idle = torch.zeros(1)
    while not is_idle.item() and time.monotonic() - begin_s < IDLE_S_MAX:
        if rank == 0:
            is_idle.fill_(float(idle_share() > IDLE_SHARE))
        distributed.broadcast(is_idle, 0)
    waited = torch.tensor([0.0 if is_idle.item() else IDLE_S_MAX])
    distributed.broadcast(waited, 0)
    return waited.item()


def idle_share() -> float:
    def read() -> tuple[int, int]:
        numbers = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
        return numbers[3], sum(numbers)

    idle, total = read()
    time.sleep(0.1)
    later_idle, later_total = read()
    return (later_idle - idle) / max(1, later_total - total)


# -- all ranks -------------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(options.ranks)]
        processes = [
            context.Process(target=be_rank, args=(rank, options, f"{folder}/store", pipe[1]))
            for rank, pipe in enumerate(pipes)
        ]
        for process, pipe in zip(processes, pipes, strict=True):
            process.start()
            pipe[1].close()
        said = [pipe[0].recv() for pipe in pipes]
        for process in processes:
            process.join()
    rows = {}
    for name in said[0]["times_s"]:
        slowest = [max(turns) for turns in zip(*(s["times_s"][name] for s in said), strict=True)]
        cpu_s = [max(turns) for turns in zip(*(s["cpu_s"][name] for s in said), strict=True)]
        rows[name] = {"times_s": slowest, "cpu_s": cpu_s}
    return {"rows": rows, "checks": said[0]["checks"], "busy": said[0]["busy"]}


def report(result: dict[str, Any], options: argparse.Namespace) -> None:
    rows = result["rows"]
    base, default = rows[BASE], rows[DEFAULT]
    print(
        f"{options.ranks} ranks, {options.params:,} parameters, {options.rounds} rounds "
        f"({result['busy']} while the cores were busy); {conditions()}"
    )
    print(f"{'':28}{'min ms':>8}{'median':>8}{'CPU ms':>8}   of {BASE}: min, median, CPU")
    for name, row in rows.items():
        against = " ".join(f"{ratio:7.2f}" for ratio in ratios(base, row))
        times = f"{1e3 * min(row['times_s']):8.1f}{1e3 * median(row['times_s']):8.1f}"
        print(f"{name:28}{times}{1e3 * min(row['cpu_s']):8.1f}   {against}")
    one, limit = rows["shared, one copy"], rows["copying"]
    need_bytes = 4 * (options.ranks + 6) * options.params / options.ranks
    rate = need_bytes / min(one["times_s"]) / 1e9
    print(f"one copy: {rate:.1f} GB/s a rank, {ratios(limit, one)[0]:.2f} of copying as much")
    show("H1", base, one)
    show("H2", default, one)
    best = rows[f"our halves, {chunks_of(options.params)} chunks"]
    show("H3", base, best)
    if "gloo's halves" in rows:
        show("H3, gloo's halves", rows["gloo's halves"], best)
    worst = max(result["checks"].values())
    print(f"weights after {options.rounds + 1} steps are within {worst:g} of the reference")


def ratios(base: dict[str, list[float]], row: dict[str, list[float]]) -> tuple[float, ...]:
    return (
        min(base["times_s"]) / min(row["times_s"]),
        median(base["times_s"]) / median(row["times_s"]),
        min(base["cpu_s"]) / min(row["cpu_s"]),
    )


def show(name: str, base: dict[str, list[float]], row: dict[str, list[float]]) -> None:
    least, middle, cpu = ratios(base, row)
    print(f"{name}: {least:.1f} times by the least, {middle:.1f} by medians, {cpu:.1f} by CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--params", type=int, default=8 * 2**20)
    parser.add_argument("--compile", action="store_true", help="and a compiled region: a minute")
    parser.add_argument("--quick", action="store_true", help="three rounds of a million")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.params = 3, 2**20
    os.environ["OMP_NUM_THREADS"] = "1"
    result = compare(options)
    report(result, options)
    if options.json:
        options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
