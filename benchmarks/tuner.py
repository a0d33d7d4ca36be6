"""Does the tuner find what a person would, in time, and never something slower?

    python -m benchmarks.tuner [--rounds 8] [--rate 1gbit] [--case block|adam] [--quick]
                               [--budget 30]

Every rank tunes the program as it is written; then what came out takes turns with the program as it
is written and with schedules made by hand: chunks of several numbers, with and without fused work,
which is what a person with this machine and an hour would try. The tuner should be within a few
per cent of the best of them and never behind the first. Every way must give the values of that.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import distributed

import penstock.step as ps
from benchmarks.step_ranks import Way, main, parser_of
from penstock.step.program.nodes import Rewrite
from penstock.step.tuner.trial import MeasuredTrials
from penstock.step.tuner.tune import Tuned, tune

QUESTION = __doc__.splitlines()[0]
CHUNKS = (4, 8, 16)
SIZE = {"block": 2048, "adam": 1 << 22}


@ps.program(axis="dp")
def block(x: ps.S(1)["t", "h"], w: ps.S(0)["h", "d"], b: ps.R["d"], r: ps.R["t", "d"]):
    return ps.all_reduce(x @ w) + b + r


@ps.program(axis="dp")
def adam(g: ps.P["n"], w: ps.R["n"], m: ps.R["n"], v: ps.R["n"], t, lr, b1=0.9, b2=0.999, eps=1e-8):
    g = ps.all_reduce(g, "mean")
    m = ps.update(m, b1 * m + (1 - b1) * g)
    v = ps.update(v, b2 * v + (1 - b2) * g * g)
    step = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
    return ps.update(w, w - lr * step)


def case(options: argparse.Namespace) -> tuple[ps.Program, dict[str, object]]:
    """Return the program and what this rank gives it."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    count = SIZE[options.case]
    torch.manual_seed(7 + rank)
    if options.case == "adam":
        given: dict[str, object] = {"g": torch.randn(count), "t": 1, "lr": 1e-3}
        torch.manual_seed(7)
        given |= {"w": torch.randn(count), "m": torch.zeros(count), "v": torch.zeros(count)}
        return adam.on(ps.mesh(dp=size), n=count), given
    x, w = torch.randn(count, 1024), torch.randn(1024, 1024) / 32
    torch.manual_seed(7)
    given = {"x": x, "w": w, "b": torch.randn(1024), "r": torch.randn(count, 1024)}
    return block.on(ps.mesh(dp=size), t=count, h=1024 * size, d=1024), given


def by_hand(program: ps.Program) -> dict[str, ps.Program]:
    """Return what a person would try."""
    move = next(node for node in program.nodes if node.op == "all_reduce")
    names = [node.name for node in program.nodes if node.inputs and node.type.ndim]
    after = names[names.index(move.name) + 1 :]
    fused = program.fuse(*after)
    cut = names if program.name == "block" else [move.name, *after]
    out = {"fused": fused}
    for count in CHUNKS:
        out[f"{count} chunks"] = program.chunk(count, *cut).overlap()
        out[f"fused, {count} chunks"] = fused.chunk(count, *cut).overlap()
    return out


def told(tuned: Tuned) -> None:
    """Say on the terminal what the tuner has done, and what it had thought of each schedule."""
    words = [str(tuned).rstrip(), "  predicted   measured"]
    for tried in tuned.tried:
        how = " · ".join(_short(rewrite) for rewrite in tried.schedule) or "as written"
        words.append(f"  {1e3 * tried.predicted_s:6.1f} ms  {1e3 * tried.seconds:6.1f} ms  {how}")
    print("\n".join(words), file=sys.stderr, flush=True)


def _short(rewrite: Rewrite) -> str:
    numbers = [str(arg) for arg in rewrite.args if isinstance(arg, int)]
    return f"{rewrite.name}({', '.join(numbers)})" if numbers else rewrite.name


def ways(options: argparse.Namespace) -> dict[str, Way]:
    program, given = case(options)
    groups = ps.Groups(program.mesh)
    groups.__enter__()
    measure = MeasuredTrials(groups, given, backend=options.backend)
    tuned = tune(program, groups, given, budget_s=options.budget, cache=None, measure=measure)
    if distributed.get_rank() == 0:
        told(tuned)
    chosen = {"as written": program, "tuned": tuned.program} | by_hand(program)
    steps = {name: ps.compile(one, groups, backend=options.backend) for name, one in chosen.items()}
    start = {k: v.clone() for k, v in given.items() if isinstance(v, torch.Tensor)}
    kept: dict[str, torch.Tensor] = {}

    def reset() -> None:
        for name, tensor in start.items():
            given[name].copy_(tensor)

    def run(name: str) -> None:
        kept[name] = steps[name](**given)[0]

    def check(name: str) -> None:
        if name == "as written":
            kept["first"] = kept[name].clone()
        off = (kept[name] - kept["first"]).abs().max().item()
        assert off <= 1e-4 * kept["first"].abs().max().item(), f"{name} is off by {off}"

    due = sum(steps["as written"].plan.sent_bytes().values())
    return {
        name: Way(
            run=lambda name=name: run(name),
            check=lambda name=name: check(name),
            reset=reset,
            due_bytes=due,
        )
        for name in steps
    }


if __name__ == "__main__":
    parser = parser_of(QUESTION)
    parser.add_argument("--case", choices=tuple(SIZE), default="block")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds for the tuner")
    parser.add_argument("--backend", default="tiled", help="of fused regions")
    main("benchmarks.tuner", QUESTION, parser, "as written")
