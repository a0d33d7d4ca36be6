"""Two tiers and pipelines on real ranks: what crosses a slow axis, and that values stay."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from tests.step.ranks import run_ranks

import penstock.step as ps
from penstock.step.program import blocks
from penstock.step.program.interpret import interpret

N = 4096
ROWS, WIDTH, HIDDEN = 16, 8, 12


def hierarchy(rank: int, size: int) -> dict[str, Any]:
    """Sum over two axes, flat and axis by axis; return how far off, and bytes by axis."""

    @ps.program
    def total(g: ps.P["n"]):
        g = ps.all_reduce(g)
        return g * 1.0

    flat = total.on(ps.mesh(dp=size), n=N).factor("dp", ("node", 2), ("local", size // 2))
    g = torch.arange(N, dtype=torch.float32) * (rank + 1)
    expected = torch.arange(N, dtype=torch.float32) * sum(range(1, size + 1))
    out: dict[str, Any] = {}
    with ps.Groups(flat.mesh, backend={"local": "shm", "node": "gloo"}) as groups:
        for name, program in (("flat", flat), ("hier", flat.hier("g", inner="local"))):
            with ps.compile(program, groups) as step:
                found = step(g=g)[0]
                off = (found - expected).abs().max().item() / expected.max().item()
            out[name] = off
        out["across_bytes"] = groups.comm("node", "net:node").sent_bytes
    return out


def test_between_nodes_goes_no_more_than_a_local_ranks_part() -> None:
    for size in (2, 4):
        for found in run_ranks(hierarchy, size):
            assert found["flat"] < 1e-6
            assert found["hier"] < 1e-6
            # Each of the local ranks sends its part once there and once back, to one other node.
            assert found["across_bytes"] == 4 * N // (size // 2)


def stage_inputs(program: ps.Program) -> dict[str, Any]:
    """Return what ranks are given: other numbers on each stage, zeros in the inboxes."""
    mesh, draws, out = program.mesh, np.random.default_rng(3), {}
    for node in program.inputs:
        if node.op == "scalar":
            out[node.name] = 3
            continue
        wholes = [draws.standard_normal(node.type.shape) for _ in range(mesh.size("pp"))]
        held = []
        for rank in range(mesh.num_ranks):
            cut = tuple(slice(*each) for each in node.type.bounds(mesh, rank))
            stage = mesh.coordinate(rank, "pp") if node.type.layout("pp").kind == "L" else 0
            held.append(wholes[stage][cut] * (node.name != "inbox"))
        out[node.name] = held
    return out


def pipeline(rank: int, size: int) -> dict[str, Any]:
    """Run stages as they are written and sliced; return how far off, and bytes along the pipe."""
    written = blocks.stage.on(ps.mesh(pp=2, tp=size // 2), t=ROWS, d=WIDTH, h=HIDDEN)
    programs = {
        "written": written,
        "split": written.split("send.1", axis="tp", dim=0),
        "sunk": written.split("y", dim=0).sink("y.gather"),
    }
    out: dict[str, Any] = {}
    for name, program in programs.items():
        given = stage_inputs(program)
        expected = interpret(program, given, iterations=3)
        mine = {
            k: v if isinstance(v, int) else torch.tensor(v[rank], dtype=torch.float32)
            for k, v in given.items()
        }
        with ps.Groups(program.mesh, backend={"tp": "shm"}) as groups:
            with ps.compile(program, groups, backend="tiled") as step:
                for _ in range(3):
                    y = step(**mine)[0]
            sent_bytes = groups.comm("pp", "net:pp").sent_bytes
        pairs = ((y, expected.outputs[0]), (mine["inbox"], expected.states["inbox"]))
        off = max(
            np.abs(found.numpy() - want[rank]).max() / (1 + np.abs(want[rank]).max())
            for found, want in pairs
        )
        out[name] = (float(off), sent_bytes / 3)
    return out


def test_sliced_sends_are_half_and_activations_are_the_interpreters() -> None:
    for rank, found in enumerate(run_ranks(pipeline, 4)):
        whole = 4 * math.prod((ROWS, WIDTH)) if rank < 2 else 0  # the last stage sends to nobody
        for name, (off, sent_bytes) in found.items():
            assert off < 1e-6, f"{name} is off by {off} on rank {rank}"
            assert sent_bytes == (whole if name == "written" else whole / 2), name
