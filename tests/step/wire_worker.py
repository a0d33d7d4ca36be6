"""One rank on a host of its own: steps of some programs, and what its interface has sent for each.

python -m tests.step.wire_worker
"""

from __future__ import annotations

import json
import os

import torch
from benchmarks.step_ranks import interface_bytes
from tests.step.programs import adam
from torch import distributed

import penstock.step as ps

N = 1 << 20
STEPS = 4


def programs() -> dict[str, ps.Program]:
    plain = adam.on(ps.mesh(dp=distributed.get_world_size()), n=N)
    sliced = plain.split("g").sink("g.gather").keep_sliced("m", "v")
    chunked = sliced.chunk(4, "g.scatter", "w.gather").overlap()
    return {
        "all-reduce": plain,
        "slices": sliced,
        "chunks": chunked,
        "bf16 wire": chunked.wire(dtype="bf16"),
    }


def sent(program: ps.Program, groups: ps.Groups) -> tuple[int, int]:
    """Return what the plan says that a rank sends in some steps, and what its interface counted."""
    rank = distributed.get_rank()
    given = {
        node.name: torch.ones(node.type.local_shape(program.mesh, rank))
        for node in program.inputs
        if node.op == "input"
    }
    with ps.compile(program, groups, backend="tiled") as step:
        step(**given, t=1, lr=0.1)
        distributed.barrier()
        before = interface_bytes()
        for t in range(STEPS):
            step(**given, t=t + 2, lr=0.1)
        distributed.barrier()
        return STEPS * sum(step.plan.sent_bytes().values()), interface_bytes() - before


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    with ps.Groups(ps.mesh(dp=distributed.get_world_size())) as groups:
        found = {name: sent(program, groups) for name, program in programs().items()}
    print(json.dumps(found), flush=True)  # noqa: T201 - whoever started us reads it
    distributed.barrier()
    os._exit(0)
