"""Layout inference: the type of a result, or why there is none.

Rules go axis by axis. A wrong program is refused where it is written, not where it deadlocks: the
root of a sum that is not reduced yet, slices along different dimensions, a gather of a value that
every rank has already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from penstock.errors import ProgramError
from penstock.step.program.layouts import DTYPES, L, Layout, P, R, S, partial
from penstock.step.program.mesh import Mesh
from penstock.step.program.ops import OPS, Op
from penstock.step.program.types import Type

__all__ = ["infer"]

Attrs = dict[str, Any]
_FLOATS = ("f64", "f32", "bf16", "f16")
_UNSIGNED = ("bool", "u8")
_WIDTH = {"bool": 0, "u8": 1, "i32": 2, "i64": 3, "f16": 4, "bf16": 4, "f32": 5, "f64": 6}


def infer(op: str, types: Sequence[Type], attrs: Attrs, mesh: Mesh) -> Type:
    """Return the type of the result of an operation on values of some types."""
    rule = OPS.get(op)
    if rule is None:
        raise ProgramError(f"there is no operation {op!r}; there are {', '.join(OPS)}")
    least, most = rule.num_inputs
    if not least <= len(types) <= most:
        raise ProgramError(f"{op} takes {least} values, got {len(types)}")
    if rule.kind in _BY_KIND:
        return _BY_KIND[rule.kind](rule, types, attrs, mesh)
    if op in _OF_ONE:
        return _OF_ONE[op](types[0], attrs, mesh)
    return _BY_NAME[op](types, attrs, mesh)


# -- element by element ------------------------------------------------------------------------


def broadcast_shape(shapes: Sequence[tuple[int, ...]], op: str) -> tuple[int, ...]:
    """Return the shape that some shapes broadcast to."""
    ndim = max(map(len, shapes))
    out = []
    for dim in range(-ndim, 0):
        lengths = {s[dim] for s in shapes if len(s) >= -dim} - {1}
        if len(lengths) > 1:
            shown = " and ".join("×".join(map(str, s)) for s in shapes)
            raise ProgramError(f"{op} of shapes {shown}: they do not broadcast together")
        out.append(lengths.pop() if lengths else 1)
    return tuple(out)


def _pointwise(op: Op, types: Sequence[Type], attrs: Attrs, mesh: Mesh) -> Type:
    operands = types[:1] if op.name == "dropout" else types
    shape = broadcast_shape([t.shape for t in operands], op.name)
    layouts = [(axis, _pointwise_axis(op, axis, types, shape)) for axis in mesh.names]
    dtype = str(attrs["dtype"]) if op.name == "cast" else _dtype(op, operands)
    if dtype not in DTYPES:
        raise ProgramError(f"no element type {dtype!r}; there are {', '.join(DTYPES)}")
    made = Type(shape=shape, dtype=dtype, layouts=tuple(layouts))
    for t in operands:
        _check_parts(op.name, t, made, mesh)
    return made


def _check_parts(op: str, t: Type, made: Type, mesh: Mesh) -> None:
    """Refuse an operand if a rank's part of it is too small for the rank's part of the result.

    Where several axes cut one dimension in turn, a part after the first cut contains the parts
    after both cuts; a part after the second cut alone does not.
    """
    for dim in range(t.ndim):
        at = dim + made.ndim - t.ndim
        if t.shape[dim] != made.shape[at]:
            continue
        have = [axis for axis in mesh.names if t.layout(axis) == S(dim)]
        need = [axis for axis in mesh.names if made.layout(axis) == S(at)]
        if have and need[: len(have)] != have:
            raise ProgramError(
                f"{op} of a value whose dimension {dim} is sliced on axis {' and '.join(have)} "
                f"beside one that is sliced on {' and '.join(need)}: parts of the mesh {mesh} are "
                f"cut by {need[0]!r} first; slice the one or gather the other"
            )


def _dtype(op: Op, types: Sequence[Type]) -> str:
    if op.name == "neg" and types[0].dtype in _UNSIGNED:
        raise ProgramError(
            f"-x of a value of {types[0].dtype}, which has no negative numbers: it would wrap "
            "around; cast it first, -cast(x, i32)"
        )
    if op.result == "bool":
        return "bool"
    counted = types[1:] if op.name == "where" else types
    # Numbers that the user writes do not widen a tensor.
    tensors = [t for t in counted if t.ndim] or list(counted)
    floats = [t.dtype for t in counted if t.dtype in _FLOATS and (t.ndim or tensors == counted)]
    names = floats or [t.dtype for t in tensors]
    if op.result == "float" and not floats:
        names = ["f32"]
    if not floats and any(t.dtype in _FLOATS for t in counted):
        names = ["f32"]
    widest = max(names, key=lambda name: _WIDTH[name])
    if {"bf16", "f16"} <= set(names):
        raise ProgramError(f"{op.name} of bf16 and f16; cast one of them")
    return widest


def _pointwise_axis(op: Op, axis: str, types: Sequence[Type], shape: tuple[int, ...]) -> Layout:
    layouts = [t.layout(axis) for t in types]
    if any(layout.kind == "P" for layout in layouts):
        return _partial_axis(op, axis, layouts)
    if (unsliced := _unsliced(op.name, axis, layouts)) is not None:
        return unsliced
    dims = {
        lay.dim + len(shape) - t.ndim
        for lay, t in zip(layouts, types, strict=True)
        if lay.kind == "S"
    }
    if len(dims) > 1:
        shown = " and ".join(str(lay) for lay in layouts if lay.kind == "S")
        raise ProgramError(
            f"{op.name} of values sliced as {shown} on axis {axis!r}; "
            "all_to_all one of them, or gather it"
        )
    (dim,) = dims
    for lay, t in zip(layouts, types, strict=True):
        if lay.kind == "S" and t.shape[lay.dim] != shape[dim]:
            raise ProgramError(
                f"{op.name}: a sliced dimension of {t.shape[lay.dim]} cannot be broadcast to "
                f"{shape[dim]} on axis {axis!r}; gather it first"
            )
    return S(dim)


def _unsliced(name: str, axis: str, layouts: Sequence[Layout]) -> Layout | None:
    """Return the layout of a result whose operands are replicated or local; None beside slices."""
    kinds = {layout.kind for layout in layouts}
    if kinds <= {"R"}:
        return R
    if kinds <= {"R", "L"}:
        return L
    if "L" in kinds:
        raise ProgramError(
            f"{name} of a local and a sliced value on axis {axis!r}: a local value has no parts"
        )
    return None


def _partial_axis(op: Op, axis: str, layouts: Sequence[Layout]) -> Layout:
    pending = [lay for lay in layouts if lay.kind == "P"]
    (what, *others) = dict.fromkeys(lay.op for lay in pending)
    if others:
        raise ProgramError(f"{op.name} of a partial {what} and a partial {others[0]}: reduce first")
    rest = [lay.kind for lay in layouts if lay.kind != "P"]
    linear = op.linear if what == "sum" else ""
    if op.name in ("maximum", "minimum") and op.name.startswith(what) and not rest:
        return partial(what)
    if linear == "add" and not rest:
        return P
    if linear == "where" and layouts[0].kind == "R" and not rest[1:]:
        return P
    is_divisor = op.name == "div" and layouts[-1].kind == "P"
    if linear == "scale" and len(pending) == 1 and set(rest) <= {"R"} and not is_divisor:
        return P
    raise ProgramError(
        f"{op.name} of a value that is still to be reduced on axis {axis!r} (partial {what}): "
        f"{op.name} of addends is no addend of {op.name} of the {what}; all_reduce or "
        "reduce_scatter it first"
        + (", or scale the other operand and reduce later" if linear else "")
    )


# -- reductions and products -------------------------------------------------------------------


def _dims(attrs: Attrs, ndim: int, op: str) -> tuple[int, ...]:
    dims = tuple(attrs["dims"])
    if any(not 0 <= d < ndim for d in dims):
        raise ProgramError(f"{op} over dimension {dims} of a value with {ndim} dimensions")
    return dims


def _reduction(op: Op, types: Sequence[Type], attrs: Attrs, mesh: Mesh) -> Type:
    (t,) = types
    dtype = t.dtype if op.result == "same" or t.is_float else "f32"
    if op.name == "sum" and dtype == "bool":
        dtype = "i64"
    if op.name == "softmax":
        for axis, layout in t.layouts:
            if layout.kind == "P" or (layout.kind == "S" and layout.dim == attrs["dim"]):
                raise ProgramError(
                    f"softmax along dimension {attrs['dim']} of a value held as {layout} on axis "
                    f"{axis!r}; every rank needs all of that dimension"
                )
        return replace(t, dtype=dtype)
    dims = _dims(attrs, t.ndim, op.name)
    keep = bool(attrs["keep"])
    shape = tuple(1 if d in dims else n for d, n in enumerate(t.shape) if keep or d not in dims)
    layouts = [(a, _reduced_axis(op, a, t.layout(a), dims, keep)) for a in mesh.names]
    return Type(shape=shape, dtype=dtype, layouts=tuple(layouts))


def _reduced_axis(op: Op, axis: str, layout: Layout, dims: tuple[int, ...], keep: bool) -> Layout:
    what = op.name if op.name in ("max", "min") else "sum"
    if layout.kind == "P":
        if layout.op == what:
            return layout
        raise ProgramError(
            f"{op.name} of a partial {layout.op} on axis {axis!r}: all_reduce it first"
        )
    if layout.kind != "S":
        return layout
    if layout.dim in dims:
        return partial(what)
    return S(layout.dim if keep else layout.dim - sum(d < layout.dim for d in dims))


def _matmul(op: Op, types: Sequence[Type], attrs: Attrs, mesh: Mesh) -> Type:
    a, b = types
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        shown = " and ".join("×".join(map(str, t.shape)) or "a number" for t in types)
        raise ProgramError(f"matmul of shapes {shown}: the inner lengths must be the same")
    if a.dtype != b.dtype:
        raise ProgramError(f"matmul of {a.dtype} and {b.dtype}; cast one of them")
    batch = broadcast_shape([a.shape[:-2] or (1,), b.shape[:-2] or (1,)], "matmul")
    batch = batch if max(a.ndim, b.ndim) > 2 else ()
    shape = (*batch, a.shape[-2], b.shape[-1])
    layouts = [(axis, _matmul_axis(axis, a, b, len(shape))) for axis in mesh.names]
    return Type(shape=shape, dtype=_dtype(op, types), layouts=tuple(layouts))


def _matmul_axis(axis: str, a: Type, b: Type, ndim: int) -> Layout:
    x, y = a.layout(axis), b.layout(axis)
    kinds = x.kind + y.kind
    # Dimensions counted from the right: -1 is the last of the result.
    i, j = x.dim - a.ndim, y.dim - b.ndim
    if kinds == "RR":
        return R
    if kinds in ("LL", "LR", "RL"):
        return L
    if kinds in ("PR", "RP") and (x if x.kind == "P" else y).op == "sum":
        return P
    if kinds == "SS" and i == -1 and j == -2:
        return P
    if kinds == "SR" and (i == -2 or (i < -2 and _has_one(b, i))):
        return S(ndim + i)
    if kinds == "RS" and (j == -1 or (j < -2 and _has_one(a, j))):
        return S(ndim + j)
    if kinds == "SS" and i == j and i < -2 and a.shape[i] == b.shape[j]:
        return S(ndim + i)
    raise ProgramError(
        f"matmul of values held as {x} and {y} on axis {axis!r}: possible are rows of the first, "
        "columns of the second, both along the inner dimension, or both along the same batch"
    )


def _has_one(t: Type, dim: int) -> bool:
    """Whether a value has one batch or none, so that it serves all batches of the other operand."""
    return t.ndim < -dim or t.shape[dim] == 1


# -- communication -----------------------------------------------------------------------------


def _axes(attrs: Attrs, mesh: Mesh) -> tuple[str, ...]:
    axes = attrs["axis"]
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    mesh.size(*axes)
    return axes


def _need(op: str, t: Type, axis: str, kind: str, way: str) -> Layout:
    layout = t.layout(axis)
    if layout.kind != kind:
        raise ProgramError(f"{op} on axis {axis!r} of a value held as {layout}; {way}")
    return layout


def _all_reduce(t: Type, attrs: Attrs, mesh: Mesh) -> Type:
    for axis in _axes(attrs, mesh):
        layout = _need("all_reduce", t, axis, "P", "only partial values need it")
        _same_reduction("all_reduce", layout, attrs, is_float=t.is_float)
        t = t.with_layout(axis, R)
    return t


def _same_reduction(op: str, layout: Layout, attrs: Attrs, *, is_float: bool) -> None:
    what = str(attrs["op"])
    if what == "mean" and not is_float:
        raise ProgramError(f"{op} by mean of whole numbers; cast them to floats, or take the sum")
    if what != layout.op and not (what == "mean" and layout.op == "sum"):
        way = layout.op + " or mean" * (layout.op == "sum")
        raise ProgramError(f"{op} by {what} of a partial {layout.op}; it goes by {way}")


def _reduce_scatter(t: Type, attrs: Attrs, mesh: Mesh) -> Type:
    for axis in _axes(attrs, mesh):
        layout = _need("reduce_scatter", t, axis, "P", "slice a replicated value instead")
        _same_reduction("reduce_scatter", layout, attrs, is_float=t.is_float)
        dim = _dim(attrs, t, "reduce_scatter")
        _innermost("reduce_scatter", t, axis, dim, mesh)
        t = t.with_layout(axis, S(dim))
    return t


def _innermost(op: str, t: Type, axis: str, dim: int, mesh: Mesh) -> None:
    """Refuse to cut or join along an axis if a later axis cuts those parts again."""
    for other in mesh.names[mesh.names.index(axis) + 1 :]:
        if t.layout(other) == S(dim):
            raise ProgramError(
                f"{op} on axis {axis!r} along dimension {dim}, which axis {other!r} slices as well "
                f"and cuts after it in the mesh {mesh}; begin with {other!r}, or name the axes of "
                "the mesh in the other order"
            )


def _dim(attrs: Attrs, t: Type, op: str) -> int:
    dim = int(attrs["dim"])
    if not 0 <= dim < t.ndim:
        raise ProgramError(f"{op} along dimension {dim} of a value with {t.ndim} dimensions")
    return dim


def _all_gather(t: Type, attrs: Attrs, mesh: Mesh) -> Type:
    for axis in _axes(attrs, mesh):
        layout = _need("all_gather", t, axis, "S", "only slices can be gathered")
        inner = [other for other in _axes(attrs, mesh) if other != axis]
        if any(t.layout(other).kind == "S" and t.layout(other) != layout for other in inner):
            shown = " and ".join(_axes(attrs, mesh))
            raise ProgramError(
                f"all_gather of axes {shown} that slice different dimensions; gather one by one"
            )
        _innermost("all_gather", t.with_layout(inner, R), axis, layout.dim, mesh)
        t = t.with_layout(axis, R)
    return t


def _all_to_all(t: Type, attrs: Attrs, mesh: Mesh) -> Type:
    (axis,) = _axes(attrs, mesh)
    layout = _need("all_to_all", t, axis, "S", "it turns slices of one dimension into another's")
    dim = _dim(attrs, t, "all_to_all")
    if layout.dim == dim:
        raise ProgramError(f"all_to_all to dimension {dim}, along which it is sliced already")
    _innermost("all_to_all", t, axis, layout.dim, mesh)
    _innermost("all_to_all", t, axis, dim, mesh)
    return t.with_layout(axis, S(dim))


def _reduce(t: Type, attrs: Attrs, mesh: Mesh) -> Type:
    (axis,) = _axes(attrs, mesh)
    layout = _need("reduce", t, axis, "P", "only partial values need it")
    _same_reduction("reduce", layout, attrs, is_float=t.is_float)
    _root(attrs, mesh, axis)
    return t.with_layout(axis, L)


def _root(attrs: Attrs, mesh: Mesh, axis: str) -> None:
    if not 0 <= int(attrs["root"]) < mesh.size(axis):
        raise ProgramError(f"root {attrs['root']} of axis {axis!r}, which has {mesh.size(axis)}")


def _broadcast(t: Type, attrs: Attrs, mesh: Mesh) -> Type:
    (axis,) = _axes(attrs, mesh)
    _need("broadcast", t, axis, "L", "only local values need it")
    _root(attrs, mesh, axis)
    return t.with_layout(axis, R)


def _send(t: Type, attrs: Attrs, mesh: Mesh) -> Type:
    (axis,) = _axes(attrs, mesh)
    if t.layout(axis).kind not in ("L", "R"):
        raise ProgramError(
            f"send along axis {axis!r} of a value held as {t.layout(axis)}; what is sent is whole "
            "on the rank that sends it"
        )
    return t.with_layout(axis, L)


def _recv(types: Sequence[Type], attrs: Attrs, mesh: Mesh) -> Type:
    sent, first = types
    (axis,) = _axes(attrs, mesh)
    if first.with_layout(axis, L) != sent.with_layout(axis, L):
        raise ProgramError(f"recv of {sent} where the first rank has {first}: they must be alike")
    return sent.with_layout(axis, L)


# -- the rest ----------------------------------------------------------------------------------


def _given(types: Sequence[Type], attrs: Attrs, mesh: Mesh) -> Type:
    found = attrs["type"]
    assert isinstance(found, Type)
    return found


def _slice(t: Type, attrs: Attrs, mesh: Mesh) -> Type:
    (axis,) = _axes(attrs, mesh)
    _need("slice", t, axis, "R", "only a replicated value can be sliced for nothing")
    dim = _dim(attrs, t, "slice")
    _innermost("slice", t, axis, dim, mesh)
    return t.with_layout(axis, S(dim))


def _update(types: Sequence[Type], attrs: Attrs, mesh: Mesh) -> Type:
    state, value = types
    if state.shape != value.shape or state.dtype != value.dtype:
        raise ProgramError(
            f"update of {state} with {value}: shape and element type must be the same"
        )
    for axis in mesh.names:
        held, got = state.layout(axis), value.layout(axis)
        if held != got and not (held.kind in ("S", "L") and got.kind == "R"):
            raise ProgramError(
                f"update on axis {axis!r} of a state held as {held} with a value held as {got}; "
                + ("all_gather it first" if got.kind == "S" else "reduce it first")
            )
    _check_parts("update", value, state, mesh)
    return state


def _transpose(t: Type, attrs: Attrs, mesh: Mesh) -> Type:
    dims = tuple(attrs["dims"])
    if sorted(dims) != list(range(t.ndim)):
        raise ProgramError(
            f"transpose by {dims} of a value with {t.ndim} dimensions; name each of them once, "
            "counted from 0: transpose(x, 1, 0)"
        )
    layouts = [(a, S(dims.index(y.dim)) if y.kind == "S" else y) for a, y in t.layouts]
    return Type(shape=tuple(t.shape[d] for d in dims), dtype=t.dtype, layouts=tuple(layouts))


def _unflatten(t: Type, attrs: Attrs, mesh: Mesh) -> Type:
    """A dimension becomes several; slices of it are slices of the first of them."""
    dim, lengths = _dim(attrs, t, "unflatten"), tuple(attrs["lengths"])
    if (total := math.prod(lengths)) != t.shape[dim]:
        said = f"unflatten of a dimension of {t.shape[dim]} into {lengths}"
        raise ProgramError(f"{said}, which makes {total}")
    shape = (*t.shape[:dim], *lengths, *t.shape[dim + 1 :])
    layouts, num_parts = [], mesh.size(*t.slicing(dim))
    for axis, layout in t.layouts:
        if layout.kind == "S" and layout.dim == dim and lengths[0] % num_parts:
            raise ProgramError(
                f"unflatten into {lengths} of a dimension that axis {axis!r} slices, of which "
                f"there are {num_parts} parts; {lengths[0]} must be a multiple of {num_parts}"
            )
        moved = layout.kind == "S" and layout.dim > dim
        layouts.append((axis, S(layout.dim + len(lengths) - 1) if moved else layout))
    return Type(shape=shape, dtype=t.dtype, layouts=tuple(layouts))


def _flatten(t: Type, attrs: Attrs, mesh: Mesh) -> Type:
    """Several dimensions become one; only the first of them may be sliced, and evenly."""
    dim, count = _dim(attrs, t, "flatten"), int(attrs["count"])
    merged = t.shape[dim : dim + count]
    if len(merged) < count:
        raise ProgramError(f"flatten of {count} dimensions from {dim} of a value with {t.ndim}")
    length = math.prod(merged)
    layouts = []
    for axis, layout in t.layouts:
        inside = layout.kind == "S" and dim <= layout.dim < dim + count
        if inside and (layout.dim > dim or merged[0] % mesh.size(*t.slicing(dim))):
            raise ProgramError(
                f"flatten of dimensions {dim} to {dim + count - 1} of a value held as {layout} on "
                f"axis {axis!r}: only the first may be sliced, and evenly"
            )
        moved = layout.kind == "S" and layout.dim >= dim + count
        layouts.append((axis, S(layout.dim - count + 1) if moved else layout))
    shape = (*t.shape[:dim], length, *t.shape[dim + count :])
    return Type(shape=shape, dtype=t.dtype, layouts=tuple(layouts))


def _expand(t: Type, attrs: Attrs, mesh: Mesh) -> Type:
    """Dimensions that a sum has taken away come back, each of one element repeated."""
    shape, dims = tuple(attrs["shape"]), tuple(attrs["dims"])
    kept = [dim for dim in range(len(shape)) if attrs["keep"] or dim not in dims]
    small = tuple(1 if d in dims else shape[d] for d in kept)
    if t.shape != small:
        raise ProgramError(f"expand of {t.shape} to {shape} along {dims}")
    layouts = [(a, S(kept[y.dim]) if y.kind == "S" else y) for a, y in t.layouts]
    return Type(shape=shape, dtype=t.dtype, layouts=tuple(layouts))


def _store(t: Type, attrs: Attrs, mesh: Mesh) -> Type:
    for axis in t.axes("P"):
        raise ProgramError(f"store of a value that is still to be reduced on axis {axis!r}")
    return t


def _call(types: Sequence[Type], attrs: Attrs, mesh: Mesh) -> Type:
    """The type of a call: one element a sample if samples are independent, or its first result."""
    if "batch" not in attrs:
        first = attrs["outs"][0]
        assert isinstance(first, Type)
        return first
    name, dims = str(attrs["function"]), attrs["batch"][0]
    if len(dims) != len(types):
        raise ProgramError(f"{name} takes {len(dims)} values, got {len(types)}")
    lengths = {t.shape[d] for t, d in zip(types, dims, strict=True) if d is not None}
    if len(lengths) > 1:
        raise ProgramError(f"{name} of {' and '.join(map(str, sorted(lengths)))} samples at once")
    layouts = [(axis, _call_axis(name, axis, types, dims)) for axis in mesh.names]
    return Type(shape=tuple(lengths), layouts=tuple(layouts))


def _call_axis(name: str, axis: str, types: Sequence[Type], dims: Sequence[int | None]) -> Layout:
    layouts = [t.layout(axis) for t in types]
    if any(layout.kind == "P" for layout in layouts):
        raise ProgramError(
            f"{name} of a value that is still to be reduced on axis {axis!r}: its results on "
            "addends are no addends of its result on the sum; all_reduce it first"
        )
    if (unsliced := _unsliced(name, axis, layouts)) is not None:
        return unsliced
    for number, (layout, dim, t) in enumerate(zip(layouts, dims, types, strict=True)):
        if dim is None and layout.kind == "S":
            raise ProgramError(
                f"{name} needs all of operand {number} ({t}) for each of its samples; "
                f"all_gather it on axis {axis!r}"
            )
        if dim is not None and layout != S(dim):
            raise ProgramError(
                f"{name} has samples along dimension {dim} of operand {number}, which is {t}; "
                f"slice it there on axis {axis!r} like the others, or gather them"
            )
    return S(0)


def _pick(types: Sequence[Type], attrs: Attrs, mesh: Mesh) -> Type:
    """A result of a call; where it goes through samples, sliced like them or a sum over them."""
    made = _given(types, attrs, mesh)
    if "along" not in attrs:
        return made
    dim = attrs["along"]
    by_samples = P if dim == "sum" else S(int(dim))
    layouts = [(axis, by_samples if y.kind == "S" else y) for axis, y in types[0].layouts]
    return Type(shape=made.shape, dtype=made.dtype, layouts=tuple(layouts))


_BY_KIND: dict[str, Callable[[Op, Sequence[Type], Attrs, Mesh], Type]] = {
    "pointwise": _pointwise,
    "reduce": _reduction,
    "matmul": _matmul,
}
_OF_ONE: dict[str, Callable[[Type, Attrs, Mesh], Type]] = {
    "store": _store,
    "slice": _slice,
    "transpose": _transpose,
    "unflatten": _unflatten,
    "flatten": _flatten,
    "expand": _expand,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "send": _send,
}
_BY_NAME: dict[str, Callable[[Sequence[Type], Attrs, Mesh], Type]] = {
    "input": _given,
    "scalar": _given,
    "const": lambda types, attrs, mesh: Type(
        shape=(), dtype="f64" if isinstance(attrs["value"], float) else "i64"
    ),
    "load": _given,
    "pick": _pick,
    "call": _call,
    "update": _update,
    "recv": _recv,
}
