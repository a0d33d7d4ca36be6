"""What does a pipeline send twice? Stages of two tensor-parallel ranks: whole, and in slices.

    python -m benchmarks.pipeline [--rounds 8] [--rate 1gbit] [--rows 2048] [--width 1024] [--quick]

Two hosts with a stage on each; its two ranks share memory. Both ranks of a stage have the whole
activation, and as it is written (`program.blocks.stage`) both send it. `split` of the send lets
each send its half and gather inside the next stage; `split` and `sink` of the all-reduce before
it come to the same, and what is sent was never gathered. `sent` is what the first host's interface
has counted, `due` what the program's sends add up to. Activations must be the interpreter's.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
import torch
from torch import distributed

import penstock.step as ps
from benchmarks.step_ranks import Way, main, parser_of
from penstock.step.program import blocks
from penstock.step.program.interpret import interpret

QUESTION = __doc__.splitlines()[0]
MESH = ps.mesh(pp=2, tp=2)
CHUNKS = 4
HERE = ps.R.over("tp") & ps.L.over("pp")


@ps.program(axis="tp")
def hand_on(y: HERE["t", "d"], inbox: HERE["t", "d"]):
    """Nothing but the way from one stage to the next."""
    return ps.update(inbox, ps.send(y, to="next", axis="pp"))


def schedules(options: argparse.Namespace) -> dict[str, ps.Program]:
    """Return the programs; those of one kind begin with the same word."""
    sizes = {"t": options.rows, "d": options.width}
    send = hand_on.on(MESH, **sizes)
    stage = blocks.stage.on(MESH, **sizes, h=options.hidden)
    fused = stage.fuse("add.1", "add.2")
    sliced = stage.split("y", dim=0).sink("y.gather").fuse("add.1", "add.2")
    chunks = sliced.chunk(CHUNKS, "matmul.1", "inbox.gather", dim=0).overlap()
    return {
        "send: as written": send,
        "send: split": send.split("send.1", dim=0),
        "stage: as written": fused,
        "stage: split": fused.split("send.1", dim=0),
        "stage: never gathered": sliced,
        f"stage: never gathered, {CHUNKS} chunks": chunks,
    }


def inputs(program: ps.Program) -> dict[str, object]:
    """Return what each rank is given, with the numbers of its coordinates."""
    mesh, out = program.mesh, {}
    draws = np.random.default_rng(5)
    for node in program.inputs:
        if node.op == "scalar":
            out[node.name] = 3
            continue
        # Stages have other numbers, the ranks of a stage parts of the same.
        of_stage = [draws.standard_normal(node.type.shape) * 0.3 for _ in range(mesh.size("pp"))]
        held = []
        for rank in range(mesh.num_ranks):
            where = tuple(slice(*each) for each in node.type.bounds(mesh, rank))
            number = mesh.coordinate(rank, "pp") if node.type.layout("pp").kind == "L" else 0
            held.append(of_stage[number][where])
        out[node.name] = [np.zeros_like(each) for each in held] if node.name == "inbox" else held
    return out


def due_bytes(program: ps.Program) -> int:
    """Return what the ranks of the first stage send to the second."""
    (send,) = [node for node in program.nodes if node.op == "send"]
    return sum(4 * math.prod(send.type.local_shape(MESH, rank)) for rank in range(MESH.size("tp")))


def ways(options: argparse.Namespace) -> dict[str, Way]:
    rank = distributed.get_rank()
    groups = ps.Groups(MESH, backend={"tp": "shm", "pp": "gloo"}, shared="256MB")
    groups.__enter__()
    out = {}
    for name, program in schedules(options).items():
        step = ps.compile(program, groups, backend="tiled")
        given = inputs(program)
        expected = interpret(program, given, iterations=2)
        mine = {
            k: v if isinstance(v, int) else torch.tensor(v[rank], dtype=torch.float32)
            for k, v in given.items()
        }
        kept: dict[str, torch.Tensor] = {}

        def run(step: ps.Step = step, mine: dict = mine, kept: dict = kept) -> None:
            kept["y"] = step(**mine)[0]

        def check(name: str = name, expected=expected, mine: dict = mine, kept=kept) -> None:
            # From the second time on every stage has its input, and that is always the same.
            for found, want in (
                (kept["y"], expected.outputs[0][rank]),
                (mine["inbox"], expected.states["inbox"][rank]),
            ):
                off = np.abs(found.numpy() - want).max()
                assert off <= 1e-4 * (1 + np.abs(want).max()), f"{name} is off by {off}"

        run()
        distributed.barrier()
        written = f"{name.partition(':')[0]}: as written"
        out[name] = Way(run=run, check=check, due_bytes=due_bytes(program), against=written)
    return out


if __name__ == "__main__":
    parser = parser_of(QUESTION, ranks=4, ranks_of_host=2)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    main("benchmarks.pipeline", QUESTION, parser, "stage: as written")
