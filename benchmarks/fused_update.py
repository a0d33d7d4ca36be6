"""What does one fused pass over shared memory save, beside all_reduce and Adam one after the other?

    python -m benchmarks.fused_update [--rounds 12] [--ranks 2] [--million 8] [--compile] [--quick]

Ranks are processes of one host with one thread each; their gradients are flat and are reduced in
place. Rows:

    all_reduce                gloo alone: what it would cost if Adam cost nothing
    all_reduce, staged        of any tensor, over shared memory
    all_reduce, shared        of a tensor that lives there
    gloo, Adam                and torch.optim.Adam as it is by default (H2)
    gloo, fused Adam          and its fused kernel (H1): the baseline
    gloo's halves             reduce_scatter, fused Adam on a part, all_gather, all of gloo's own
    our halves                the same by our collectives over sockets, whole and in chunks (H3)
    program, sockets          the same as a program, split and in slices
    shared                    that program, fused, over shared memory: one pass over gradients and
                              weights of all ranks
    shared, tiles             without a compiler
    shared, compiled          by torch.compile
    copying                   memcpy of as many bytes as `shared` reads and writes: the limit (it
                              writes half of them, the pass 4 of 9 words, and may win; more ranks
                              than cores do not copy at the same time, and seem to copy faster
                              than they can)

Each way goes on with its own weights and state; gradients are written anew before each turn. After
it weights are compared with those of one process that adds all gradients in the order of ranks and
steps torch's fused Adam as often; between our own ways to the bit, where the order of additions is
the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch
from torch import distributed

import penstock.step as ps
from benchmarks.step_ranks import Way, main, parser_of, times_of
from penstock.step.comms.native import all_gather_flat, reduce_scatter_flat
from penstock.step.program.layouts import part

QUESTION = __doc__.splitlines()[0]
LR, B1, B2, EPS, T = 1e-3, 0.9, 0.999, 1e-8, 10
FACTORS = {"rate": LR / (1 - B1**T), "scale": (1 - B2**T) ** -0.5}
CHUNKS = 8
BASE, DEFAULT = "gloo, fused Adam", "gloo, Adam"
SHARED, CHUNKED = "shared", f"our halves, {CHUNKS} chunks"
CLOSE = 1e-5


@ps.program
def adam(g: ps.P["n"], w: ps.R["n"], m: ps.R["n"], v: ps.R["n"], rate, scale):
    """Adam with its corrections in two numbers, as torch's kernels have it."""
    g = ps.all_reduce(g)
    m = ps.update(m, B1 * m + (1 - B1) * g)
    v = ps.update(v, B2 * v + (1 - B2) * g * g)
    return ps.update(w, w - rate * m / (v.sqrt() * scale + EPS))


class Tensors:
    """Gradient, weights and state of one way."""

    def __init__(self, start: dict[str, torch.Tensor], take: Callable[[int], torch.Tensor]) -> None:
        self.now = {
            name: take(tensor.numel()) if name in "gw" else torch.empty_like(tensor)
            for name, tensor in start.items()
        }
        for name, tensor in start.items():
            self.now[name].copy_(tensor)
        self.num_steps = 0


class Reference:
    """What one process has after so many steps."""

    def __init__(self, start: dict[str, torch.Tensor], total: torch.Tensor) -> None:
        self._now = {name: tensor.clone() for name, tensor in start.items()} | {"g": total}
        self._num_steps = 0
        self._ours: torch.Tensor | None = None

    def check(self, tensors: Tensors, *, to_the_bit: bool) -> None:
        """Fail where weights are not its own. Ways take turns, so it never has to go back."""
        while self._num_steps < tensors.num_steps:
            fused_adam(self._now)
            self._num_steps, self._ours = self._num_steps + 1, None
        weight = tensors.now["w"]
        off = (weight - self._now["w"]).abs().max().item()
        assert off <= CLOSE, f"{off} from the reference"
        if to_the_bit:
            if self._ours is None:
                self._ours = weight.clone()
            assert torch.equal(weight, self._ours), "ours are not the same bits"


class Ways:
    """What a rank can do with its tensors."""

    def __init__(self, n: int) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.n, self.plain = n, adam.on(ps.mesh(dp=self.size), n=n)
        sliced = self.plain.split("g").sink("g.gather").keep_sliced("m", "v")
        self.fused = sliced.fuse("g.scatter", "w.gather")
        self.part = slice(*self.fused["m"].type.bounds(self.plain.mesh, self.rank)[0])
        self.start = {"g": numbers(n, self.rank), "w": numbers(n, 90)}
        self.start |= {"m": numbers(n, 91) * 0.1, "v": numbers(n, 92).square() * 0.1}
        self.sliced = {k: x[self.part] if k in "mv" else x for k, x in self.start.items()}
        self.gloo = ps.Groups(self.plain.mesh)
        shared_bytes = 4 * 7 * n + 2**20
        self.shm = ps.Groups(self.plain.mesh, backend="shm", shared=shared_bytes)
        for groups in (self.gloo, self.shm):
            groups.__enter__()
        total = numbers(n, 0)
        for rank in range(1, self.size):
            total += numbers(n, rank)
        self.reference = Reference(self.start, total)

    def way(self, run: Callable[[], object], tensors: Tensors, *, is_ours: bool = False) -> Way:
        """Return a way whose weights must be the reference's, and of ours the same bits."""
        grad = tensors.now["g"]

        def counted() -> None:
            tensors.num_steps += 1
            run()

        def check() -> None:
            self.reference.check(tensors, to_the_bit=is_ours and self.size == 2)

        return Way(run=counted, check=check, reset=lambda: grad.copy_(self.start["g"]))

    def reduced(self, grad: torch.Tensor) -> Way:
        comm = self.shm.comm("dp", "bare")
        reset = lambda: grad.copy_(self.start["g"])  # noqa: E731
        return Way(run=lambda: comm.all_reduce(grad).wait(), reset=reset)

    def adam(self, **options: bool) -> Way:
        """All_reduce in place, then torch's optimizer."""
        tensors = Tensors(self.start, torch.empty)
        now = tensors.now
        weight = torch.nn.Parameter(now["w"])
        weight.grad = now["g"]
        optimizer = torch.optim.Adam([weight], lr=LR, betas=(B1, B2), eps=EPS, **options)
        steps = torch.tensor(float(T - 1))
        optimizer.state[weight] = {"exp_avg": now["m"], "exp_avg_sq": now["v"], "step": steps}

        def run() -> None:
            steps.fill_(T - 1)
            distributed.all_reduce(now["g"])
            optimizer.step()

        return self.way(run, tensors)

    def gloos_halves(self) -> Way:
        tensors = Tensors(self.sliced, torch.empty)
        now = tensors.now
        out = torch.zeros_like(now["m"])
        mine = now | {"g": out, "w": now["w"][self.part]}

        def run() -> None:
            reduce_scatter_flat(out, now["g"])
            fused_adam(mine)
            all_gather_flat(now["w"], mine["w"])

        return self.way(run, tensors)

    def our_halves(self, chunks: int) -> Way:
        """Chunks are reduced while others are updated and gathered: two lanes."""
        scatter, gather = self.gloo.comm("dp", "scatter"), self.gloo.comm("dp", "gather")
        tensors = Tensors(self.start, torch.empty)
        pieces = []
        for index in range(chunks):
            whole = slice(*part(self.n, chunks, index))
            at, stop = part(whole.stop - whole.start, self.size, self.rank)
            here = slice(whole.start + at, whole.start + stop)
            now = {name: tensor[here] for name, tensor in tensors.now.items()}
            pieces.append((tensors.now["g"][whole], tensors.now["w"][whole], now))

        def run() -> None:
            scatters = [scatter.reduce_scatter(now["g"], grad) for grad, _, now in pieces]
            gathers = []
            for scattered, (_, weight, now) in zip(scatters, pieces, strict=True):
                scattered.wait()
                fused_adam(now)
                gathers.append(gather.all_gather(weight, now["w"]))
            for gathered in gathers:
                gathered.wait()

        return self.way(run, tensors)

    def sockets(self) -> Way:
        return self.program(self.fused, self.gloo, Tensors(self.sliced, torch.empty), "auto")

    def shared(self, backend: str) -> Way:
        tensors = Tensors(self.sliced, lambda count: self.shm.take(count, axis="dp"))
        return self.program(self.fused, self.shm, tensors, backend)

    def program(
        self, program: ps.Program, groups: ps.Groups, tensors: Tensors, backend: str
    ) -> Way:
        step = ps.compile(program, groups, backend=backend, donate=("g",))
        is_ours = backend != "compile"
        return self.way(lambda: step(**tensors.now, **FACTORS), tensors, is_ours=is_ours)

    def copying(self) -> Way:
        count = (2 * self.size + 5) * (self.part.stop - self.part.start) // 2
        source, target = torch.ones(count), torch.zeros(count)
        return Way(run=lambda: target.copy_(source))

    def all(self, *, compiles: bool) -> dict[str, Way]:
        plain = torch.zeros(self.n)
        out = {
            "all_reduce": Way(run=lambda: distributed.all_reduce(plain)),
            "all_reduce, staged": self.reduced(torch.zeros(self.n)),
            "all_reduce, shared": self.reduced(self.shm.take(self.n, axis="dp")),
            DEFAULT: self.adam(),
            BASE: self.adam(fused=True),
        }
        if self.n % self.size == 0:  # gloo's own take equal parts only
            out["gloo's halves"] = self.gloos_halves()
        out["our halves"] = self.our_halves(1)
        out[CHUNKED] = self.our_halves(CHUNKS)
        out["program, sockets"] = self.sockets()
        out[SHARED] = self.shared("auto")
        out["shared, tiles"] = self.shared("tiled")
        if compiles:
            out["shared, compiled"] = self.shared("compile")
        return out | {"copying": self.copying()}


def numbers(length: int, seed: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


def fused_adam(now: dict[str, torch.Tensor]) -> None:
    torch._fused_adam_(
        [now["w"]],
        [now["g"]],
        [now["m"]],
        [now["v"]],
        [],
        [torch.tensor(float(T))],
        lr=LR,
        beta1=B1,
        beta2=B2,
        weight_decay=0.0,
        eps=EPS,
        amsgrad=False,
        maximize=False,
    )


def ways(options: argparse.Namespace) -> dict[str, Way]:
    n = 2**20 * (1 if options.quick else options.million)
    return Ways(n).all(compiles=options.compile)


def show(name: str, rows: list[dict], base: str, way: str) -> None:
    """Print how many times faster a way is than another, by several measures."""
    times = times_of(rows)
    cpu = [min(row["cpu_s"] for row in rows if row["way"] == each) for each in (base, way)]
    least = min(times[base]) / min(times[way])
    middle = median(times[base]) / median(times[way])
    print(
        f"{name}: {least:.1f} times by the least, {middle:.1f} by medians, "
        f"{cpu[0] / cpu[1]:.1f} by CPU"
    )


if __name__ == "__main__":
    parser = parser_of(QUESTION, rounds=12, is_host=True)
    parser.add_argument("--million", type=int, default=8, help="of 2**20 parameters")
    parser.add_argument("--compile", action="store_true", help="and torch.compile: a minute")
    found = main("benchmarks.fused_update", QUESTION, parser, BASE)
    print()
    show("H1", found, BASE, SHARED)
    show("H2", found, DEFAULT, SHARED)
    show("H3", found, BASE, CHUNKED)
    if any(row["way"] == "gloo's halves" for row in found):
        show("H3, gloo's halves", found, "gloo's halves", CHUNKED)
    show("limit, of it", found, "copying", SHARED)
