"""The operations of a program, one line each: what they are, and what they compute.

Kinds:

    leaf       input, scalar, const: values that are there
    pointwise  element by element, shapes broadcast as in NumPy
    reduce     over some dimensions
    matmul     the last two dimensions; those before them are batches
    shape      the same elements seen differently
    move       communication along an axis: layouts change, the value does not
    state      update of an input in place; slice of what a rank has anyway
    io         load and store
    call       a function of the user, opaque

`linear` says what a pointwise operation does to sums that are still to be made: "add" goes through
if all operands are such sums, "scale" if one is and the others are not, "" never.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.step.program.random import draws, threshold

__all__ = ["MOVES", "OPS", "Array", "Op", "Place", "computed", "is_move", "is_pointwise"]

Array = npt.NDArray[Any]
Attrs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the whole value the elements lie that are computed."""

    shape: tuple[int, ...]
    coordinates: tuple[npt.NDArray[np.int64], ...]
    """By dimension."""

    def indices(self) -> npt.NDArray[np.int64]:
        """Return the number of each element in the whole value."""
        out = np.zeros((1,) * len(self.shape), np.int64)
        for dim, (length, at) in enumerate(zip(self.shape, self.coordinates, strict=True)):
            along = at.reshape([-1 if d == dim else 1 for d in range(len(self.shape))])
            out = out * length + along
        return out


Compute = Callable[[Sequence[Array], Attrs, Place], Array]


@dataclass(frozen=True, slots=True)
class Op:
    """One operation."""

    name: str
    kind: str
    num_inputs: tuple[int, int] = (1, 1)
    """At least, at most."""
    linear: str = ""
    result: str = "same"
    """Element type of the result: same, bool, float."""
    compute: Compute | None = None
    cost: float = 1.0
    """Of an element, beside that of an addition."""


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _gelu(x: Array) -> Array:
    out: Array = 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0))) if x.size else x
    return out


def _sigmoid(x: Array) -> Array:
    out: Array = 0.5 * (1.0 + np.tanh(0.5 * x))
    return out


def _dropout(args: Sequence[Array], attrs: Attrs, place: Place) -> Array:
    x, seed = args
    share = float(attrs["share"])
    kept = draws(int(seed), place.indices()) >= threshold(share)
    out: Array = np.where(kept, x / (1.0 - share), 0.0)
    return out


def _softmax(args: Sequence[Array], attrs: Attrs, place: Place) -> Array:
    (x,) = args
    raised = np.exp(x - x.max(axis=attrs["dim"], keepdims=True, initial=-np.inf))
    out: Array = raised / raised.sum(axis=attrs["dim"], keepdims=True)
    return out


def _of(function: Callable[..., Any]) -> Compute:
    return lambda args, attrs, place: function(*args)


def _reduced(function: Callable[..., Any]) -> Compute:
    def compute(args: Sequence[Array], attrs: Attrs, place: Place) -> Array:
        out: Array = function(args[0], axis=tuple(attrs["dims"]), keepdims=bool(attrs["keep"]))
        return out

    return compute


def _extreme(function: Callable[..., Any], sign: int) -> Compute:
    """The largest or smallest of some; of none, what any other is larger or smaller than."""

    def compute(args: Sequence[Array], attrs: Attrs, place: Place) -> Array:
        (x,) = args
        limit = np.inf if x.dtype.kind == "f" else np.iinfo(np.int64).max
        whole = x.astype(np.int64) if x.dtype.kind == "b" else x
        out: Array = function(
            whole, axis=tuple(attrs["dims"]), keepdims=bool(attrs["keep"]), initial=sign * limit
        )
        return out

    return compute


def _op(name: str, kind: str, num: int | tuple[int, int] = 1, **more: Any) -> Op:
    return Op(name, kind, (num, num) if isinstance(num, int) else num, **more)


def _pointwise() -> list[Op]:
    def unary(name: str, function: Callable[..., Any], **more: Any) -> Op:
        return _op(name, "pointwise", 1, compute=_of(function), **more)

    def binary(name: str, function: Callable[..., Any], **more: Any) -> Op:
        return _op(name, "pointwise", 2, compute=_of(function), **more)

    ops = [
        binary("add", np.add, linear="add"),
        binary("sub", np.subtract, linear="add"),
        binary("mul", np.multiply, linear="scale"),
        binary("div", np.divide, linear="scale", result="float", cost=4),
        binary("pow", np.power, cost=20),
        binary("maximum", np.maximum),
        binary("minimum", np.minimum),
        unary("neg", np.negative, linear="scale"),
        unary("abs", np.abs),
        unary("sign", np.sign),
        unary("sqrt", np.sqrt, result="float", cost=4),
        unary("rsqrt", lambda x: 1.0 / np.sqrt(x), result="float", cost=5),
        unary("exp", np.exp, result="float", cost=10),
        unary("log", np.log, result="float", cost=10),
        unary("tanh", np.tanh, result="float", cost=12),
        unary("sigmoid", _sigmoid, result="float", cost=12),
        unary("relu", lambda x: np.maximum(x, 0)),
        unary("gelu", _gelu, result="float", cost=15),
        unary("silu", lambda x: x * _sigmoid(x), result="float", cost=12),
        unary("erf", _erf, result="float", cost=12),
        unary("not", np.logical_not, result="bool"),
        # A cast changes values where bits are lost, so it does not commute with a sum.
        _op("cast", "pointwise", 1, compute=lambda args, attrs, place: args[0]),
        _op("where", "pointwise", 3, compute=_of(np.where), linear="where"),
        _op("dropout", "pointwise", 2, compute=_dropout, linear="scale", cost=8),
    ]
    compared: list[tuple[str, Callable[..., Any]]] = [
        ("lt", np.less),
        ("le", np.less_equal),
        ("gt", np.greater),
    ]
    compared += [("ge", np.greater_equal), ("eq", np.equal), ("ne", np.not_equal)]
    compared += [("and", np.logical_and), ("or", np.logical_or)]
    return ops + [binary(name, function, result="bool") for name, function in compared]


def _others() -> list[Op]:
    return [
        _op("input", "leaf", 0),
        _op("scalar", "leaf", 0),
        _op("const", "leaf", 0),
        _op("sum", "reduce", linear="scale", compute=_reduced(np.sum)),
        _op("max", "reduce", compute=_extreme(np.max, -1)),
        _op("min", "reduce", compute=_extreme(np.min, 1)),
        _op("softmax", "reduce", result="float", compute=_softmax, cost=15),
        _op("matmul", "matmul", 2, compute=_of(np.matmul)),
        _op("transpose", "shape", compute=lambda a, attrs, p: a[0].transpose(attrs["dims"])),
        _op("unflatten", "shape"),
        _op("flatten", "shape"),
        _op("expand", "shape"),
        _op("slice", "state"),
        _op("update", "state", 2),
        _op("all_reduce", "move"),
        _op("reduce_scatter", "move"),
        _op("all_gather", "move"),
        _op("all_to_all", "move"),
        _op("reduce", "move"),
        _op("broadcast", "move"),
        _op("send", "move"),
        _op("recv", "state", 2),
        _op("load", "io", 0),
        _op("store", "io", 1),
        _op("call", "call", (0, 1 << 16)),
        _op("pick", "shape"),
    ]


OPS: dict[str, Op] = {op.name: op for op in [*_pointwise(), *_others()]}

MOVES = tuple(op.name for op in OPS.values() if op.kind == "move")


def computed(op: str, args: Sequence[Any], attrs: Attrs, dtype: str) -> Array:
    """Return what an operation makes of numbers; in floats, where its result is one.

    Whole numbers may be given where the program has floats, and would run over: `2**t`.
    """
    compute = OPS[op].compute
    assert compute is not None
    kind = np.float64 if dtype == "f64" and op != "dropout" else None
    with np.errstate(all="ignore"):
        return compute([np.asarray(arg, kind) for arg in args], attrs, Place((), ()))


def is_pointwise(op: str) -> bool:
    """Whether an operation works element by element."""
    return OPS[op].kind == "pointwise"


def is_move(op: str) -> bool:
    """Whether an operation communicates."""
    return OPS[op].kind == "move"
