"""The operations of a program, one line each, with what they compute.

Kinds:

    leaf       input, scalar, const: given values
    pointwise  element by element, shapes broadcast as in NumPy
    reduce     over some dimensions
    matmul     the last two dimensions; those before them are batches
    shape      the same elements in another shape
    move       communication along an axis: layouts change, the value does not
    state      update of an input in place; slice of a replicated value
    io         load and store
    call       a function of the user, opaque

`linear` says how a pointwise operation works on partial values: "add" if all operands are partial,
"scale" if one is and the others are not, "" never.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.step.program.random import draws, threshold

__all__ = ["MOVES", "OPS", "Array", "Elements", "Op", "computed", "is_move", "is_pointwise"]

Array = npt.NDArray[Any]
Attrs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Elements:
    """Which elements of a whole value are computed: random draws depend on their numbers."""

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


Compute = Callable[[Sequence[Array], Attrs, Elements], Array]


@dataclass(frozen=True, slots=True)
class Op:
    """One operation."""

    name: str
    kind: str
    num_inputs: tuple[int, int] = (1, 1)
    """At least, at most."""
    linear: str = ""
    result: str = "same"
    """Element type of the result: same, bool or float."""
    compute: Compute | None = None
    cost: float = 1.0
    """Time for an element, in additions."""


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _gelu(x: Array) -> Array:
    out: Array = 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0))) if x.size else x
    return out


def _sigmoid(x: Array) -> Array:
    out: Array = 0.5 * (1.0 + np.tanh(0.5 * x))
    return out


def _dropout(args: Sequence[Array], attrs: Attrs, elements: Elements) -> Array:
    x, seed = args
    share = float(attrs["share"])
    kept = draws(int(seed), elements.indices()) >= threshold(share)
    out: Array = np.where(kept, x / (1.0 - share), 0.0)
    return out


def _softmax(args: Sequence[Array], attrs: Attrs, elements: Elements) -> Array:
    (x,) = args
    raised = np.exp(x - x.max(axis=attrs["dim"], keepdims=True, initial=-np.inf))
    out: Array = raised / raised.sum(axis=attrs["dim"], keepdims=True)
    return out


def _of(function: Callable[..., Any]) -> Compute:
    return lambda args, attrs, elements: function(*args)


def _reduced(function: Callable[..., Any]) -> Compute:
    def compute(args: Sequence[Array], attrs: Attrs, elements: Elements) -> Array:
        out: Array = function(args[0], axis=tuple(attrs["dims"]), keepdims=bool(attrs["keep"]))
        return out

    return compute


def _extreme(function: Callable[..., Any], sign: int) -> Compute:
    """The largest or smallest element; of no elements, the limit of the element type."""

    def compute(args: Sequence[Array], attrs: Attrs, elements: Elements) -> Array:
        (x,) = args
        limit = np.inf if x.dtype.kind == "f" else np.iinfo(np.int64).max
        whole = x.astype(np.int64) if x.dtype.kind == "b" else x
        out: Array = function(
            whole, axis=tuple(attrs["dims"]), keepdims=bool(attrs["keep"]), initial=sign * limit
        )
        return out

    return compute


def _op(name: str, kind: str, num: int = 1, **more: Any) -> Op:
    return Op(name, kind, (num, num), **more)


def _pointwise() -> Iterator[Op]:
    def unary(name: str, function: Callable[..., Any], **more: Any) -> Op:
        return _op(name, "pointwise", 1, compute=_of(function), **more)

    def binary(name: str, function: Callable[..., Any], **more: Any) -> Op:
        return _op(name, "pointwise", 2, compute=_of(function), **more)

    yield binary("add", np.add, linear="add")
    yield binary("sub", np.subtract, linear="add")
    yield binary("mul", np.multiply, linear="scale")
    yield binary("div", np.divide, linear="scale", result="float", cost=4)
    yield binary("pow", np.power, cost=20)
    yield binary("maximum", np.maximum)
    yield binary("minimum", np.minimum)
    yield unary("neg", np.negative, linear="scale")
    yield unary("abs", np.abs)
    yield unary("sign", np.sign)
    yield unary("sqrt", np.sqrt, result="float", cost=4)
    yield unary("rsqrt", lambda x: 1.0 / np.sqrt(x), result="float", cost=5)
    yield unary("exp", np.exp, result="float", cost=10)
    yield unary("log", np.log, result="float", cost=10)
    yield unary("tanh", np.tanh, result="float", cost=12)
    yield unary("sigmoid", _sigmoid, result="float", cost=12)
    yield unary("relu", lambda x: np.maximum(x, 0))
    yield unary("gelu", _gelu, result="float", cost=15)
    yield unary("silu", lambda x: x * _sigmoid(x), result="float", cost=12)
    yield unary("erf", _erf, result="float", cost=12)
    yield unary("not", np.logical_not, result="bool")
    # A cast changes values where bits are lost, so it does not commute with a sum.
    yield unary("cast", lambda x: x)
    yield _op("where", "pointwise", 3, compute=_of(np.where), linear="where")
    yield _op("dropout", "pointwise", 2, compute=_dropout, linear="scale", cost=8)
    for name, function in _COMPARED.items():
        yield binary(name, function, result="bool")


_COMPARED: dict[str, Callable[..., Any]] = {
    **{"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal},
    **{"eq": np.equal, "ne": np.not_equal, "and": np.logical_and, "or": np.logical_or},
}
_MOVES = "all_reduce reduce_scatter all_gather all_to_all reduce broadcast send"


def _others() -> Iterator[Op]:
    yield from (_op(name, "leaf", 0) for name in ("input", "scalar", "const"))
    yield _op("sum", "reduce", linear="scale", compute=_reduced(np.sum))
    yield _op("max", "reduce", compute=_extreme(np.max, -1))
    yield _op("min", "reduce", compute=_extreme(np.min, 1))
    yield _op("softmax", "reduce", result="float", compute=_softmax, cost=15)
    yield _op("matmul", "matmul", 2, compute=_of(np.matmul))
    yield _op("transpose", "shape", compute=lambda a, attrs, _: a[0].transpose(attrs["dims"]))
    yield from (_op(name, "shape") for name in ("unflatten", "flatten", "expand"))
    yield _op("slice", "state")
    yield _op("update", "state", 2)
    yield from (_op(name, "move") for name in _MOVES.split())
    yield _op("recv", "state", 2)
    yield _op("load", "io", 0)
    yield _op("store", "io", 1)
    yield Op("call", "call", (0, 1 << 16))
    yield _op("pick", "shape")


OPS: dict[str, Op] = {op.name: op for op in [*_pointwise(), *_others()]}

MOVES = tuple(op.name for op in OPS.values() if op.kind == "move")


def computed(op: str, args: Sequence[Any], attrs: Attrs, dtype: str) -> Array:
    """Return the result of an operation on numbers; computed in floats, if the result is one.

    A user may give integers where the program has floats, and those would overflow: `2**t`.
    """
    compute = OPS[op].compute
    assert compute is not None
    kind = np.float64 if dtype == "f64" and op != "dropout" else None
    with np.errstate(all="ignore"):
        return compute([np.asarray(arg, kind) for arg in args], attrs, Elements((), ()))


def is_pointwise(op: str) -> bool:
    """Whether an operation works element by element."""
    return OPS[op].kind == "pointwise"


def is_move(op: str) -> bool:
    """Whether an operation communicates."""
    return OPS[op].kind == "move"
