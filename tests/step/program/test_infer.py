"""Layout rules: what each operation makes of replicated, sliced, partial and local values."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.programs import random_program
from testkit.rewrites import differences_on_one_rank

from penstock.errors import ProgramError
from penstock.step.program import L, P, R, S, Type, mesh, partial
from penstock.step.program.infer import infer

TWO = mesh(dp=2)
GRID = mesh(dp=2, tp=2)


def _of(op: str, /, *layouts, shape=(4, 4), on=TWO, **attrs):
    types = [
        Type(shape=shape, layouts=tuple(lay.items() if isinstance(lay, dict) else [("dp", lay)]))
        for lay in layouts
    ]
    return infer(op, types, attrs, on)


@pytest.mark.parametrize(
    ("op", "layouts", "result"),
    [
        ("add", (R, R), R),
        ("add", (S(0), R), S(0)),
        ("add", (R, S(1)), S(1)),
        ("add", (P, P), P),
        ("mul", (P, R), P),
        ("mul", (L, R), L),
        ("div", (P, R), P),
        ("neg", (P,), P),
        ("maximum", (partial("max"), partial("max")), partial("max")),
        ("matmul", (R, R), R),
        ("matmul", (S(0), R), S(0)),
        ("matmul", (R, S(1)), S(1)),
        ("matmul", (S(1), S(0)), P),
        ("matmul", (P, R), P),
        ("matmul", (L, R), L),
        ("where", (R, P, P), P),
    ],
)
def test_a_layout_goes_through_an_operation(op, layouts, result) -> None:
    assert _of(op, *layouts).layout("dp") == result


@pytest.mark.parametrize(
    ("layout", "dims", "keep", "result"),
    [
        (S(0), (0,), False, P),
        (S(0), (1,), False, S(0)),
        (S(1), (0,), False, S(0)),
        (S(1), (0,), True, S(1)),
        (P, (0,), False, P),
        (L, (0,), False, L),
    ],
)
def test_a_sum_over_slices_is_partial(layout, dims, keep, result) -> None:
    assert _of("sum", layout, dims=dims, keep=keep).layout("dp") == result


def test_a_maximum_over_slices_is_a_partial_maximum() -> None:
    assert _of("max", S(0), dims=(0,), keep=False).layout("dp") == partial("max")


@pytest.mark.parametrize(
    ("op", "layout", "attrs", "result"),
    [
        ("all_reduce", P, {"op": "sum"}, R),
        ("all_reduce", P, {"op": "mean"}, R),
        ("reduce_scatter", P, {"op": "sum", "dim": 1}, S(1)),
        ("all_gather", S(1), {}, R),
        ("all_to_all", S(1), {"dim": 0}, S(0)),
        ("reduce", P, {"op": "sum", "root": 1}, L),
        ("broadcast", L, {"root": 0}, R),
        ("send", R, {"by": 1}, L),
        ("slice", R, {"dim": 1}, S(1)),
    ],
)
def test_communication_turns_one_layout_into_another(op, layout, attrs, result) -> None:
    assert _of(op, layout, axis="dp", **attrs).layout("dp") == result


@pytest.mark.parametrize(
    ("op", "layouts", "attrs", "words"),
    [
        ("add", (P, R), {}, "still to be reduced"),
        ("mul", (P, P), {}, "still to be reduced"),
        ("div", (R, P), {}, "still to be reduced"),
        ("tanh", (P,), {}, "all_reduce or reduce_scatter it first"),
        ("cast", (P,), {"dtype": "bf16"}, "still to be reduced"),
        ("mul", (partial("max"), R), {}, "partial max"),
        ("add", (P, partial("max")), {}, "a partial sum and a partial max"),
        ("where", (P, R, R), {}, "still to be reduced"),
        ("add", (S(0), S(1)), {}, "all_to_all one of them"),
        ("add", (S(0), L), {}, "a local value has no parts"),
        ("matmul", (S(1), R), {}, "both along the inner dimension"),
        ("matmul", (R, S(0)), {}, "both along the inner dimension"),
        ("matmul", (P, P), {}, "matmul of values held as P and P"),
        ("softmax", (S(1),), {"dim": 1}, "every rank needs all of that dimension"),
        ("max", (P,), {"dims": (0,), "keep": False}, "all_reduce it first"),
        ("all_reduce", (R,), {"op": "sum", "axis": "dp"}, "only partial values need it"),
        ("all_reduce", (P,), {"op": "max", "axis": "dp"}, "by max of a partial sum"),
        ("all_gather", (P,), {"axis": "dp"}, "only slices can be gathered"),
        (
            "reduce_scatter",
            (S(0),),
            {"op": "sum", "axis": "dp", "dim": 0},
            "slice a replicated value",
        ),
        ("slice", (S(0),), {"axis": "dp", "dim": 0}, "sliced for nothing"),
        ("broadcast", (R,), {"axis": "dp", "root": 0}, "only local values need it"),
        ("reduce", (P,), {"axis": "dp", "root": 2, "op": "sum"}, "root 2 of axis 'dp'"),
        ("send", (S(0),), {"axis": "dp", "by": 1}, "whole on the rank that sends it"),
        ("unflatten", (S(0),), {"dim": 0, "lengths": (1, 4)}, "1 must be a multiple of 2"),
        ("flatten", (S(1),), {"dim": 0, "count": 2}, "only the first may be sliced"),
        ("update", (R, S(0)), {}, "all_gather it first"),
        ("transpose", (R,), {"dims": (0, 0)}, "transpose by"),
        ("nothing", (R,), {}, "there is no operation 'nothing'"),
    ],
)
def test_what_would_mean_something_else_is_refused(op, layouts, attrs, words) -> None:
    with pytest.raises(ProgramError, match=words):
        _of(op, *layouts, **attrs)


# -- two axes ----------------------------------------------------------------------------------


def test_what_has_no_negative_numbers_is_not_negated() -> None:
    one = mesh(dp=1)
    for dtype in ("u8", "bool"):
        with pytest.raises(ProgramError, match=rf"-x of a value of {dtype}.*-cast\(x, i32\)"):
            infer("neg", [Type(shape=(3,), dtype=dtype)], {}, one)
    for dtype in ("i32", "i64", "bf16", "f32"):
        assert infer("neg", [Type(shape=(3,), dtype=dtype)], {}, one).dtype == dtype


def test_axes_do_not_meet() -> None:
    made = _of("mul", {"dp": P}, {"tp": P}, on=GRID)
    assert made.layout("dp") == made.layout("tp") == P


def test_the_axis_that_cuts_last_is_gathered_first() -> None:
    both = {"dp": S(0), "tp": S(0)}
    assert _of("all_gather", both, on=GRID, axis="tp").layout("tp") == R
    assert not _of("all_gather", both, on=GRID, axis=("dp", "tp")).layouts
    with pytest.raises(ProgramError, match="begin with 'tp'"):
        _of("all_gather", both, on=GRID, axis="dp")


def test_parts_of_the_second_cut_do_not_hold_those_of_both() -> None:
    assert _of("add", {"dp": S(0)}, {"dp": S(0), "tp": S(0)}, on=GRID).layout("tp") == S(0)
    with pytest.raises(ProgramError, match="cut by 'dp' first"):
        _of("add", {"tp": S(0)}, {"dp": S(0)}, on=GRID)
    with pytest.raises(ProgramError, match="update of a value whose dimension 0"):
        _of("update", {"dp": S(0), "tp": S(0)}, {"tp": S(0)}, on=GRID)


def test_batches_of_a_product_are_sliced_together() -> None:
    shape = (4, 4, 4)
    assert _of("matmul", S(0), S(0), shape=shape).layout("dp") == S(0)
    for layouts in ((S(0), R), (R, S(0)), (S(2), R), (R, S(1))):
        with pytest.raises(ProgramError, match="matmul of values held as"):
            _of("matmul", *layouts, shape=shape)


def test_two_axes_cut_a_dimension_into_the_product_of_their_parts() -> None:
    both = {"dp": S(0), "tp": S(0)}
    with pytest.raises(ProgramError, match="there are 4 parts; 2 must be a multiple of 4"):
        _of("unflatten", both, on=GRID, dim=0, lengths=(2, 2))
    with pytest.raises(ProgramError, match="only the first may be sliced, and evenly"):
        _of("flatten", both, on=GRID, shape=(2, 3), dim=0, count=2)


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_a_program_means_the_same_on_every_mesh(rng: Random) -> None:
    """What a rank holds is what its layout says, for all operations and all layouts."""
    sample = random_program(rng, local=False)
    assert differences_on_one_rank(sample) == [], str(sample.program)
