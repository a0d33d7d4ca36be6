"""Calls of functions whose samples are known: layouts, gradients, chunks, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.errors import ProgramError
from penstock.step.program import L, P, R, S, Type, interpret, mesh, program
from penstock.step.program.calls import Function, Slot
from penstock.step.program.cost import MachineCosts
from penstock.step.program.gradient import grad
from penstock.step.program.interpret import gathered
from penstock.step.program.language import all_gather, all_reduce, call, sum
from penstock.step.program.lower import lower
from penstock.step.program.simulate import simulate

X, W = Slot(name="x", shape=(1, 3), dim=0), Slot(name="w", shape=(3,))
SCALED = Function(
    name="scaled",
    operands=(X, W),
    results=(Slot(name="y", shape=(1, 3), dim=0), Slot(name="total", shape=(3,))),
    kept=(Slot(name="kept", shape=(1, 3), dim=0),),
    flops=(6.0, 12.0),
    digest="one",
)
"""x * w by rows, and the sum of its squares over samples; it keeps y."""


def _forward(x: Any, w: Any) -> Any:
    y = x * w
    return y, (y * y).sum(0)


def _backward(x: Any, w: Any, kept: Any, dy: Any, dtotal: Any) -> Any:
    d = dy + 2 * kept * dtotal
    return d * w, (d * x).sum(0)


CALLS = {
    "scaled": _forward,
    "scaled.keeping": lambda x, w: (*_forward(x, w), x * w),
    "scaled.backward": _backward,
    "scaled.backward.weights": lambda *given: (_backward(*given)[1],),
}


@program
def trained(x: S(0)["b", 3], w: R[3], a: R[3]):
    y, total = SCALED(x, w)
    loss = sum(y * y * y) + sum(total * a)
    dx, dw = grad(loss, (x, w))
    return all_reduce(loss), dx, all_reduce(dw)


@program
def written(x: S(0)["b", 3], w: R[3], a: R[3]):
    y = x * w
    loss = sum(y * y * y) + sum(sum(y * y, 0) * a)
    dx, dw = grad(loss, (x, w))
    return all_reduce(loss), dx, all_reduce(dw)


def _given(b: int) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    return {"x": rng.normal(size=(b, 3)), "w": rng.normal(size=3), "a": rng.normal(size=3)}


def _outputs(made: Any, given: dict[str, Any]) -> list[Any]:
    out = interpret(made, given, calls=CALLS)
    types = [made[name].type for name in made.outputs]
    return [gathered(held, t, made.mesh) for held, t in zip(out.outputs, types, strict=True)]


@pytest.mark.parametrize(("ranks", "b"), [(1, 4), (2, 4), (3, 7), (4, 2)])
def test_gradients_of_a_call_are_those_of_what_it_computes(ranks: int, b: int) -> None:
    made = trained.on(mesh(dp=ranks), b=b)
    plain = written.on(mesh(dp=ranks), b=b)
    for found, expected in zip(_outputs(made, _given(b)), _outputs(plain, _given(b)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_results_lie_as_samples_do() -> None:
    made = trained.on(mesh(dp=2), b=8)
    calls = {str(n.attr("function")): n for n in made.nodes if n.op == "call"}
    assert set(calls) == {"scaled.keeping", "scaled.backward"}
    types = {
        (name, n.attr("index")): str(n.type)
        for name, node in calls.items()
        for n in made.nodes
        if n.inputs == (node.name,)
    }
    assert types == {
        ("scaled.keeping", 0): "f32[8×3] dp:S(0)",
        ("scaled.keeping", 1): "f32[3] dp:P",
        ("scaled.keeping", 2): "f32[8×3] dp:S(0)",
        ("scaled.backward", 0): "f32[8×3] dp:S(0)",
        ("scaled.backward", 1): "f32[3] dp:P",
    }


def test_what_no_axis_cuts_stays_whole_and_what_is_local_stays_local() -> None:
    @program(axis="dp")
    def called(x: R["b", 3], z: L["b", 3], w: R[3]):
        y, total = SCALED(x, w)
        (dw,) = grad(sum(y), (w,))
        other, _ = SCALED(z, w)
        return y, total, dw, other

    made = called.on(mesh(dp=2), b=4)
    assert [str(made[name].type).split()[-1] for name in made.outputs] == ["R", "R", "R", "dp:L"]
    functions = [n.attr("function") for n in made.nodes if n.op == "call"]
    assert functions[-1] == "scaled", "what nobody differentiates keeps nothing"
    assert "scaled.backward.weights" in functions, "nobody asked for the gradient of x"


def _refused(text: str, layout: Any, w_layout: Any = R[3], b: int = 4, cols: int = 3) -> None:
    @program(x=layout["b", cols], w=w_layout)
    def called(x, w):
        return SCALED(x, w)[0]

    with pytest.raises(ProgramError, match=text) as error:
        called.on(mesh(dp=2), b=b)
    assert "test_calls.py" in str(error.value), "it names the user's line"
    assert "SCALED(x, w)" in str(error.value)


def test_what_cannot_be_called_is_refused_with_the_users_line() -> None:
    _refused("all_reduce it first", P)
    _refused("all_gather it on axis 'dp'", S(0), S(0)[3])
    _refused("samples along dimension 0", S(1))
    _refused("captured with x as", S(0), cols=5)

    @program
    def twice(x: R["b", 3], w: R[3]):
        SCALED(x, w)
        other = Function(name="scaled", operands=SCALED.operands, results=SCALED.results)
        return other(x, w)

    with pytest.raises(ProgramError, match="two functions called 'scaled'"):
        twice.on(mesh(dp=2), b=4)

    @program
    def named(x: R["b", 3], w: R[3]):
        return SCALED(x, w=w)

    with pytest.raises(ProgramError, match=r"by position, got w by name: scaled\(x, w\)"):
        named.on(mesh(dp=2), b=4)

    @program
    def opaque(x: R["b", 3]):
        (y,) = call("model", x, outs=[Type(shape=(4, 3))])
        return grad(sum(y), (x,))

    with pytest.raises(ProgramError, match="has no gradient"):
        opaque.on(mesh(dp=2), b=4)


ROWS = Function(name="rows", operands=(X, W), results=(Slot(name="y", shape=(1, 3), dim=0),))


@program
def gathered_rows(x: S(0)["b", 3], w: R[3]):
    whole = all_gather(x)
    y = ROWS(whole, w)
    return y * 2.0


@pytest.mark.parametrize("b", [8, 9])
def test_a_call_is_cut_into_chunks_of_samples(b: int) -> None:
    seen: list[int] = []

    def rows(x: Any, w: Any) -> Any:
        seen.append(len(x))
        return x * w

    made = gathered_rows.on(mesh(dp=2), b=b)
    cut = made.chunk(2, "whole", made.outputs[0]).overlap()
    given = {name: value for name, value in _given(b).items() if name != "a"}
    whole = interpret(made, given, calls={"rows": rows})
    assert seen == [b, b]
    parts = interpret(cut, given, calls={"rows": rows})
    assert len(seen) == 2 + 4
    for one, other in zip(whole.outputs[0], parts.outputs[0], strict=True):
        np.testing.assert_array_equal(one, other)
    tasks = [task.name for task in lower(cut).tasks]
    assert "rows[0]" in tasks
    second = next(task for task in lower(cut).tasks if task.name == "rows[1]")
    assert second.after == ("whole[1]",), "a chunk of samples waits for its own gather only"


def test_what_sums_over_samples_is_not_cut() -> None:
    made = trained.on(mesh(dp=2), b=8)
    node = next(n.name for n in made.nodes if n.attr("function") == "scaled.backward")
    with pytest.raises(ProgramError, match="a sum over its samples"):
        made.chunk(2, node)


def test_memory_of_a_call_is_that_of_its_results() -> None:
    made = gathered_rows.on(mesh(dp=2), b=1 << 10)
    assert simulate(lower(made), MachineCosts()).peak_bytes >= 2 * 3 * 4 * 1024


def test_batch_says_of_a_call_by_name_where_its_samples_are() -> None:
    @program
    def counted(x: S(0)["b", 3]):
        outs = [Type(shape=(6,)), Type(shape=())]
        rows, total = call("norms", x, outs=outs, batch=((0,), (0, "sum")))
        return rows, all_reduce(total)

    made = counted.on(mesh(dp=2), b=6)
    x = np.arange(18.0).reshape(6, 3)
    out = interpret(
        made, {"x": x}, calls={"norms": lambda x: ((x * x).sum(1), np.asarray(x.sum()))}
    )
    np.testing.assert_allclose(np.concatenate(out.outputs[0]), (x * x).sum(1))
    assert float(out.outputs[1][0]) == x.sum()
