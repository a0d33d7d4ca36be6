"""What does an optimizer cost beyond its all-reduce? Adam and LAMB, replicated and in slices.

    python -m benchmarks.sharded_update [--rounds 8] [--rate 1gbit] [--million 4] [--quick]

`all-reduce alone` is the limit of an exact step: it moves the same bytes and computes nothing. The
baselines reduce in place and then update replicated weights, as data parallel training does; the
schedules scatter, update slices of the state and gather, in chunks that overlap. With bf16 on the
wire half the bytes go, and the result is approximate. Weights must be those of the baseline.
"""

from __future__ import annotations

import argparse

import torch
from torch import distributed

import penstock.step as ps
from benchmarks.step_ranks import Way, main, parser_of

QUESTION = __doc__.splitlines()[0]
LR, B1, B2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01
CHUNKS = 16


@ps.program
def adam(g: ps.P["n"], w: ps.R["n"], m: ps.R["n"], v: ps.R["n"], t, lr):
    g = ps.all_reduce(g, "mean")
    m = ps.update(m, B1 * m + (1 - B1) * g)
    v = ps.update(v, B2 * v + (1 - B2) * g * g)
    step = (m / (1 - B1**t)) / ((v / (1 - B2**t)).sqrt() + EPS)
    return ps.update(w, w - lr * step)


@ps.program
def lamb(g: ps.P["n"], w: ps.R["n"], m: ps.R["n"], v: ps.R["n"], t, lr):
    g = ps.all_reduce(g, "mean")
    m = ps.update(m, B1 * m + (1 - B1) * g)
    v = ps.update(v, B2 * v + (1 - B2) * g * g)
    step = (m / (1 - B1**t)) / ((v / (1 - B2**t)).sqrt() + EPS) + DECAY * w
    trust = ps.norm(w) / ps.norm(step)
    return ps.update(w, w - lr * trust * step)


class Tensors:
    """Gradient, weights and state of one way, as at the beginning."""

    def __init__(self, program: ps.Program, rank: int) -> None:
        n = program["g"].type.shape[0]
        self._start = {"g": numbers(n, 1 + rank), "w": numbers(n, 0)}
        for name, power in (("m", 1), ("v", 2)):
            whole = numbers(n, 90).abs() ** power
            first, last = program[name].type.bounds(program.mesh, rank)[0]
            self._start[name] = whole[first:last]
        self.now = {name: tensor.clone() for name, tensor in self._start.items()}

    def reset(self) -> None:
        for name, tensor in self._start.items():
            self.now[name].copy_(tensor)


def numbers(length: int, seed: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed)) * 0.1


def torch_adam(t: Tensors, state: dict[str, torch.Tensor]) -> None:
    now = t.now
    distributed.all_reduce(now["g"])
    now["g"] /= distributed.get_world_size()
    torch._fused_adam_(
        [now["w"]],
        [now["g"]],
        [now["m"]],
        [now["v"]],
        [],
        [state["t"]],
        lr=LR,
        beta1=B1,
        beta2=B2,
        weight_decay=0.0,
        eps=EPS,
        amsgrad=False,
        maximize=False,
    )


def eager_lamb(t: Tensors) -> None:
    g, w, m, v = (t.now[name] for name in "gwmv")
    distributed.all_reduce(g)
    g /= distributed.get_world_size()
    m.mul_(B1).add_(g, alpha=1 - B1)
    v.mul_(B2).addcmul_(g, g, value=1 - B2)
    step = (m / (1 - B1)) / ((v / (1 - B2)).sqrt() + EPS) + DECAY * w
    w.add_(step, alpha=-LR * (w.norm() / step.norm()).item())


def ways(options: argparse.Namespace) -> dict[str, Way]:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    n = options.million * 1_000_000
    groups = ps.Groups(ps.mesh(dp=size))
    groups.__enter__()
    flat = numbers(n, 1 + rank)
    due = int(2 * (size - 1) / size * n * 4)
    out = {"all-reduce alone": Way(run=lambda: distributed.all_reduce(flat), due_bytes=due)}
    expected: dict[str, torch.Tensor] = {}

    def way(
        name: str, key: str, tensors: Tensors, run, *, close: float, share: float = 1.0
    ) -> None:
        def check() -> None:
            first = expected.setdefault(key, tensors.now["w"].clone())
            off = (tensors.now["w"] - first).abs().max().item()
            assert off <= close, f"{name} is off by {off}"

        out[name] = Way(run=run, check=check, reset=tensors.reset, due_bytes=int(due * share))

    for template in (adam, lamb):
        plain = template.on(ps.mesh(dp=size), n=n)
        base = Tensors(plain, rank)
        state = {"t": torch.zeros(())}
        if template is adam:
            run = lambda t=base, s=state: (s["t"].fill_(1.0), torch_adam(t, s))  # noqa: E731
            way("adam: all-reduce, torch fused", "adam", base, run, close=0.0)
        else:
            way("lamb: all-reduce, eager", "lamb", base, lambda t=base: eager_lamb(t), close=0.0)
        for name, program, share in rewritten(plain):
            tensors = Tensors(program, rank)
            step = ps.compile(program, groups, backend="auto", donate=("g",))
            way(
                f"{template.name}: {name}",
                template.name,
                tensors,
                lambda step=step, t=tensors: step(**t.now, t=1, lr=LR),
                close=1e-6 if share == 1.0 else 2e-3,
                share=share,
            )
    return out


def rewritten(plain: ps.Program) -> list[tuple[str, ps.Program, float]]:
    """Return schedules of a program: their names, and the share of the bytes that they send."""
    sliced = plain.split("g").sink("g.gather").keep_sliced("m", "v")
    last = sliced["w.gather"].inputs[0]
    if plain.name == "adam":
        fused = sliced.fuse("g.scatter", "w.gather", compute=True)
        chunked = fused.chunk(CHUNKS, "g.scatter", "w.gather").overlap()
        half = chunked.wire(dtype="bf16")
        exact = [("in slices", fused, 1.0), (f"in {CHUNKS} chunks", chunked, 1.0)]
        return [*exact, (f"in {CHUNKS} chunks, bf16 wire", half, 0.5)]
    # The norms need all of the step, so there are two runs of chunks with a meeting in between.
    # The weights' own norm needs no gradient: it is made while the first chunks are on their way.
    fused = sliced.fuse("g.scatter", "step", compute=True).fuse("mul.10", last)
    fused = fused.fuse("mul.7", "sum.1", name="weights").fuse("mul.8", "sum.2.part")
    chunked = fused.chunk(CHUNKS, "g.scatter", "step", name="down")
    chunked = chunked.chunk(CHUNKS, "mul.10", "w.gather", name="up")
    chunked = chunked.overlap("down", "weights").overlap("up")
    return [("in slices", fused, 1.0), (f"in {CHUNKS} chunks", chunked, 1.0)]


if __name__ == "__main__":
    parser = parser_of(QUESTION)
    parser.add_argument("--million", type=int, default=4, help="parameters")
    main("benchmarks.sharded_update", QUESTION, parser, "adam: all-reduce, torch fused")
