"""What ranks on GPUs do for the tests of peer pointers; each returns what was wrong, or figures.

Apart from the tests so that it can be run where there is a GPU and no pytest, see
benchmarks/lanes_gpu.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from tests.step.programs import Case, adam, cases, given_for

import penstock.step as ps
from penstock.errors import OptionError
from penstock.step.comms.comm import payload_bytes
from penstock.step.comms.peer import PeerComm
from penstock.step.comms.peer_memory import PeerArena
from penstock.step.comms.shm_memory import meeting
from penstock.step.program.interpret import interpret, scattered
from penstock.step.program.layouts import part

LENGTHS = (1, 7, 1000, 5001)
STAGE_BYTES = 4096


def values(rank: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers: sums are the same in any order and type."""
    return ((torch.arange(length, device="cuda") * (rank + 3)) % 11 - 5).to(dtype)


def reduced(op: str, size: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    all_ = torch.stack([values(rank, length, torch.float64) for rank in range(size)])
    made = {"sum": all_.sum(0), "mean": all_.mean(0), "max": all_.amax(0), "min": all_.amin(0)}
    return made[op].to(dtype)


def operations(rank: int, size: int, waits: bool) -> list[str]:
    """Call everything a Comm can, in the arena and outside, and return what was wrong."""
    wrong: list[str] = []
    arena = PeerArena(meeting(), rank=rank, size=size, size_bytes="32MB")
    with arena, PeerComm(arena, stage_bytes=STAGE_BYTES, waits=waits) as comm:
        for length, inside in itertools.product(LENGTHS, (True, False)):
            for name, is_right in _checked(comm, length, inside):
                if not is_right:
                    wrong.append(f"{name} of {length}, {'in' if inside else 'out of'} the arena")
        wrong += _in_order(comm)
    return wrong


def placed(comm: PeerComm, tensor: torch.Tensor, inside: bool) -> torch.Tensor:
    return comm.arena.take(tensor.numel(), tensor.dtype).copy_(tensor) if inside else tensor.clone()


def _checked(comm: PeerComm, length: int, inside: bool) -> list[tuple[str, bool]]:
    return [
        *_reductions(comm, length, inside),
        *_parts(comm, length, inside),
        *_passes(comm, length, inside),
    ]


def _reductions(comm: PeerComm, length: int, inside: bool) -> list[tuple[str, bool]]:
    rank, size, out = comm.rank, comm.size, []
    for op in ("sum", "mean", "max", "min"):
        tensor = placed(comm, values(rank, length), inside)
        comm.all_reduce(tensor, op=op).wait()
        out.append((f"all_reduce {op}", bool(torch.allclose(tensor, reduced(op, size, length)))))
    for dtype in (torch.bfloat16, torch.float64, torch.int64):
        tensor = placed(comm, values(rank, length, dtype), inside)
        comm.all_reduce(tensor).wait()
        expected = reduced("sum", size, length, dtype)
        out.append((f"all_reduce {dtype}", torch.equal(tensor, expected)))
    tensor = placed(comm, values(rank, length), inside)
    comm.all_reduce(tensor, wire="bf16").wait()
    out.append(("all_reduce over bf16", torch.equal(tensor, reduced("sum", size, length))))
    root, tensor = size - 1, placed(comm, values(rank, length), inside)
    comm.reduce(tensor, root=root).wait()
    expected = reduced("sum", size, length) if rank == root else values(rank, length)
    return [*out, ("reduce", torch.equal(tensor, expected))]


def _parts(comm: PeerComm, length: int, inside: bool) -> list[tuple[str, bool]]:
    rank, size, out = comm.rank, comm.size, []
    start, stop = part(length, size, rank)
    total = reduced("sum", size, length)
    tensor = placed(comm, values(rank, length), inside)
    mine, before = torch.empty(stop - start, device="cuda"), comm.sent_bytes
    comm.reduce_scatter(mine, tensor).wait()
    out.append(("reduce_scatter", torch.equal(mine, total[start:stop])))
    expected = payload_bytes("reduce_scatter", length, 4, size=size, rank=rank)
    out.append(("bytes of reduce_scatter", comm.sent_bytes - before == expected))
    comm.reduce_scatter(tensor[start:stop], tensor).wait()
    out.append(("reduce_scatter in place", torch.equal(tensor[start:stop], total[start:stop])))
    whole = placed(comm, torch.zeros(length, device="cuda"), inside)
    comm.all_gather(whole, mine).wait()
    out.append(("all_gather", torch.equal(whole, total)))
    comm.barrier()
    whole.zero_()
    torch.cuda.synchronize()
    comm.barrier()
    whole[start:stop] = mine
    comm.all_gather(whole, whole[start:stop]).wait()
    return [*out, ("all_gather in place", torch.equal(whole, total))]


def _passes(comm: PeerComm, length: int, inside: bool) -> list[tuple[str, bool]]:
    rank, size, found = comm.rank, comm.size, []
    for root in sorted({0, size - 1}):
        tensor = placed(comm, values(rank, length), inside)
        comm.broadcast(tensor, root=root).wait()
        found.append((f"broadcast from {root}", torch.equal(tensor, values(root, length))))
    for by, wrap in ((1, False), (-1, False), (1, True)):
        tensor = placed(comm, values(rank, length), inside)
        out = torch.zeros(length, device="cuda")
        comm.shift(out, tensor, by=by, wrap=wrap).wait()
        source = (rank - by) % size if wrap else rank - by
        is_end = not 0 <= source < size
        expected = torch.zeros(length, device="cuda") if is_end else values(source, length)
        found.append((f"shift by {by}", torch.equal(out, expected)))
    counts = [rank + peer for peer in range(size)]
    tensor = placed(comm, values(rank, sum(counts)), inside)
    out = torch.empty(sum(counts), device="cuda")
    comm.all_to_all(out, tensor, out_counts=counts, counts=counts).wait()
    pieces = [
        values(peer, sum(peer + j for j in range(size))).split([peer + j for j in range(size)])
        for peer in range(size)
    ]
    expected = torch.cat([of[rank] for of in pieces])
    return [*found, ("all_to_all", torch.equal(out, expected))]


def _in_order(comm: PeerComm) -> list[str]:
    """Let streams be far behind their hosts, one rank further than the others."""
    n, wrong = 1 << 20, []
    tensor, big = comm.arena.take(n), torch.ones(2048, 2048, device="cuda")
    for turn in range(5):
        for _ in range(20 * comm.rank):
            big = big @ big * 1e-4
        tensor.fill_(comm.rank + turn)
        handle = comm.all_reduce(tensor)
        handle.then(lambda: tensor.mul_(2))
        comm.barrier()
        expected = 2.0 * sum(rank + turn for rank in range(comm.size))
        if not bool((tensor == expected).all()):
            wrong.append(f"turn {turn}: {tensor[0].item()} is not {expected}")
    return wrong


# -- programs ----------------------------------------------------------------------------------


def programs(rank: int, size: int, over: str, backend: str, names: list[str]) -> list[str]:
    """Run programs on CUDA and return where they are not what the interpreter says."""
    wrong = []
    for case in cases(size):
        if names and case.name not in names:
            continue
        for name, off in _differences(case, rank, over, backend).items():
            if not off < case.tolerance:
                wrong.append(f"{case.name}: {name} on rank {rank} of {size} is off by {off:.1e}")
    return wrong


def local_inputs(program: ps.Program, given: dict[str, Any], rank: int) -> dict[str, torch.Tensor]:
    out = {}
    for name, value in given.items():
        held = (
            value if isinstance(value, list) else scattered(value, program[name].type, program.mesh)
        )
        out[name] = torch.tensor(held[rank], dtype=torch.float32, device="cuda")
    return out


def _differences(case: Case, rank: int, over: str, backend: str) -> dict[str, float]:
    program, given = case.program, given_for(case.program)
    expected = interpret(program, given | case.scalars, iterations=case.iterations)
    mine = local_inputs(program, given, rank)
    with (
        ps.Groups(program.mesh, backend=over or None, shared="256MB") as groups,
        ps.compile(program, groups, backend=backend, donate=case.donate, device="cuda") as step,
    ):
        for iteration in range(case.iterations):
            numbers = {k: v(iteration) if callable(v) else v for k, v in case.scalars.items()}
            results = [one.clone() for one in step(**mine, **numbers)]
    found = dict(zip(program.outputs, results, strict=True)) | {s: mine[s] for s in program.states}
    held = dict(zip(program.outputs, expected.outputs, strict=True)) | expected.states
    return {name: off(found[name], held[name][rank]) for name in found}


def off(found: torch.Tensor, expected: np.ndarray) -> float:
    assert tuple(found.shape) == expected.shape
    if not expected.size:
        return 0.0
    return float(np.abs(found.cpu().numpy() - expected).max() / (1.0 + np.abs(expected).max()))


def fused(rank: int, size: int, n: int, backend: str) -> dict[str, float]:
    """Run a fused Adam over peer pointers and return how far it is from the interpreter."""
    plain = adam.on(ps.mesh(dp=size), n=n)
    program = plain.split("g").sink("g.gather").keep_sliced("m", "v").fuse("g.scatter", "w.gather")
    given = given_for(program)
    scalars = {"t": lambda i: i + 1, "lr": 1e-2}
    expected = interpret(program, given | scalars, iterations=3)
    mine = local_inputs(program, given, rank)
    with ps.Groups(program.mesh, backend="peer", shared="64MB") as groups:
        for name in ("g", "w"):
            mine[name] = groups.take(n, axis="dp").copy_(mine[name])
        with ps.compile(program, groups, backend=backend, device="cuda") as step:
            assert [task.kind for task in step.plan.tasks] == ["fused"]
            for t in range(3):
                step(**mine, t=t + 1, lr=1e-2)
        return {name: off(mine[name], expected.states[name][rank]) for name in program.states}


def no_gpu(rank: int, size: int) -> str:
    """Return what is said where there is no GPU."""
    try:
        with ps.Groups(ps.mesh(dp=size), backend="peer") as groups:
            groups.comm("dp")
    except OptionError as error:
        return str(error)
    return ""
