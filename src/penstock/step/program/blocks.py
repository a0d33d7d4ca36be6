"""Ready programs: tensor-parallel layers and a pipeline's stage, forward and backward.

    block = mlp.on(mesh(tp=4), t=2048, d=4096, h=16384)
    trained = with_gradients(mlp).on(mesh(tp=4), t=2048, d=4096, h=16384)

Weights of the first product are sliced by columns, those of the second by rows, so that one
all-reduce ends each block; the backward half, which `grad` writes, has another one. A stage
receives the value that the stage before it sent one iteration earlier: after as many iterations as
there are stages all of them are at work, each on another microbatch.
"""

from __future__ import annotations

import inspect
import math
from functools import wraps
from typing import Any

from penstock.step.program import language as lang
from penstock.step.program.gradient import grad
from penstock.step.program.language import Template, program
from penstock.step.program.layouts import L, Layout, R, S
from penstock.step.program.trace import Value

__all__ = [
    "attention",
    "column_linear",
    "mlp",
    "row_linear",
    "stage",
    "stage_backward",
    "with_gradients",
]


@program(axis="tp", x=R["t", "d"], w=S(1)["d", "h"], b=S(0)["h"])
def column_linear(x: Value, w: Value, b: Value) -> Value:
    """Return x @ w + b, its columns sliced."""
    return x @ w + b


@program(axis="tp", x=S(1)["t", "h"], w=S(0)["h", "d"], b=R["d"])
def row_linear(x: Value, w: Value, b: Value) -> Value:
    """Return x @ w + b of an x whose columns are sliced."""
    y = lang.all_reduce(x @ w)
    return y + b


@program(axis="tp", x=R["t", "d"], w1=S(1)["d", "h"], w2=S(0)["h", "d"], b=R["d"])
def mlp(x: Value, w1: Value, w2: Value, b: Value, seed: int) -> Value:
    """Return x plus two layers with a GELU between them and dropout behind."""
    h = lang.gelu(x @ w1)
    y = lang.all_reduce(h @ w2)
    return lang.dropout(y + b, 0.1, seed) + x


def attention(heads: int) -> Template:
    """Return self-attention with a residual; each rank has its share of the heads.

    `mask` is added to the scores: minus infinity, or a large negative number, hides a place.
    """

    @program(
        axis="tp",
        x=R["b", "t", "d"],
        wq=S(1)["d", "k"],
        wk=S(1)["d", "k"],
        wv=S(1)["d", "k"],
        wo=S(0)["k", "d"],
        mask=R["t", "t"],
    )
    def self_attention(  # noqa: PLR0917 - a program's parameters are its inputs
        x: Value, wq: Value, wk: Value, wv: Value, wo: Value, mask: Value
    ) -> Value:
        def by_head(w: Value) -> Value:
            split = lang.unflatten(x @ w, 2, (heads, w.shape[1] // heads))
            return lang.transpose(split, 0, 2, 1, 3)

        q, k, v = by_head(wq), by_head(wk), by_head(wv)
        scores = q @ lang.transpose(k) / math.sqrt(wq.shape[1] / heads) + mask
        mixed = lang.transpose(lang.softmax(scores) @ v, 0, 2, 1, 3)
        y = lang.all_reduce(lang.flatten(mixed, 2) @ wo)
        return y + x

    return self_attention


def with_gradients(template: Template, *names: str) -> Template:
    """Return a program that also returns gradients, by the named parameters or by all tensors.

    It has one more input, `dy`: the gradient of the result, in its layout. Gradients of values that
    are replicated on the program's own axis are all-reduced along it; along other axes they stay
    partial, as an optimizer's program expects them.
    """
    function = template.function

    @wraps(function)
    def both(*args: Value) -> tuple[Value, ...]:
        y = function(*args)
        dy = _cotangent(y)
        given = dict(zip(inspect.signature(function).parameters, args, strict=True))
        asked = names or [n for n, value in given.items() if value.node.op == "input"]
        found = grad(y, [given[name] for name in asked], dy)
        return (
            y,
            *(_as_given(d, given[n], template.axis) for d, n in zip(found, asked, strict=True)),
        )

    return Template(both, axis=template.axis, layouts=template.layouts)


def _cotangent(y: Value) -> Value:
    made = y.type.with_layout(y.type.axes("P"), R)
    return y.tracer.add("input", [], {"type": made}, "dy")


def _as_given(d: Value, of: Value, axis: str | None) -> Value:
    for name in d.type.axes("P"):
        if name == axis and of.type.layout(name).kind == "R":
            d = lang.all_reduce(d, axis=name)
    return d


# -- pipelines ---------------------------------------------------------------------------------


def _on_stage(layout: Layout) -> Any:
    return layout.over("tp") & L.over("pp")


_STAGE = {
    "x": R["t", "d"],
    "inbox": _on_stage(R)["t", "d"],
    "w1": _on_stage(S(1))["d", "h"],
    "w2": _on_stage(S(0))["h", "d"],
    "b": _on_stage(R)["d"],
}


@program(axis="tp", **_STAGE)
def stage(  # noqa: PLR0917 - a program's parameters are its inputs
    x: Value, inbox: Value, w1: Value, w2: Value, b: Value, seed: int
) -> Value:
    """One stage of a pipeline of MLPs: receives a value, applies the layers, sends the result on.

    The first stage takes x, the others their inbox.
    """
    h = lang.recv(inbox, x, from_="prev", axis="pp")
    y: Value = mlp(h, w1, w2, b, seed)
    lang.update(inbox, lang.send(y, to="next", axis="pp"))
    return y


@program(axis="tp", x_in=_STAGE["inbox"], dy=_STAGE["x"], **_STAGE)
def stage_backward(  # noqa: PLR0917 - a program's parameters are its inputs
    x_in: Value,
    dy: Value,
    inbox: Value,
    w1: Value,
    w2: Value,
    b: Value,
    seed: int,
) -> tuple[Value, ...]:
    """The backward of a stage: gradients of its weights; its input's goes to the stage before.

    `x_in` is the input of the stage, whose layers are computed once more. The last stage takes dy,
    the others their inbox.
    """
    d = lang.recv(inbox, dy, from_="next", axis="pp")
    y = mlp(x_in, w1, w2, b, seed)
    dx, dw1, dw2, db = grad(y, (x_in, w1, w2, b), d)
    dx = _as_given(dx, x_in, "tp")
    lang.update(inbox, lang.send(dx, to="prev", axis="pp"))
    return dw1, dw2, db
