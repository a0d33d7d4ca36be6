"""Programs on real ranks: whatever the schedule, values are those of the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.step.programs import Case, adam, cases, given_for, lamb
from tests.step.ranks import RankError, run_ranks

import penstock.step as ps
from penstock.errors import ProgramError
from penstock.step.program.bytes import sent_bytes
from penstock.step.program.interpret import interpret, scattered
from penstock.step.program.ops import is_move


def local_inputs(case: Case, given: dict[str, Any], rank: int) -> dict[str, torch.Tensor]:
    program, out = case.program, {}
    for name, value in given.items():
        held = (
            value if isinstance(value, list) else scattered(value, program[name].type, program.mesh)
        )
        out[name] = torch.tensor(held[rank], dtype=torch.float32)
    return out


def differences(case: Case, rank: int) -> dict[str, float]:
    """Return by value how far a step is from the interpreter, in parts of its size."""
    program, given = case.program, given_for(case.program)
    expected = interpret(program, given | case.scalars, iterations=case.iterations)
    mine = local_inputs(case, given, rank)
    with (
        ps.Groups(program.mesh) as groups,
        ps.compile(program, groups, backend="tiled", donate=case.donate) as step,
    ):
        for iteration in range(case.iterations):
            numbers = {k: v(iteration) if callable(v) else v for k, v in case.scalars.items()}
            results = step(**mine, **numbers)
    found = dict(zip(program.outputs, results, strict=True)) | {s: mine[s] for s in program.states}
    held = dict(zip(program.outputs, expected.outputs, strict=True)) | expected.states
    return {name: _off(found[name], held[name][rank]) for name in found}


def _off(found: torch.Tensor, expected: np.ndarray) -> float:
    assert tuple(found.shape) == expected.shape
    if not expected.size:
        return 0.0
    return float(np.abs(found.numpy() - expected).max() / (1.0 + np.abs(expected).max()))


def all_differences(rank: int, size: int) -> dict[str, tuple[float, dict[str, float]]]:
    return {case.name: (case.tolerance, differences(case, rank)) for case in cases(size)}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_schedule_gives_the_values_of_the_interpreter(size: int) -> None:
    for rank, found in enumerate(run_ranks(all_differences, size)):
        assert len(found) >= 12
        for case, (tolerance, values) in found.items():
            for name, off in values.items():
                assert off < tolerance, f"{case}: {name} on rank {rank} of {size} is off by {off}"


def loads(rank: int, size: int) -> list[list[float]]:
    @ps.program
    def running(total: ps.S(0)["n"]):
        x = ps.load("data.x", ps.S(0)["n"])
        y = ps.load("data.y", ps.S(0)["n"])
        total = ps.update(total, total + x * y)
        return ps.store(total, "kept")

    program = running.on(ps.mesh(dp=size), n=4)
    out = []
    for ahead in (0, 2):
        kept: list[float] = []
        total = torch.zeros(program["total"].type.local_shape(program.mesh, rank))
        batches = (
            {"x": np.full(total.shape, i, np.float32), "y": torch.full(total.shape, 2.0)}
            for i in range(3)
        )
        chosen = program if not ahead else program.rotate("x", ahead).rotate("y", ahead)
        with (
            ps.Groups(program.mesh) as groups,
            ps.compile(
                chosen,
                groups,
                sources={"data": batches},
                calls={"kept": lambda value, kept=kept: kept.append(float(value.sum()))},
            ) as step,
        ):
            for _ in range(3):
                step(total=total)
            with pytest.raises(ProgramError, match="no more batches"):
                step(total=total)
        out.append(kept)
    return out


@pytest.mark.parametrize("size", [1, 2])
def test_loads_of_one_iteration_come_from_one_batch(size: int) -> None:
    for kept in run_ranks(loads, size):
        assert kept == [[0.0, 8.0 / size, 24.0 / size]] * 2


def calls(rank: int, size: int) -> float:
    @ps.program
    def called(x: ps.S(0)["n"], w: ps.R["n"]):
        like = ps.Type(shape=(1,), layouts=(("dp", ps.P),))
        loss, _ = ps.call("twice", x, outs=(like, like))
        return ps.all_reduce(loss)

    program = called.on(ps.mesh(dp=size), n=4)
    x = torch.arange(4.0)[rank * 4 // size : (rank + 1) * 4 // size]
    both = {"twice": lambda x: (x.sum().view(1) * 2, x.sum().view(1))}
    with ps.Groups(program.mesh) as groups, ps.compile(program, groups, calls=both) as step:
        return float(step(x=x, w=torch.ones(4))[0])


def test_a_call_has_several_results() -> None:
    assert run_ranks(calls, 2) == [12.0, 12.0]


def refusals(rank: int, size: int) -> list[str]:
    program = adam.on(ps.mesh(dp=size), n=8)
    wrong = adam.on(ps.mesh(dp=size), n=8 + 8 * rank)
    said = []
    with ps.Groups(program.mesh) as groups:
        with ps.compile(program, groups) as step:
            good = {name: torch.zeros(8) for name in "gwmv"}
            for bad in (
                {},
                good | {"t": 1},
                good | {"t": 1, "lr": 0.1, "g": torch.zeros(9)},
                good | {"t": 1, "lr": 0.1, "g": torch.zeros(8, dtype=torch.float64)},
                good | {"t": 1, "lr": 0.1, "speed": 3},
            ):
                with pytest.raises(ProgramError) as error:
                    step(**bad)
                said.append(str(error.value))
            with pytest.raises(ProgramError, match=r"by name, got 1 by place; write step\(g="):
                step(good["g"])
        with pytest.raises(ProgramError) as error:
            ps.compile(wrong, groups)
        said.append(str(error.value))
    return said


def test_what_does_not_fit_is_refused_with_both_sides() -> None:
    missing, number, shape, dtype, more, plans = run_ranks(refusals, 2)[0]
    assert "needs g" in missing
    assert "lr" in number
    assert "(9,)" in shape
    assert "(8,)" in shape
    assert "float64" in dtype
    assert "give g.to(torch.float32)" in dtype
    assert "speed; it has g, w" in more
    assert "different plans" in plans


def fails(rank: int, size: int) -> None:
    program = adam.on(ps.mesh(dp=size), n=8)
    with ps.Groups(program.mesh) as groups, ps.compile(program, groups) as step:
        given = {name: torch.ones(8) for name in "gwmv"}
        step(**given, t=1, lr=0.1)
        if rank == 1:
            raise ValueError("the second rank has had enough")
        step(**given, t=2, lr=0.1)


def test_a_rank_that_dies_ends_the_others_step() -> None:
    with pytest.raises(RankError, match="had enough"):
        run_ranks(fails, 2, group_timeout_s=5.0)


def shared(rank: int, size: int, n: int) -> dict[str, float]:
    """Run fused updates over shared memory, return how far they are from the interpreter."""
    mesh = ps.mesh(dp=size)
    sliced = adam.on(mesh, n=n).split("g").sink("g.gather").keep_sliced("m", "v")
    step = {"t": lambda i: i + 1, "lr": 1e-2}
    fused = sliced.fuse("g.scatter", "w.gather")
    # The kernel of LAMB stops for norms, so it is no single pass.
    norms = lamb.on(mesh, n=n).split("g").sink("g.gather")
    stops = norms.fuse("g.scatter", "w.gather", norms=True)
    return _of_shared(Case(name="adam", program=fused, scalars=step), rank) | _of_shared(
        Case(name="lamb", program=stops, scalars={"lr": 1e-2}), rank
    )


def _of_shared(case: Case, rank: int) -> dict[str, float]:
    program, given = case.program, given_for(case.program)
    expected = interpret(program, given | case.scalars, iterations=3)
    mine = local_inputs(case, given, rank)
    with ps.Groups(program.mesh, backend="shm", shared="4MB") as groups:
        for name in ("g", "w"):
            mine[name] = groups.take(len(mine[name]), axis="dp").copy_(mine[name])
        with ps.compile(program, groups, backend="tiled") as step:
            kinds = [task.kind for task in step.plan.tasks]
            assert kinds.count("fused") == 1
            assert case.name != "adam" or len(kinds) == 1
            for t in range(3):
                step(**mine, **{k: v(t) if callable(v) else v for k, v in case.scalars.items()})
    return {
        f"{case.name}, {state}": _off(mine[state], expected.states[state][rank])
        for state in program.states
    }


@pytest.mark.parametrize(("size", "n"), [(1, 100), (2, 1003), (3, 1003), (4, 2)])
def test_over_shared_memory_a_fused_update_is_one_task(size: int, n: int) -> None:
    for found in run_ranks(shared, size, n):
        assert set(found) == {"adam, w", "adam, m", "adam, v", "lamb, w", "lamb, m"}
        assert max(found.values()) < 3e-6


@ps.program
def crosswise(g: ps.P["k", "n"], w: ps.R["k", "n"]):
    return ps.update(w, w - ps.all_gather(ps.reduce_scatter(g, dim=1)))


def counted(rank: int, size: int) -> dict[str, tuple[int, int]]:
    """Return by schedule what a rank should send in a step of uneven slices, and what it sent."""
    whole = adam.on(ps.mesh(dp=size), n=29)
    sliced = whole.split("g").sink("g.gather").keep_sliced("m", "v")
    made = {
        "slices": sliced,
        "fused": sliced.fuse("g.scatter", "w.gather"),
        "chunks": sliced.chunk(3, "g.scatter", "w.gather").overlap(),
        "crosswise": crosswise.on(ps.mesh(dp=size), k=3, n=7),
    }
    out = {}
    for name, program in made.items():
        given = local_inputs(Case(name=name, program=program), given_for(program), rank)
        with ps.Groups(program.mesh) as groups, ps.compile(program, groups) as step:
            step(**given, **({} if name == "crosswise" else {"t": 1, "lr": 0.1}))
            moves = [node for node in program.nodes if is_move(node.op)]
            chunks = range(3) if name == "chunks" else (None,)
            due = sum(sent_bytes(node, program, rank, chunk) for node in moves for chunk in chunks)
            out[name] = (due, sum(comm.sent_bytes for comm in groups._comms.values()))
    return out


def test_uneven_slices_send_what_the_program_says_and_no_more() -> None:
    for found in run_ranks(counted, 3):
        for name, (due, sent) in found.items():
            assert sent == due, name
