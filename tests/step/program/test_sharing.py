"""Where values lie: slices in the memory of the whole, but never over what somebody still reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.step.program.any_order import run_in_any_order
from tests.step.program.same_values import inputs, sliced_adam

from penstock.step.program import P, Program, R, interpret, mesh, program
from penstock.step.program.check import check_plan
from penstock.step.program.language import all_gather, all_reduce, reduce_scatter, update
from penstock.step.program.lower import lower


def places(made: Program, *donate: str) -> dict[str, str]:
    return dict(lower(made, donate=donate).shared)


def assert_right(made: Program, *donate: str) -> None:
    """Whatever the order in which a plan is carried out, its values are the interpreter's."""
    plan, given = lower(made, donate=donate), inputs(made)
    check_plan(plan)
    want = interpret(made, given)
    for seed in range(8):
        got = run_in_any_order(plan, given, seed=seed)
        pairs: list[tuple[Any, Any]] = [*zip(got.outputs, want.outputs, strict=True)]
        pairs += [(got.states[s], want.states[s]) for s in want.states]
        for held, wanted in pairs:
            for one, other in zip(held, wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-10)


def test_what_is_gathered_lies_in_its_part_of_the_state() -> None:
    made = sliced_adam(2)
    part = made["w.gather"].inputs[0]
    assert places(made)[part] == places(made)["w.gather"] == "w"
    for each in (made, made.chunk(3, "g.scatter", "w.gather").overlap()):
        assert_right(each)
        assert places(each)[part] == "w"


def test_what_is_scattered_lies_in_memory_that_was_given_away() -> None:
    made = sliced_adam(3)
    assert "g.scatter" not in places(made)
    assert places(made, "g")["g.scatter"] == "g"
    assert_right(made, "g")
    assert_right(made.chunk(2, "g.scatter", "w.gather").overlap(), "g")


@program
def read_later(g: P["n"], w: R["n"]):
    g = all_reduce(g)
    new = w - g
    double = w * 2.0
    return update(w, new), double


@program
def returned(g: P["n"], w: R["n"]):
    part = reduce_scatter(g, dim=0) * 2.0
    return part, update(w, all_gather(part))


@program
def read_twice(g: P["n"], w: R["n"]):
    part = reduce_scatter(g, dim=0) * 2.0
    whole = all_gather(part)
    return update(w, whole), part + 1.0


@program
def crosswise(g: P["m", "n"], w: R["m", "n"]):
    return update(w, all_gather(reduce_scatter(g, dim=1) * 2.0))


def test_a_part_has_its_own_memory_where_others_need_the_old_value_or_the_part() -> None:
    split = read_later.on(mesh(dp=2), n=7).split("g").sink("g.gather")
    assert split["w.gather"].inputs[0] not in places(split)
    assert_right(split)
    for template, sizes in (
        (returned, {"n": 7}),
        (read_twice, {"n": 7}),
        (crosswise, {"m": 3, "n": 7}),
    ):
        made = template.on(mesh(dp=2), **sizes)
        gather = next(node for node in made.nodes if node.op == "all_gather")
        assert gather.inputs[0] not in places(made)
        assert_right(made, "g")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_any_number_of_ranks(ranks: int) -> None:
    assert_right(sliced_adam(ranks).fuse("g.scatter", "w.gather").chunk(2).overlap(), "g")
