"""The language: Python functions over values that several ranks hold.

    @program
    def adam(g: P["n"], w: R["n"], m: R["n"], v: R["n"], t, lr, b1=0.9, b2=0.999, eps=1e-8):
        g = all_reduce(g, "mean")
        m = update(m, b1 * m + (1 - b1) * g)
        v = update(v, b2 * v + (1 - b2) * g * g)
        return update(w, w - lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps))

    adam.on(mesh(dp=2), n=1 << 20)

Parameters with a layout are tensors; the others are numbers, which each run gets anew. Names in
brackets are dimensions, which get their lengths when the program is put on a mesh.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, overload

from penstock.errors import ProgramError
from penstock.step.program.layouts import Annotation, Layout, dtype_name
from penstock.step.program.lines import line_in
from penstock.step.program.mesh import Mesh
from penstock.step.program.mistakes import kind_of, operation
from penstock.step.program.nodes import Attr, Node, Program
from penstock.step.program.trace import Tracer, Value
from penstock.step.program.types import Type

Axis = str | tuple[str, ...] | None


@dataclass(frozen=True, eq=False)
class Template:
    """A function that becomes a program once its mesh and its sizes are known."""

    function: Callable[..., Any]
    axis: str | None = None
    layouts: tuple[tuple[str, Layout | Annotation], ...] = ()
    """By parameter: layouts that are not in the function's annotations."""

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Write its operations into another program."""
        _writing(
            f"{self.name} is called",
            f"put it on a mesh, {self.name}.on(mesh(dp=2), ...), compile that, and call the step",
        )
        return self.function(*args, **kwargs)

    def __getattr__(self, name: str) -> NoReturn:
        # A template has no program yet that could be rewritten.
        way = (
            f"; put it on a mesh first, .on(mesh(dp=2), ...).{name}"
            if hasattr(Program, name)
            else ""
        )
        raise AttributeError(f"what @program makes has no {name!r}{way}")

    def on(self, mesh: Mesh, **sizes: int) -> Program:
        """Return the program for a mesh, with the lengths of its dimensions."""
        sizes = _checked_sizes(self.name, mesh, sizes)
        axis = self.axis or (mesh.names[0] if len(mesh.axes) == 1 else None)
        tracer = Tracer(mesh, axis)
        values, named, defaults = [], {}, []
        for param in inspect.signature(self.function, eval_str=True).parameters.values():
            made = _parameter(tracer, param, dict(self.layouts), sizes)
            if param.kind is param.KEYWORD_ONLY:
                named[param.name] = made
            else:
                values.append(made)
            if param.default is not param.empty and made.node.op == "scalar":
                defaults.append((param.name, _default(param)))
        returned = self._returned(tracer, sizes, values, named)
        if unknown := [dim for dim in sizes if dim not in tracer.dims]:
            raise ProgramError(
                f"{self.name} has no dimension {unknown[0]!r}; it has "
                f"{', '.join(sorted(tracer.dims)) or 'none by name'}"
            )
        return Program(
            name=self.name,
            mesh=mesh,
            nodes=tuple(tracer.nodes.values()),
            outputs=_outputs(returned, self.name, tracer),
            defaults=tuple(defaults),
        )

    def _returned(
        self, tracer: Tracer, sizes: dict[str, int], values: list[Value], named: dict[str, Value]
    ) -> Any:
        """Call the function and return what it returns."""
        token = _WRITTEN.set((tracer, sizes))
        try:
            return self.function(*values, **named)
        except (TypeError, AttributeError) as error:
            # Code that expected a tensor got a value, and complains in words of its own.
            path = self.function.__code__.co_filename
            line = line_in(error.__traceback__, lambda frame: frame.f_code.co_filename == path)
            if "Value" not in str(error) or isinstance(error, ProgramError) or not line:
                raise
            raise ProgramError(
                f"{line}: {error}; a value of a program is no tensor: write it with operations of "
                'the language, or as a function of your own, (y,) = ps.call("f", x, outs=[...])'
            ) from error
        finally:
            _WRITTEN.reset(token)


# A context variable: threads may write programs at the same time, and one may call another.
_WRITTEN: ContextVar[tuple[Tracer, dict[str, int]]] = ContextVar("written")


def _writing(
    what: str, instead: str = "it belongs into a @program"
) -> tuple[Tracer, dict[str, int]]:
    try:
        return _WRITTEN.get()
    except LookupError:
        raise ProgramError(f"{what} outside of a program; {instead}") from None


def _checked_sizes(name: str, mesh: Mesh, sizes: dict[str, Any]) -> dict[str, int]:
    """Return lengths of dimensions as whole numbers; refuse others."""
    if not isinstance(mesh, Mesh):
        raise ProgramError(
            f"{name} is put on a mesh, not on {mesh!r}; write {name}.on(mesh(dp=2), ...)"
        )
    out = {}
    for dim, length in sizes.items():
        try:
            out[dim] = operator.index(length)
        except TypeError:
            out[dim] = -1
        if out[dim] < 0:
            raise ProgramError(f"{name}.on({dim}={length!r}): a length is a whole number from 0 on")
    return out


def _parameter(
    tracer: Tracer,
    param: inspect.Parameter,
    layouts: dict[str, Layout | Annotation],
    sizes: dict[str, int],
) -> Value:
    said = layouts.get(param.name, param.annotation)
    if isinstance(said, Layout):
        said = Annotation((said,), ())
    _check_parameter(param, said)
    if not isinstance(said, Annotation):
        dtype = "i64" if said is int else "f64"
        return tracer.add("scalar", [], {"type": Type(shape=(), dtype=dtype)}, param.name)
    made = _type_of(tracer, f"parameter {param.name}", said, sizes)
    return tracer.add("input", [], {"type": made}, param.name)


def _check_parameter(param: inspect.Parameter, said: Any) -> None:
    if param.kind in (param.VAR_POSITIONAL, param.VAR_KEYWORD):
        raise ProgramError(
            f"parameter {param} of a program: their number must be known; name them one by one"
        )
    if said not in (param.empty, int, float, Any) and not isinstance(said, Annotation):
        raise ProgramError(
            f"parameter {param.name} is annotated as {getattr(said, '__name__', said)}; write "
            f'{param.name}: ps.R["n"] (or ps.P, ps.S(0), ps.L) for a tensor, and {param.name}: int '
            "or nothing for a number"
        )


def _default(param: inspect.Parameter) -> float:
    if not isinstance(param.default, int | float):
        raise ProgramError(
            f"parameter {param.name} is a number, and its default is {param.default!r}; give one, "
            f'or annotate it as a tensor, {param.name}: ps.R["n"]'
        )
    return float(param.default)


def _type_of(tracer: Tracer, what: str, said: Annotation, sizes: dict[str, int]) -> Type:
    shape = []
    for dim in said.dims:
        if isinstance(dim, str) and dim not in sizes:
            raise ProgramError(
                f"{what} has a dimension {dim!r} without a length; write .on(mesh, {dim}=...)"
            )
        if isinstance(dim, str):
            tracer.dims.add(dim)
        shape.append(sizes[dim] if isinstance(dim, str) else dim)
    layouts = []
    for layout in said.layouts:
        axis = layout.axis
        if axis is None:
            if layout.kind == "R":
                continue
            axis = str(tracer.axis_of(None))
        tracer.mesh.size(axis)
        if layout.kind == "S" and layout.dim >= len(shape):
            raise ProgramError(
                f"{what} is sliced along dimension {layout.dim}, and has {len(shape)}"
            )
        layouts.append((axis, layout))
    return Type(shape=tuple(shape), dtype=said.dtype, layouts=tuple(layouts))


def _outputs(returned: Any, name: str, tracer: Tracer) -> tuple[str, ...]:
    if returned is None:
        ends = ("update", "store", "call")
        if not any(node.op in ends for node in tracer.nodes.values()):
            raise ProgramError(
                f"{name} returns nothing and leaves nothing behind: write `return` with one value "
                "or several, or keep a value in a parameter, x = ps.update(x, new)"
            )
        return ()
    found = returned if isinstance(returned, tuple | list) else (returned,)
    for value in found:
        if not isinstance(value, Value):
            raise ProgramError(
                f"{name} returns {kind_of(value)}; it may return values only, one or a tuple of "
                "several"
            )
    return tuple(value.name for value in found)


@overload
def program(function: Callable[..., Any], /) -> Template: ...
@overload
def program(
    *, axis: str | None = None, **layouts: Layout | Annotation
) -> Callable[[Callable[..., Any]], Template]: ...
def program(
    function: Callable[..., Any] | None = None,
    /,
    *,
    axis: str | None = None,
    **layouts: Layout | Annotation,
) -> Any:
    """Make a program of a function; `axis` is the default axis of its moves.

    Layouts of parameters may stand here instead of in the function's annotations, which type
    checkers read in their own way: `@program(x=R["rows", "d"], w=S(1)["d", "h"])`.
    """
    if function is None:
        return partial(Template, axis=axis, layouts=tuple(layouts.items()))
    return Template(function=function, axis=axis, layouts=tuple(layouts.items()))


# -- element by element ------------------------------------------------------------------------


def _apply(what: str, /, *operands: Any, **attrs: Attr) -> Value:
    values = [value for value in operands if isinstance(value, Value)]
    if not values:
        raise ProgramError(
            f"{what} needs a value of a program, got {operands[0]!r}; for numbers alone use math"
        )
    tracer = values[0].tracer
    return tracer.add(what, [tracer.value(operand) for operand in operands], attrs)


def _unary(op: str, name: str = "") -> Callable[[Value], Value]:
    def function(x: Value) -> Value:
        return _apply(op, x)

    function.__name__ = name or op
    function.__doc__ = f"Return {op} of each element."
    return operation(function)


sqrt, rsqrt, exp, log = _unary("sqrt"), _unary("rsqrt"), _unary("exp"), _unary("log")
tanh, sigmoid, relu = _unary("tanh"), _unary("sigmoid"), _unary("relu")
gelu, silu, erf, sign = _unary("gelu"), _unary("silu"), _unary("erf"), _unary("sign")
logical_not = _unary("not", "logical_not")


def _binary(op: str, name: str = "") -> Callable[[Any, Any], Value]:
    def function(a: Any, b: Any) -> Value:
        return _apply(op, a, b)

    function.__name__ = name or op
    function.__doc__ = f"Return {function.__name__} of two values, element by element."
    return operation(function)


maximum, minimum = _binary("maximum"), _binary("minimum")
equal, not_equal = _binary("eq", "equal"), _binary("ne", "not_equal")
logical_and, logical_or = _binary("and", "logical_and"), _binary("or", "logical_or")


@operation
def where(condition: Any, a: Any, b: Any) -> Value:
    """Return a where the condition holds and b elsewhere."""
    return _apply("where", condition, a, b)


@operation
def cast(x: Value, dtype: Any) -> Value:
    """Return the same values in another element type."""
    return _apply("cast", x, dtype=dtype_name(dtype))


@operation
def dropout(x: Value, share: float, seed: Any) -> Value:
    """Return x with a share of its elements dropped, the others made larger to match.

    The choice depends on the seed and on the place in the whole value, not on the rank.
    """
    if not 0.0 <= share < 1.0:
        raise ProgramError(f"dropout of a share of {share}; it lies in [0, 1)")
    return _apply("dropout", x, seed, share=float(share))


# -- over dimensions ---------------------------------------------------------------------------


def _over(x: Value, dims: int | Sequence[int] | None) -> tuple[int, ...]:
    ndim = x.type.ndim
    chosen = range(ndim) if dims is None else (dims,) if isinstance(dims, int) else dims
    return tuple(sorted({_place(x, dim) for dim in chosen}))


def _place(x: Value, dim: int) -> int:
    """Return a dimension counted from the front."""
    if not -x.type.ndim <= dim < x.type.ndim:
        raise ProgramError(
            f"dimension {dim} of {x.name}, which has {x.type.ndim}, counted from 0 or by -1 from "
            "the end"
        )
    return dim % x.type.ndim


@operation
def sum(x: Value, dims: int | Sequence[int] | None = None, *, keep: bool = False) -> Value:
    """Return the sum over some dimensions, or all; over sliced ones it is partial."""
    return _apply("sum", x, dims=_over(x, dims), keep=keep)


@operation
def mean(x: Value, dims: int | Sequence[int] | None = None, *, keep: bool = False) -> Value:
    """Return the mean over some dimensions, or all; over sliced ones it is partial."""
    count = math.prod(x.shape[dim] for dim in _over(x, dims))
    return sum(x, dims, keep=keep) / float(count)


@operation
def amax(x: Value, dims: int | Sequence[int] | None = None, *, keep: bool = False) -> Value:
    """Return the largest over some dimensions, or all."""
    return _apply("max", x, dims=_over(x, dims), keep=keep)


@operation
def amin(x: Value, dims: int | Sequence[int] | None = None, *, keep: bool = False) -> Value:
    """Return the smallest over some dimensions, or all."""
    return _apply("min", x, dims=_over(x, dims), keep=keep)


@operation
def norm(x: Value, dims: int | Sequence[int] | None = None, *, keep: bool = False) -> Value:
    """Return the root of the sum of squares; over sliced dimensions it is all-reduced."""
    total = sum(x * x, dims, keep=keep)
    for axis in total.type.axes("P"):
        total = all_reduce(total, axis=axis)
    return total.sqrt()


@operation
def softmax(x: Value, dim: int = -1) -> Value:
    """Return exponentials divided by their sum along a dimension."""
    return _apply("softmax", x, dim=_place(x, dim))


@operation
def layer_norm(x: Value, weight: Value, bias: Value, eps: float = 1e-5) -> Value:
    """Return x with mean 0 and variance 1 along its last dimension, scaled and moved."""
    centred = x - mean(x, -1, keep=True)
    scale = (mean(centred * centred, -1, keep=True) + eps).sqrt()
    return centred / scale * weight + bias


@operation
def transpose(x: Value, *dims: int) -> Value:
    """Return x with its dimensions in another order; by default the last two are swapped."""
    ndim = x.type.ndim
    order = tuple(dims) or (*range(ndim - 2), ndim - 1, ndim - 2)
    return _apply("transpose", x, dims=order)


@operation
def unflatten(x: Value, dim: int, lengths: Sequence[int]) -> Value:
    """Return x with one dimension split into several."""
    return _apply("unflatten", x, dim=_place(x, dim), lengths=tuple(lengths))


@operation
def flatten(x: Value, dim: int, count: int = 2) -> Value:
    """Return x with several dimensions merged into one."""
    return _apply("flatten", x, dim=_place(x, dim), count=count)


# -- communication -----------------------------------------------------------------------------


@operation
def all_reduce(x: Value, op: str = "sum", *, axis: Axis = None) -> Value:
    """Return the sum (mean, maximum, minimum) over ranks, on all of them."""
    return _apply("all_reduce", x, op=op, axis=x.tracer.axis_of(axis))


@operation
def reduce_scatter(x: Value, op: str = "sum", *, dim: int = 0, axis: Axis = None) -> Value:
    """Return the sum over ranks, of which each gets its part along a dimension."""
    return _apply("reduce_scatter", x, op=op, dim=dim, axis=x.tracer.axis_of(axis))


@operation
def all_gather(x: Value, *, axis: Axis = None) -> Value:
    """Return the parts of all ranks joined, on all of them."""
    return _apply("all_gather", x, axis=x.tracer.axis_of(axis))


@operation
def all_to_all(x: Value, dim: int, *, axis: Axis = None) -> Value:
    """Return x sliced along another dimension."""
    return _apply("all_to_all", x, dim=dim, axis=x.tracer.axis_of(axis))


@operation
def reduce(x: Value, op: str = "sum", *, root: int = 0, axis: Axis = None) -> Value:
    """Return the sum over ranks, on one of them; the others have zeros."""
    return _apply("reduce", x, op=op, root=root, axis=x.tracer.axis_of(axis))


@operation
def broadcast(x: Value, *, root: int = 0, axis: Axis = None) -> Value:
    """Return the value of one rank, on all of them."""
    return _apply("broadcast", x, root=root, axis=x.tracer.axis_of(axis))


@operation
def send(x: Value, *, to: str | int = "next", axis: Axis = None) -> Value:
    """Send x along an axis and return the value that arrives: the next rank has this one's x.

    Ranks to which nobody sends have zeros.
    """
    by = {"next": 1, "prev": -1}.get(to, to) if isinstance(to, str) else to
    if not isinstance(by, int) or by == 0:
        raise ProgramError(f"send to {to!r}; it goes to 'next', to 'prev' or so many ranks on")
    return _apply("send", x, by=by, axis=x.tracer.axis_of(axis))


@operation
def recv(sent: Value, first: Value, *, from_: str = "prev", axis: Axis = None) -> Value:
    """Return the value that was sent; ranks to which nobody sends have `first`."""
    if from_ not in ("prev", "next"):
        raise ProgramError(f"recv from {from_!r}; it comes from 'prev' or 'next'")
    by = 1 if from_ == "prev" else -1
    return _apply("recv", sent, first, by=by, axis=sent.tracer.axis_of(axis))


@operation
def slice(x: Value, dim: int = 0, *, axis: Axis = None) -> Value:
    """Return each rank's part of a replicated value; it costs nothing."""
    return _apply("slice", x, dim=dim, axis=x.tracer.axis_of(axis))


# -- state, data, and the user's functions -----------------------------------------------------


@operation
def update(state: Value, value: Value) -> Value:
    """Set a parameter to a value for the next step, and return the new value."""
    node: Node = state.node
    if node.op == "update":
        node = state.tracer.nodes[str(node.attr("target"))]
    if node.op != "input":
        raise ProgramError(
            f"update of {node.name}, which is computed; only parameters are kept: write "
            "w = ps.update(w, new) with a parameter w"
        )
    return _apply("update", state, value, target=node.name)


@operation
def load(
    source: str,
    like: Annotation,
    *,
    stages: Sequence[str] | None = None,
    stored: float | None = None,
) -> Value:
    """Return the next batch of a source: `load("images", S(0)["batch", 3, 224, 224])`.

    The source has a name here and is given when the program is compiled. Each rank reads its part
    by the layout: a slice, or all of it. `stages` (of fetch, decode, copy) and `stored`, the bytes
    in the store for each byte of the value, are for predictions: `compile` finds the stages.
    """
    tracer, sizes = _writing(f"load of {source!r}")
    if not isinstance(like, Annotation):
        raise ProgramError(
            f"load of {source!r} as {like!r}; write ps.load({source!r}, ps.S(0)['batch', 3]): "
            "a layout and dimensions"
        )
    made = _type_of(tracer, f"load of {source!r}", like, sizes)
    if stored is not None and stored <= 0:
        raise ProgramError(f"load of {source!r} with {stored} bytes stored for one; above 0")
    more = {"stages": None if stages is None else tuple(stages), "stored": stored}
    known = {name: value for name, value in more.items() if value is not None}
    return tracer.add("load", [], {"source": source, "type": made, **known})


@operation
def store(x: Value, place: str) -> Value:
    """Write a value to a place, each rank its own part, and return it.

    The function that is given for the place gets a copy, which it may keep.
    """
    return _apply("store", x, place=place)


@operation
def call(
    name: str,
    *operands: Value | float,
    outs: Sequence[Type],
    cost_s: float | None = None,
    batch: tuple[Sequence[int | None], Sequence[int | str]] | None = None,
    **attrs: Attr,
) -> tuple[Value, ...]:
    """Return the results of a function of the user.

    The function has a name here and is given when the program is compiled. `outs` are the types of
    its results; `cost_s` is its time until it is measured. It must not change its operands.

    `batch` says that samples are independent: it has the dimension of samples of each operand and
    of each result; None for an operand that every sample needs, "sum" for a result that is a sum
    over samples. `outs` are the types of whole results then, whose layouts follow from those of the
    operands. `capture` finds all of this in a module of torch.
    """
    if not outs:
        raise ProgramError(f"call of {name!r} with no results; say what comes out")
    tracer, _ = _writing(f"call of {name!r}")
    more = attrs | ({} if cost_s is None else {"cost_s": cost_s})
    if batch is None:
        along: list[dict[str, Attr]] = [{} for _ in outs]
    else:
        more["batch"] = (tuple(batch[0]), tuple(batch[1]))
        along = [{"along": dim} for dim in batch[1]]
    given = [tracer.value(one) for one in operands]
    made = tracer.add("call", given, {"function": name, "outs": tuple(outs), **more})
    picks = [
        tracer.add("pick", [made], {"index": k, "type": out, **dim}, f"{made.name}.{k}")
        for k, (out, dim) in enumerate(zip(outs, along, strict=True))
    ]
    return tuple(picks)


__all__ = [
    name
    for name, thing in list(globals().items())
    if not name.startswith("_")
    and getattr(thing, "__module__", __name__) == __name__
    and callable(thing)
]
