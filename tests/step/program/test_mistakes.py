"""Wrong programs as newcomers write them: each is refused with the line and with what to write."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import penstock.step as ps
from penstock.errors import ProgramError
from penstock.step.program.interpret import gathered


def _refusal(body: Callable[..., Any]) -> str:
    """Return what is said of a function of a vector, a matrix and a partial vector."""
    written = ps.program(x=ps.R["n"], w=ps.R["n", "m"], g=ps.P["n"])(body)
    with pytest.raises(ProgramError) as error:
        written.on(ps.mesh(dp=2), n=4, m=3)
    return str(error.value)


@pytest.mark.parametrize(
    ("body", "way"),
    [
        (lambda x, w, g: x[0], 'ps.call("part", x'),
        (lambda x, w, g: x[1:], "ps.slice(x, dim) for the part of each rank"),
        (lambda x, w, g: x[:, None], "ps.unflatten(x, 0, (x.shape[0], 1))"),
        (lambda x, w, g: x[x > 0], "ps.where(condition, x, 0.0)"),
        (lambda x, w, g: operator.setitem(x, 0, 1.0), "ps.where(condition, new, x)"),
        (lambda x, w, g: w.reshape(-1), "ps.unflatten(x, dim, lengths)"),
        (lambda x, w, g: w.view(2, 6), "ps.flatten(x, dim)"),
        (lambda x, w, g: w.T @ x, "ps.transpose(x)"),
        (lambda x, w, g: x.sum(), "ps.sum(x, dims=None, *, keep=False)"),
        (lambda x, w, g: x.exp(), "ps.exp(x)"),
        (lambda x, w, g: x.clamp(min=0), "ps.maximum(ps.minimum(x, high), low)"),
        (lambda x, w, g: x.to(torch.bfloat16), 'ps.cast(x, "bf16")'),
        (lambda x, w, g: x.add_(1.0), "x = ps.update(x, new) for a state"),
        (lambda x, w, g: x.detach(), "return it, and look at what the step gives"),
        (lambda x, w, g: ps.sum(x).backward(), "(g,) = ps.grad(loss, (w,))"),
        (lambda x, w, g: x.cumsum(0), 'ps.call("cumsum", x'),
        (lambda x, w, g: x / x.size(0), "x.shape[dim]"),
        (lambda x, w, g: x / len(x), "x.shape[0]"),
        (lambda x, w, g: float(x), "ps.cast"),
        (lambda x, w, g: range(x), "no number for float, int, round, range"),
        (lambda x, w, g: round(x), "no number for float, int, round, range"),
        (lambda x, w, g: math.sqrt(x), "ps.sqrt(x), ps.exp(x) and so on"),
        (lambda x, w, g: f"{x:.3f}", "{x} alone shows its type"),
        (lambda x, w, g: list(x), "ps.sum(x, dims), ps.mean(x, dims)"),
        (lambda x, w, g: sum(x), "ps.sum(x, dims)"),
        (lambda x, w, g: x if x > 0 else -x, "ps.where(condition, a, b) for `if`"),
        (lambda x, w, g: ps.where(0 < x < 1, x, 0.0), "ps.logical_and"),
        (lambda x, w, g: ps.where(not x > 0, x, 0.0), "logical_not"),
        (lambda x, w, g: ps.where((x > 0) & (x < 1), x, 0.0), "ps.logical_and(a, b)"),
        (lambda x, w, g: ps.where(~(x > 0), x, 0.0), "ps.logical_not(a)"),
        (lambda x, w, g: max(x, 0), "ps.maximum"),
        (lambda x, w, g: 0 in x, "compare x == y"),
        (lambda x, w, g: x // 2, "write x / y"),
        (lambda x, w, g: np.sqrt(x), "write ps.sqrt(x)"),
        (lambda x, w, g: np.sum(x), "write ps.sum(x"),
        (lambda x, w, g: np.maximum(x, 0), "write ps.maximum(a, b)"),
        (lambda x, w, g: np.ones(4) + x, "give tensors as parameters"),
        (lambda x, w, g: np.ones((4, 4)) @ w, "give tensors as parameters"),
        (lambda x, w, g: np.asarray(x), "it has no numbers yet"),
        (lambda x, w, g: torch.sqrt(x), "write ps.sqrt(x)"),
        (lambda x, w, g: torch.nn.functional.gelu(x), "write ps.gelu(x)"),
        (lambda x, w, g: torch.tensor(3.0) * x, "numbers as int or float"),
        (lambda x, w, g: x * torch.ones(4), "give tensors as parameters"),
        (lambda x, w, g: torch.nn.Linear(4, 4)(x), "x @ w + b, with w and b as parameters"),
        (lambda x, w, g: torch.distributed.all_reduce(g), "write ps.all_reduce(x, op='sum'"),
        (lambda x, w, g: x * [1.0, 2.0], "give tensors as parameters"),
        (lambda x, w, g: x + None, "None is not a value of a program"),
        (lambda x, w, g: x(3), 'ps.call("f", x'),
        (lambda x, w, g: setattr(x, "grad", g), "operations of the language"),
        (lambda x, w, g: ps.cast(x, torch.bfloat16), "write 'bf16', or ps.bf16"),
        (lambda x, w, g: ps.cast(x, "float16"), "write 'f16'"),
        (lambda x, w, g: ps.load("x", (3, 4)), "ps.load('x', ps.S(0)['batch', 3])"),
        (lambda x, w, g: ps.all_reduce(g, axis="data"), "there is no axis 'data'"),
        (lambda x, w, g: ps.all_reduce(g, "avg"), "it goes by sum or mean"),
        (lambda x, w, g: ps.sum(w, axis=0), "it is ps.sum(x, dims=None, *, keep=False)"),
        (lambda x, w, g: ps.sum(w, 2), "which has 2, counted from 0"),
        (lambda x, w, g: ps.maximum(x), "it is ps.maximum(a, b)"),
        (lambda x, w, g: ps.sum([x, x]), "sum needs a value of a program as x, got a list"),
        (lambda x, w, g: ps.sqrt(2.0) * x, "sqrt needs a value of a program as x, got a float"),
        (lambda x, w, g: ps.update(x * 2.0, x), "w = ps.update(w, new) with a parameter w"),
        (lambda x, w, g: ps.grad(ps.sum(x), x), "write (g,) = ps.grad(y, (x,))"),
        (lambda x, w, g: ps.transpose(w, -1, -2), "transpose(x, 1, 0)"),
        (lambda x, w, g: ps.unflatten(x, 0, (-1, 2)), "which makes -2"),
        (lambda x, w, g: x @ 3.0, "4 and a number"),
        (lambda x, w, g: ps.sqrt(g), "all_reduce or reduce_scatter it first"),
    ],
)
def test_a_wrong_line_is_refused_with_what_to_write_instead(body, way: str) -> None:
    said = _refusal(body)
    where, text, _ = said.split("`", 2)
    assert where == f"test_mistakes.py:{body.__code__.co_firstlineno}: "
    assert text.startswith("(lambda x, w, g: ")
    assert way in said


def test_in_place_operators_do_not_pretend_to_change_a_state() -> None:
    def kept(x, w, g):
        x -= 0.1 * ps.all_reduce(g)

    assert "x = ps.update(x, x + y) for a state" in _refusal(kept)

    @ps.program
    def summed(x: ps.R["n"], steps):
        total = ps.sum(x)
        total += ps.sum(x * x)  # of what is computed it is another value, as anywhere in Python
        steps += 1
        return total * steps

    out = ps.interpret(summed.on(ps.mesh(dp=1), n=3), {"x": np.arange(3.0), "steps": 1})
    assert out.outputs[0][0] == 2 * (3 + 5)


@pytest.mark.parametrize(
    ("returned", "way"),
    [
        (lambda x: None, "`return` with one value or several"),
        (lambda x: {"x": x}, "returns a dict; it may return values only"),
        (lambda x: (x, (x, x)), "returns a tuple"),
        (lambda x: 3.0, "returns a float"),
    ],
)
def test_what_is_returned_is_values(returned, way: str) -> None:
    with pytest.raises(ProgramError) as error:
        ps.program(x=ps.R["n"])(returned).on(ps.mesh(dp=2), n=4)
    assert way in str(error.value)


def test_parameters_are_tensors_with_a_layout_or_numbers() -> None:
    mesh = ps.mesh(dp=2)

    def annotated(x: torch.Tensor):
        return x

    def many(*x):
        return x[0]

    def without(x: ps.R["n"], lr=None):
        return x * lr

    for function, way in (
        (annotated, 'x is annotated as Tensor; write x: ps.R["n"]'),
        (many, "name them one by one"),
        (without, "its default is None"),
    ):
        with pytest.raises(ProgramError) as error:
            ps.program(function).on(mesh, n=4)
        assert way in str(error.value)

    @ps.program
    def named(x: ps.R["n"], *, lr=0.5):
        return x * lr

    assert ps.interpret(named.on(mesh, n=2), {"x": np.ones(2)}).outputs[0][0].tolist() == [0.5, 0.5]
    with pytest.raises(ProgramError, match=r"put it on a mesh, named\.on"):
        named(torch.ones(2))
    with pytest.raises(ProgramError, match=r"and ps\.bf16 behind them"):
        ps.R["n", torch.bfloat16]
    with pytest.raises(ProgramError, match=r"write 'f32', or ps\.f32"):
        ps.Type(shape=(3,), dtype="float32")
    assert ps.Type(shape=(3,), dtype=ps.bf16) == ps.Type(shape=(3,), dtype="bf16")


def test_a_program_is_put_on_a_mesh_and_compiled_before_it_is_used() -> None:
    @ps.program
    def doubled(x: ps.R["n"]):
        return x * 2.0

    with pytest.raises(AttributeError, match=r"put it on a mesh first, \.on\(.*\.split"):
        doubled.split("x")
    assert not hasattr(doubled, "anything")
    assert copy.deepcopy(doubled).on(ps.mesh(dp=1), n=2).name == "doubled"
    with pytest.raises(ProgramError, match=r"ps\.compile\(program, groups\) as step"):
        doubled.on(ps.mesh(dp=1), n=2)(x=torch.ones(2))
    with pytest.raises(ProgramError, match=r"write mesh\(dp=2\)"):
        ps.mesh(dp="2")


def test_names_that_there_are_not_say_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"write ps\.maximum\(ps\.minimum"):
        ps.clamp  # noqa: B018
    assert not hasattr(ps, "clamp")


def test_comparisons_and_numbers_of_numpy_are_what_they_look_like() -> None:
    @ps.program
    def compared(x: ps.R["n"]):
        half = np.float32(0.5)
        return ps.where(x == 1, half * x, x), ps.where(x != 1, x / np.int64(2), x), half < x

    out = ps.interpret(compared.on(ps.mesh(dp=1), n=3), {"x": np.arange(3.0)})
    made = [held[0].tolist() for held in out.outputs]
    assert made == [[0.0, 0.5, 2.0], [0.0, 1.0, 1.0], [False, True, True]]


# -- products with vectors ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "layouts"),
    [
        ((3,), (3, 4), [(ps.R, ps.R), (ps.S(0), ps.S(0)), (ps.R, ps.S(1))]),
        ((2, 3), (3,), [(ps.R, ps.R), (ps.S(1), ps.S(0)), (ps.S(0), ps.R)]),
        ((3,), (3,), [(ps.R, ps.R), (ps.S(0), ps.S(0))]),
        ((3,), (5, 3, 4), [(ps.R, ps.R), (ps.S(0), ps.S(1)), (ps.R, ps.S(0)), (ps.R, ps.S(2))]),
        ((5, 2, 3), (3,), [(ps.R, ps.R), (ps.S(2), ps.S(0)), (ps.S(0), ps.R), (ps.S(1), ps.R)]),
    ],
)
def test_a_vector_is_a_row_on_the_left_and_a_column_on_the_right(a, b, layouts) -> None:
    x, y = (np.arange(1.0, 1 + np.prod(shape)).reshape(shape) for shape in (a, b))
    tensors = [torch.tensor(one, requires_grad=True) for one in (x, y)]
    expected = tensors[0] @ tensors[1]
    slopes = torch.autograd.grad((expected * expected).sum(), tensors)
    for left, right in layouts:

        @ps.program(x=left[a], y=right[b])
        def product(x, y):
            made = x @ y
            for axis in made.type.axes("P"):
                made = ps.all_reduce(made, axis=axis)
            return made, *ps.grad(ps.sum(made * made), (x, y))

        made = product.on(ps.mesh(dp=2))
        out = ps.interpret(made, {"x": x, "y": y})
        for name, held, theirs in zip(made.outputs, out.outputs, (expected, *slopes), strict=True):
            mine = gathered(held, made[name].type, made.mesh)
            assert mine.shape == tuple(theirs.shape)
            assert np.allclose(mine, theirs.detach().numpy())
