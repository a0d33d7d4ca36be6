"""Gradients: the backward half of a program, written by rules instead of by hand.

`grad(y, (x, w), dy)` adds the derivatives of y by x and by w, times dy, to a program. A gradient is
a value like any other, with the layout that follows from the rules: the gradient of a replicated
weight, where ranks have slices of the batch, is partial and needs an all-reduce, as in data
parallel training; the gradient of an activation before a sliced weight is partial on the tensor
parallel axis. Where two paths meet in different layouts, the sum is made in the one that moves
least.

Only values between y and the requested ones are differentiated. A call of a captured function
(`calls`) becomes a call of its backward; a function that is known by name only has no rule: give
its backward as another call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from penstock.errors import ProgramError
from penstock.step.program import language as lang
from penstock.step.program.calls import written_backward
from penstock.step.program.layouts import Layout
from penstock.step.program.mistakes import operation
from penstock.step.program.nodes import Node
from penstock.step.program.trace import Tracer, Value

__all__ = ["grad"]

Parts = list[Value | None]
Rule = Callable[[Node, Value, list[Value], Value], Parts]
"""From a node, the gradient of its result, its operands and the result: the operands' gradients."""


@operation
def grad(y: Value, wrt: Sequence[Value], dy: Value | float = 1.0) -> tuple[Value, ...]:
    """Return the gradients of y, times dy, by some values, each in the layout that follows.

    `dy` has the shape of y; without it y is a single number, such as a loss.
    """
    tracer = y.tracer
    if isinstance(wrt, Value):
        raise ProgramError(f"grad by {wrt.name} alone; write (g,) = ps.grad(y, ({wrt.name},))")
    if not isinstance(dy, Value):
        if y.type.ndim:
            raise ProgramError(
                f"the gradient of {y.name} ({y.type}) needs dy, a value of its shape"
            )
        dy = lang.cast(tracer.value(float(dy)), y.type.dtype)
    elif dy.shape != y.shape:
        raise ProgramError(f"dy has shape {dy.shape}, {y.name} has {y.shape}")
    path = _path(tracer, y, wrt)
    found: dict[str, Value] = {y.name: dy}
    # Backwards over a copy: rules add nodes, and all readers of a value come before the value.
    for name in reversed(list(tracer.nodes)):
        if name not in path or name not in found:
            continue
        node = tracer.nodes[name]
        operands = [Value(tracer, tracer.nodes[n]) for n in node.inputs]
        if not any(n in path for n in node.inputs):
            continue
        if node.op == "pick":
            # The call has all of its results' gradients when its turn comes: it stands before them.
            found.setdefault(node.inputs[0], found[name])
            continue
        if node.op == "call":
            parts = _call(tracer, node, found, path)
        else:
            parts = _by_rule(node, found[name], operands, Value(tracer, node))
        for operand, part in zip(operands, parts, strict=True):
            if part is not None and operand.name in path:
                one, before = _unbroadcast(part, operand), found.get(operand.name)
                found[operand.name] = one if before is None else _added(before, one)
    return tuple(_found(found, value) for value in wrt)


def _by_rule(node: Node, d: Value, operands: list[Value], y: Value) -> Parts:
    rule = _RULES.get(node.op)
    if rule is None:
        raise ProgramError(
            f"{node.where}: {node.op} ({node.name}) has no gradient; "
            "write the backward of that part as a program or a call of its own"
        )
    return rule(node, _whole_for(node, d), operands, y)


def _found(found: dict[str, Value], value: Value) -> Value:
    if value.name not in found:
        raise ProgramError(f"nothing that is differentiated depends on {value.name}")
    return found[value.name]


def _path(tracer: Tracer, y: Value, wrt: Sequence[Value]) -> set[str]:
    """Return the values between the requested ones and y, both included."""
    below = {value.name for value in wrt}
    for name, node in tracer.nodes.items():
        if any(n in below for n in node.inputs):
            below.add(name)
    above = {y.name}
    for name in reversed(list(tracer.nodes)):
        if name in above:
            above.update(tracer.nodes[name].inputs)
    return below & above


def _whole_for(node: Node, d: Value) -> Value:
    """Return the gradient of a result, all-reduced where the rule of its node is not linear.

    An addend of a partial sum has the gradient of the sum, which every rank then needs whole.
    """
    for axis in node.type.axes("P"):
        d = _reduced(d, axis)
    if node.op in ("all_gather", "slice", "all_to_all", "send", "recv"):
        return d
    linear = node.op in ("add", "sub", "neg", "mul", "sum", "matmul", "transpose", "flatten")
    if not linear:
        for axis in d.type.axes("P"):
            d = lang.all_reduce(d, axis=axis)
    return d


def _unbroadcast(d: Value, operand: Value) -> Value:
    """Return a gradient summed over the dimensions along which its value was repeated."""
    extra = d.type.ndim - operand.type.ndim
    if extra > 0:
        d = lang.sum(d, range(extra))
    ones = [k for k, n in enumerate(operand.shape) if n == 1 and d.shape[k] != 1]
    return lang.sum(d, ones, keep=True) if ones else d


def _added(a: Value, b: Value) -> Value:
    """Return the sum of two gradients of one value, whatever their layouts."""
    for axis in a.tracer.mesh.names:
        one, other = a.type.layout(axis), b.type.layout(axis)
        if one == other:
            continue
        kinds = {one.kind, other.kind}
        if kinds == {"P", "S"}:
            sliced = one if one.kind == "S" else other
            a, b = _held_as(a, axis, sliced), _held_as(b, axis, sliced)
        elif "P" in kinds:
            a, b = _reduced(a, axis), _reduced(b, axis)
        elif kinds == {"S"}:
            b = _held_as(b, axis, one)
    return a + b


def _reduced(d: Value, *axes: str) -> Value:
    for axis in axes:
        if d.type.layout(axis).kind == "P":
            d = lang.all_reduce(d, axis=axis)
    return d


def _held_as(d: Value, axis: str, wanted: Layout) -> Value:
    """Return a gradient in a replicated or sliced layout, by the one move that makes it."""
    have = d.type.layout(axis)
    if have == wanted:
        return d
    if wanted.kind == "R":
        return _reduced(d, axis) if have.kind == "P" else lang.all_gather(d, axis=axis)
    if have.kind == "P":
        return lang.reduce_scatter(d, dim=wanted.dim, axis=axis)
    if have.kind == "R":
        return lang.slice(d, wanted.dim, axis=axis)
    return lang.all_to_all(d, wanted.dim, axis=axis)


# -- element by element ------------------------------------------------------------------------


def _times(d: Value, x: Value) -> Value:
    """Return a product of which one factor may be partial, but not both."""
    for axis in d.type.axes("P"):
        if x.type.layout(axis).kind != "R":
            d = lang.all_reduce(d, axis=axis)
    return d * x


def _pow(node: Node, d: Value, x: list[Value], y: Value) -> Parts:
    base, power = x
    by_power = d * y * lang.log(base) if power.type.ndim else None
    return [d * power * base ** (power - 1.0), by_power]


def _extreme(node: Node, d: Value, x: list[Value], y: Value) -> Parts:
    first = x[0] >= x[1] if node.op == "maximum" else x[0] <= x[1]
    return [lang.where(first, d, 0.0), lang.where(first, 0.0, d)]


def _gelu(node: Node, d: Value, x: list[Value], y: Value) -> Parts:
    (a,) = x
    share = 0.5 * (lang.erf(a / math.sqrt(2.0)) + 1.0)
    bell = lang.exp(a * a * -0.5) / math.sqrt(2.0 * math.pi)
    return [d * (share + a * bell)]


def _silu(node: Node, d: Value, x: list[Value], y: Value) -> Parts:
    s = lang.sigmoid(x[0])
    return [d * (s + x[0] * s * (1.0 - s))]


def _unary(rule: Callable[[Value, Value, Value], Value]) -> Rule:
    return lambda node, d, x, y: [rule(d, x[0], y)]


# -- over dimensions ---------------------------------------------------------------------------


def _expanded(d: Value, like: Value, node: Node) -> Value:
    dims, keep = tuple(node.attr("dims")), bool(node.attr("keep"))
    return d.tracer.add("expand", [d], {"shape": like.shape, "dims": dims, "keep": keep})


def _most(node: Node, d: Value, x: list[Value], y: Value) -> Parts:
    is_it = lang.where(lang.equal(x[0], _expanded(y, x[0], node)), 1.0, 0.0)
    count = lang.sum(is_it, node.attr("dims"), keep=bool(node.attr("keep")))
    return [is_it * _expanded(d / count, x[0], node)]


def _matmul(node: Node, d: Value, x: list[Value], y: Value) -> Parts:
    a, b = x
    da, db = d @ lang.transpose(b), None
    if b.type.ndim == 2 and a.type.ndim > 2 and _flattens(a):
        # One matrix for all batches: rows of all of them are rows of one product.
        rows, dd = a, d
        while rows.type.ndim > 2:
            rows, dd = lang.flatten(rows, 0), lang.flatten(dd, 0)
        db = lang.transpose(rows) @ dd
    else:
        db = lang.transpose(a) @ d
    return [da, db]


def _flattens(x: Value) -> bool:
    """Whether all but the last dimension of a value can be seen as one."""
    for axis, layout in x.type.layouts:
        if layout.kind != "S" or layout.dim == x.type.ndim - 1:
            continue
        if layout.dim > 0 or x.shape[0] % x.tracer.mesh.size(axis):
            return False
    return True


def _transpose(node: Node, d: Value, x: list[Value], y: Value) -> Parts:
    dims = tuple(node.attr("dims"))
    return [lang.transpose(d, *(dims.index(k) for k in range(len(dims))))]


def _flatten(node: Node, d: Value, x: list[Value], y: Value) -> Parts:
    dim, count = int(node.attr("dim")), int(node.attr("count"))
    return [lang.unflatten(d, dim, x[0].shape[dim : dim + count])]


# -- communication -----------------------------------------------------------------------------


def _all_reduce(node: Node, d: Value, x: list[Value], y: Value) -> Parts:
    if node.attr("op") not in ("sum", "mean"):
        raise ProgramError(f"{node.where}: the gradient of an all_reduce by {node.attr('op')}")
    return [_for_addend(node, _reduced(d, *node.axes))]


def _for_addend(node: Node, d: Value) -> Value:
    count = d.tracer.mesh.size(*node.axes)
    return d / float(count) if node.attr("op") == "mean" else d


def _reduce_scatter(node: Node, d: Value, x: list[Value], y: Value) -> Parts:
    for axis in node.axes:
        if d.type.layout(axis).kind == "S":
            d = lang.all_gather(d, axis=axis)
    return [_for_addend(node, _reduced(d, *node.axes))]


def _as_operand(node: Node, d: Value, x: list[Value], y: Value) -> Parts:
    """Return the gradient of a gather or an exchange: held as the operand is."""
    for axis in node.axes:
        d = _held_as(d, axis, x[0].type.layout(axis))
    return [d]


def _recv(node: Node, d: Value, x: list[Value], y: Value) -> Parts:
    by = "prev" if int(node.attr("by")) > 0 else "next"
    first = lang.recv(d * 0.0, d, from_=by, axis=node.axes[0])
    return [d - first, first]


# -- functions ---------------------------------------------------------------------------------


def _call(tracer: Tracer, node: Node, found: dict[str, Value], path: set[str]) -> Parts:
    picks = [n for n in tracer.nodes.values() if n.op == "pick" and n.inputs == (node.name,)]
    dys = {
        int(pick.attr("index")): _like(_whole_for(pick, found[pick.name]), pick)
        for pick in picks
        if pick.name in found
    }
    return written_backward(tracer, node, dys, {k for k, n in enumerate(node.inputs) if n in path})


def _like(d: Value, pick: Node) -> Value:
    """Return the gradient of a result of a call, held as the result is and of its type."""
    for axis in d.tracer.mesh.names:
        wanted = pick.type.layout(axis)
        if wanted.kind not in ("P", "L") and d.type.layout(axis).kind != "L":
            d = _held_as(d, axis, wanted)
    return d if d.type.dtype == pick.type.dtype else lang.cast(d, pick.type.dtype)


_RULES: dict[str, Rule] = {
    "add": lambda node, d, x, y: [d, d],
    "sub": lambda node, d, x, y: [d, -d],
    "mul": lambda node, d, x, y: [_times(d, x[1]), _times(d, x[0])],
    "div": lambda node, d, x, y: [d / x[1], -(d * y / x[1])],
    "neg": _unary(lambda d, x, y: -d),
    "pow": _pow,
    "abs": _unary(lambda d, x, y: d * lang.sign(x)),
    "sqrt": _unary(lambda d, x, y: d * 0.5 / y),
    "rsqrt": _unary(lambda d, x, y: d * -0.5 * y * y * y),
    "exp": _unary(lambda d, x, y: d * y),
    "log": _unary(lambda d, x, y: d / x),
    "tanh": _unary(lambda d, x, y: d * (1.0 - y * y)),
    "sigmoid": _unary(lambda d, x, y: d * y * (1.0 - y)),
    "relu": _unary(lambda d, x, y: lang.where(x > 0.0, d, 0.0)),
    "gelu": _gelu,
    "silu": _silu,
    "erf": _unary(lambda d, x, y: d * lang.exp(-(x * x)) * (2.0 / math.sqrt(math.pi))),
    "maximum": _extreme,
    "minimum": _extreme,
    "where": lambda node, d, x, y: [None, lang.where(x[0], d, 0.0), lang.where(x[0], 0.0, d)],
    "cast": _unary(lambda d, x, y: lang.cast(d, x.type.dtype)),
    "dropout": lambda node, d, x, y: [lang.dropout(d, node.attr("share"), x[1]), None],
    "sum": lambda node, d, x, y: [_expanded(d, x[0], node)],
    "max": _most,
    "min": _most,
    "expand": lambda node, d, x, y: [lang.sum(d, node.attr("dims"), keep=node.attr("keep"))],
    "softmax": lambda node, d, x, y: [y * (d - lang.sum(d * y, node.attr("dim"), keep=True))],
    "matmul": _matmul,
    "transpose": _transpose,
    "unflatten": lambda node, d, x, y: [
        lang.flatten(d, node.attr("dim"), len(node.attr("lengths")))
    ],
    "flatten": _flatten,
    "update": lambda node, d, x, y: [None, d],
    "slice": lambda node, d, x, y: [d],
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _as_operand,
    "all_to_all": _as_operand,
    "send": lambda node, d, x, y: [lang.send(d, to=-node.attr("by"), axis=node.axes[0])],
    "recv": _recv,
}
