"""What a step leaves behind: outputs that stay, batches that agree, errors that end it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from tests.step.programs import given_for
from tests.step.ranks import run_ranks

import penstock.step as ps
from penstock.errors import ProgramError
from penstock.step.program.interpret import interpret


def outputs(rank: int, size: int) -> list[float]:
    @ps.program
    def doubled(x: ps.S(0)["n"]):
        return ps.all_reduce(ps.sum(x * 2.0))

    program = doubled.on(ps.mesh(dp=size), n=4)
    with ps.Groups(program.mesh) as groups, ps.compile(program, groups) as step:
        kept = [step(x=torch.full((4 // size,), float(i)))[0] for i in range(3)]
    return [float(one) for one in kept]


def test_outputs_are_the_callers_to_keep() -> None:
    assert run_ranks(outputs, 2) == [[0.0, 8.0, 16.0]] * 2


def one_batch(rank: int, size: int) -> list[float]:
    @ps.program
    def twice(t: ps.R["n"]):
        a, b = ps.load("data.x", ps.R["n"]), ps.load("data.x", ps.R["n"])
        return ps.update(t, t + (a - b))

    program = twice.on(ps.mesh(dp=1), n=2)
    total = torch.zeros(2)
    sources = {"data": ({"x": np.full(2, i, np.float32)} for i in range(3))}
    with ps.Groups(program.mesh) as groups, ps.compile(program, groups, sources=sources) as step:
        for _ in range(3):
            step(t=total)
    return total.tolist()


def test_two_loads_of_a_field_have_the_same_batch() -> None:
    assert run_ranks(one_batch, 1) == [[0.0, 0.0]]


def broken(rank: int, size: int) -> list[str]:
    @ps.program
    def called(x: ps.P["n"]):
        (y,) = ps.call("maybe", x, outs=(ps.Type(shape=(4,), layouts=(("dp", ps.P),)),))
        return ps.all_reduce(y)

    program, said = called.on(ps.mesh(dp=size), n=4), []

    def maybe(x: torch.Tensor) -> torch.Tensor:
        if rank == 0:
            raise ValueError("not today")
        return x

    with ps.Groups(program.mesh, timeout_s=3) as groups:
        step = ps.compile(program, groups, calls={"maybe": maybe})
        for _ in range(2):
            try:
                step(x=torch.ones(4))
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
            if rank > 0:
                time.sleep(0.5)
    return said


def test_after_an_error_a_step_is_refused() -> None:
    first, second = run_ranks(broken, 2)[0]
    assert "not today" in first
    assert "close it and compile it again" in second


def two_axes(rank: int, size: int) -> list[float]:
    slices = (ps.S(0).over("dp") & ps.S(0).over("tp"))["n", "k"]
    partial = (ps.P.over("dp") & ps.P.over("tp"))["n", "k"]

    @ps.program(x=slices, y=partial)
    def moved(x: Any, y: Any) -> Any:
        both = ("dp", "tp")
        return ps.all_gather(x, axis=both), ps.reduce_scatter(y, axis=both, dim=0)

    out = []
    for n in (5, 6, 9):
        program = moved.on(ps.mesh(dp=2, tp=2), n=n, k=2)
        given = given_for(program)
        expected = interpret(program, given)
        first, last = program["x"].type.bounds(program.mesh, rank)[0]
        mine = {"x": torch.tensor(given["x"][first:last], dtype=torch.float32)}
        mine["y"] = torch.tensor(given["y"][rank], dtype=torch.float32)
        with ps.Groups(program.mesh) as groups, ps.compile(program, groups) as step:
            found = step(**mine)
        for one, held in zip(found, expected.outputs, strict=True):
            assert tuple(one.shape) == held[rank].shape
            out.append(float(np.abs(one.numpy() - held[rank]).max(initial=0.0)))
    return out


def test_uneven_slices_of_two_axes_are_gathered_and_scattered() -> None:
    assert max(max(found) for found in run_ranks(two_axes, 4)) < 1e-6


def beside(rank: int, size: int) -> int:
    """Run a fused chain beside a gather of its own, and count the wrong steps."""

    @ps.program
    def step_and_gather(g: ps.P["n"], w: ps.R["n"], a: ps.S(0)["n"]):
        g = ps.all_reduce(g)
        w = ps.update(w, w - g)
        return w, ps.all_gather(a * 1.0)

    plain = step_and_gather.on(ps.mesh(dp=size), n=64)
    chain = plain.split("g").sink("g.gather").fuse("g.scatter", "w.gather", name="up")
    chain = chain.overlap("up", chain.outputs[1])
    wrong = 0
    with ps.Groups(chain.mesh) as groups, ps.compile(chain, groups, backend="tiled") as step:
        w = torch.zeros(64)
        for turn in range(40):
            time.sleep(0.002 * ((turn + rank) % 2))
            a = torch.full((64 // size,), float(rank + 10 * turn))
            new, whole = step(g=torch.ones(64), w=w, a=a)
            parts = [torch.full((64 // size,), float(r + 10 * turn)) for r in range(size)]
            expected = torch.full((64,), -float(size * (turn + 1)))
            wrong += not (torch.equal(new, expected) and torch.equal(whole, torch.cat(parts)))
    return wrong


def test_a_fused_chain_does_not_meet_a_gather_of_another_task() -> None:
    assert run_ranks(beside, 2) == [0, 0]


def test_what_could_not_be_carried_out_is_refused_where_it_is_written() -> None:
    @ps.program
    def means(x: ps.P["n", ps.i64]):
        return ps.all_reduce(x, "mean")

    @ps.program
    def products(x: ps.R["n", "n"], y: ps.R["n", "n", ps.bf16]):
        return x @ y

    @ps.program
    def same(x: ps.S(0)["n"]):
        return ps.all_to_all(x, 0)

    @ps.program
    def far(x: ps.R["n"]):
        return ps.amax(x, 5)

    for template, words in (
        (means, "by mean of whole numbers"),
        (products, "matmul of f32 and bf16"),
        (same, "sliced already"),
        (far, "dimension 5 of x, which has 1"),
    ):
        with pytest.raises(ProgramError, match=words):
            template.on(ps.mesh(dp=2), n=4)
