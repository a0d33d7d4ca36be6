"""A fused update over shared memory is one pass, and gives what torch and the interpreter give."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.step.programs import adam, given_for
from tests.step.ranks import run_ranks

import penstock.step as ps
from penstock.step.comms.shm import ShmComm
from penstock.step.program.interpret import interpret

STEPS, LR = 3, 1e-2
BACKENDS = ("auto", "tiled")


@ps.program
def mixed(g: ps.P["n", ps.bf16], master: ps.S(0)["n"], w: ps.R["n", ps.bf16], lr):
    """Gradients and replicas of 16 bits, weights of 32 in slices."""
    g = ps.reduce_scatter(g, "mean")
    master = ps.update(master, master - lr * g)
    return ps.update(w, ps.all_gather(ps.cast(master, ps.bf16)))


def gradient(rank: int, step: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(length, generator=generator)


def weights_of(length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(9))


def by_torch(size: int, length: int) -> torch.Tensor:
    """The same training on one rank."""
    weight = torch.nn.Parameter(weights_of(length))
    optimizer = torch.optim.Adam([weight], lr=LR)
    for step in range(STEPS):
        weight.grad = torch.stack([gradient(r, step, length) for r in range(size)]).mean(0)
        optimizer.step()
    return weight.detach()


def trained(rank: int, size: int, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Train with tensors in shared memory, and with tensors of the rank's own."""
    out = []
    with ps.Groups(ps.mesh(dp=size), backend="shm", shared="4MB") as groups:
        ways = itertools.product(lengths, BACKENDS, (True, False))
        for length, backend, is_shared in ways:
            plain = adam.on(groups.mesh, n=length)
            program = plain.split("g").sink("g.gather").keep_sliced("m", "v")
            program = program.fuse("g.scatter", "w.gather")
            (count,) = program["m"].type.local_shape(groups.mesh, rank)
            take = (lambda n: groups.take(n, axis="dp")) if is_shared else torch.zeros
            now = {"g": take(length), "w": take(length).copy_(weights_of(length))}
            now |= {"m": torch.zeros(count), "v": torch.zeros(count)}
            with ps.compile(program, groups, backend=backend) as step:
                for t in range(STEPS):
                    now["g"].copy_(gradient(rank, t, length))
                    step(**now, t=t + 1, lr=LR)
            out.append(now["w"].clone())
    return out


@pytest.mark.parametrize("size", [1, 2, 3])
def test_weights_are_those_of_torch_wherever_tensors_lie(size: int) -> None:
    lengths = (1, 1001)
    by_rank = run_ranks(trained, size, lengths)
    for length, number in itertools.product(lengths, range(2 * len(BACKENDS))):
        found = [each[lengths.index(length) * 2 * len(BACKENDS) + number] for each in by_rank]
        torch.testing.assert_close(found[0], by_torch(size, length), rtol=1e-5, atol=1e-6)
        assert all(torch.equal(one, found[0]) for one in found)


def narrow(rank: int, size: int, given: dict[str, Any]) -> dict[str, Any]:
    """Run a pass of two widths; say also how often ranks met for it."""
    mesh, n = ps.mesh(dp=size), 1001
    program = mixed.on(mesh, n=n).fuse("g", "all_gather.1")
    first, last = program["master"].type.bounds(mesh, rank)[0]
    with ps.Groups(mesh, backend="shm", shared="4MB") as groups:
        half = [groups.take(n, torch.bfloat16, axis="dp") for _ in range(2)]
        now = {"g": half[0].copy_(torch.tensor(given["g"][rank])), "w": half[1]}
        now["master"] = torch.tensor(given["master"][first:last], dtype=torch.float32)
        with ps.compile(program, groups) as step:
            comm = groups.comm("dp", step.plan.tasks[0].lane)
            assert isinstance(comm, ShmComm)
            before = comm.flags.count
            step(**now, lr=0.5)
            met = comm.flags.count - before
    return {"w": now["w"].float(), "master": now["master"], "met": met}


def test_narrow_gradients_are_added_wide_and_ranks_meet_twice() -> None:
    program = mixed.on(ps.mesh(dp=3), n=1001).fuse("g", "all_gather.1")
    given = given_for(program)
    given["g"] = [torch.tensor(g).bfloat16().double().numpy() for g in given["g"]]
    expected = interpret(program, given | {"lr": 0.5})
    for rank, found in enumerate(run_ranks(narrow, 3, given)):
        want = torch.tensor(expected.states["master"][rank], dtype=torch.float32)
        # Added with 16 bits it would be off by some thousandths.
        torch.testing.assert_close(found["master"], want, rtol=1e-5, atol=1e-6)
        whole = torch.tensor(expected.states["w"][rank], dtype=torch.float32)
        torch.testing.assert_close(found["w"], whole, rtol=2**-7, atol=1e-6)
        assert found["met"] == 2
