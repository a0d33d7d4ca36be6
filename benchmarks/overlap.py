"""Does a product hide its all-reduce? Matmul, all-reduce, bias, dropout and residual, in chunks.

    python -m benchmarks.overlap [--rounds 8] [--rate 1gbit] [--rows 2048] [--width 1024] [--quick]
    python -m benchmarks.overlap --host

`sequential` is the program as it is written, carried out one task after the other; `torch, eager`
is the same in plain torch. The others cut the rows into chunks whose all-reduces run while the next
are multiplied. `product` and `all-reduce` alone are the limits: no schedule is faster than the
longer of the two. Every way must give the values of the first.

With `--host` the ranks are processes of one host (H5), and there are two sets of ways: over gloo's
sockets, and over shared memory (`shm`). Both are beside `sequential, fused` over gloo.
"""

from __future__ import annotations

import argparse

import torch
from torch import distributed

import penstock.step as ps
from benchmarks.step_ranks import Way, main, parser_of

QUESTION = __doc__.splitlines()[0]
CHUNKS = (2, 4, 8, 16)


@ps.program(axis="tp")
def block(x: ps.S(1)["t", "h"], w: ps.S(0)["h", "d"], b: ps.R["d"], r: ps.R["t", "d"], seed: int):
    y = ps.all_reduce(x @ w)
    return ps.dropout(y + b, 0.1, seed) + r


def schedules(program: ps.Program) -> dict[str, ps.Program]:
    """Return the program as it is written, and cut into chunks."""
    fused = program.fuse("add.1", program.outputs[0])
    chosen = {"sequential": program, "sequential, fused": fused}
    for k in CHUNKS:
        chosen[f"{k} chunks"] = fused.chunk(k, "matmul.1", program.outputs[0], dim=0).overlap()
    split = program.split("y").sink("y.gather")
    split = split.fuse("add.1", split[split.outputs[0]].inputs[0])
    chosen["8 chunks, scatter and gather"] = split.chunk(
        8, "matmul.1", split.outputs[0], dim=0
    ).overlap()
    return chosen


def ways(options: argparse.Namespace) -> dict[str, Way]:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(7 + rank)
    program = block.on(ps.mesh(tp=size), t=options.rows, h=options.width * size, d=options.width)
    x = torch.randn(options.rows, options.width)
    w = torch.randn(options.width, options.width) / options.width**0.5
    torch.manual_seed(7)
    given = {"x": x, "w": w, "b": torch.randn(options.width), "seed": 3}
    given["r"] = torch.randn(options.rows, options.width)
    backends = ("gloo", "shm") if options.is_host else ("gloo",)
    steps = {}
    for backend in backends:
        groups = ps.Groups(program.mesh, backend=backend, shared="256MB")
        groups.__enter__()
        beside = f"{backend}: " if options.is_host and backend != "gloo" else ""
        for name, one in schedules(program).items():
            steps[f"{beside}{name}"] = ps.compile(one, groups, backend=options.backend)
    kept: dict[str, torch.Tensor] = {}

    def run(name: str) -> None:
        kept[name] = steps[name](**given)[0]

    def check(name: str) -> None:
        first = kept["sequential"]
        off = (kept[name] - first).abs().max().item()
        assert off <= 1e-4 * first.abs().max().item(), f"{name} is off by {off}"

    def eager() -> None:
        y = x @ w
        distributed.all_reduce(y)
        kept["eager"] = torch.nn.functional.dropout(y + given["b"], 0.1) + given["r"]

    product = x @ w
    due = int(2 * (size - 1) / size * product.numel() * 4)
    out = {
        name: Way(
            run=lambda name=name: run(name), check=lambda name=name: check(name), due_bytes=due
        )
        for name in steps
    }
    out["torch, eager"] = Way(run=eager, due_bytes=due)
    out["product alone"] = Way(run=lambda: torch.mm(x, w, out=product), due_bytes=0)
    out["all-reduce alone"] = Way(run=lambda: distributed.all_reduce(product), due_bytes=due)
    return out


if __name__ == "__main__":
    parser = parser_of(QUESTION)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--backend", default="auto", help="of fused regions")
    main("benchmarks.overlap", QUESTION, parser, "sequential, fused")
