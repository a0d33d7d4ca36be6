"""Habits from torch and NumPy, and what to write instead.

A value of a program has no numbers while the program is written down: it cannot be read, iterated,
or given to functions of other libraries. Such mistakes are refused with the user's line and the way
to write it in the language. `NotATensor` catches them on a value, `operation` in calls of the
language's own functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

from penstock.errors import ProgramError
from penstock.step.program.lines import located

__all__ = ["NotATensor", "form_of", "instead_of", "kind_of", "operation", "refuse"]

P = ParamSpec("P")
T = TypeVar("T")

_DIMS = "ps.unflatten(x, dim, lengths), which makes several of one dimension, or ps.flatten(x, dim)"
_CHANGED = "x = ... for a new value and x = ps.update(x, new) for a state: values do not change"
_WRITE = {
    **dict.fromkeys(("reshape", "view", "ravel", "unsqueeze", "squeeze", "expand"), _DIMS),
    **dict.fromkeys(("T", "mT", "t", "permute", "swapaxes"), "ps.transpose(x)"),
    **dict.fromkeys(("max", "amax"), "ps.amax(x, dims), or ps.maximum(x, y) of two"),
    **dict.fromkeys(("min", "amin"), "ps.amin(x, dims), or ps.minimum(x, y) of two"),
    **dict.fromkeys(("clamp", "clip"), "ps.maximum(ps.minimum(x, high), low)"),
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), "x @ y"),
    **dict.fromkeys(("subtract", "sub", "rsub"), "x - y"),
    **dict.fromkeys(("multiply", "mul"), "x * y"),
    **dict.fromkeys(("divide", "true_divide", "div", "rdiv"), "x / y"),
    **dict.fromkeys(("power", "pow", "rpow", "square"), "x**2"),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), "x == y, x < y and so on"),
    **dict.fromkeys(("abs", "absolute"), "abs(x)"),
    **dict.fromkeys(("neg", "negative"), "-x"),
    **dict.fromkeys(("zeros", "ones", "full", "tensor"), "a number, which is broadcast"),
    **dict.fromkeys(("zeros_like", "ones_like", "full_like"), "a number, which is broadcast"),
    **dict.fromkeys(("dim", "ndim"), "x.type.ndim"),
    **dict.fromkeys(("copy", "clone"), "x itself: values do not change"),
    **dict.fromkeys(("backward", "grad", "requires_grad"), "(g,) = ps.grad(loss, (w,))"),
    "add": "x + y",
    "copy_": "x = ps.update(x, new)",
    "device": "compile(..., device=...): a value has none before",
    "dtype": "x.type.dtype",
    "linear": "x @ w + b, with w and b as parameters",
    "numel": "x.type.num_elements",
    "size": "x.shape[dim]",
}
"""By the name in torch or NumPy."""
_CASTS = ("to", "type", "astype", "float", "half", "bfloat16", "double", "int", "long")
_OPERATIONS: dict[str, Callable[..., Any]] = {}
"""Functions of the language by name. `operation` enters them: `language` imports this module."""
_LOOKS = ("item", "tolist", "numpy", "cpu", "cuda", "detach", "data")


def instead_of(name: str) -> str:
    """Return what to write instead of a method or function of torch or NumPy."""
    if name in _LOOKS:
        return "a value has no numbers yet: return it, and look at what the step gives"
    if name in _CASTS:
        return 'write ps.cast(x, "bf16")'
    if name in _WRITE:
        return f"write {_WRITE[name]}"
    if name in _OPERATIONS:
        return f"write ps.{name}{form_of(_OPERATIONS[name])}"
    if name.endswith("_"):
        return f"write {_CHANGED}"
    return (
        f'the language has none: write a function of your own, (y,) = ps.call("{name}", x, '
        "outs=[...]), or ps.capture of one of torch"
    )


def form_of(function: Callable[..., Any]) -> str:
    """Return how a function is called, without types."""
    form = inspect.signature(function)
    plain = [p.replace(annotation=p.empty) for p in form.parameters.values()]
    return str(form.replace(parameters=plain, return_annotation=form.empty))


def kind_of(given: Any) -> str:
    """Return the kind of an object that is no value, for messages."""
    if given is None:
        return "None"
    name = {"ndarray": "NumPy array"}.get(type(given).__name__, type(given).__name__)
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def operation(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function of the language whose errors have the user's line and the right call."""
    form, called = inspect.signature(function), function.__name__
    wanted = [name for name, p in form.parameters.items() if p.annotation == "Value"]

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            given = form.bind(*args, **kwargs).arguments
        except TypeError as error:
            refuse(f"{called}: {error}; it is ps.{called}{form_of(function)}")
        for name in wanted:
            if name in given and not isinstance(given[name], NotATensor):
                refuse(
                    f"{called} needs a value of a program as {name}, got {kind_of(given[name])}; "
                    f"it is ps.{called}{form_of(function)}, inside of a @program"
                )
        try:
            return function(*args, **kwargs)
        except ProgramError as error:
            raise located(error) from None

    _OPERATIONS[called] = checked
    return checked


class NotATensor:
    """Methods that tensors have and values do not: each raises an error with the way out."""

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        # Libraries look for names with an underscore to find out the kind of an object.
        if name.startswith("_") or name in ("node", "tracer"):
            raise AttributeError(f"a value of a program has no {name!r}")
        refuse(f"a value of a program has no {name!r}; {instead_of(name)}")

    # -- looking at numbers ------------------------------------------------------------------

    def __bool__(self) -> bool:  # noqa: PLE0304 - it never returns
        refuse(
            "a value is not known while a program is written down, so nothing can depend on it; "
            "write ps.where(condition, a, b) for `if`, ps.logical_and, logical_or and logical_not "
            "for `and`, `or`, `not` and `a < x < b`, ps.maximum and ps.minimum for max and min"
        )

    def __float__(self) -> float:
        refuse(
            "a value is not known while a program is written down: it is no number for float, int, "
            "round, range or functions of math; write ps.sqrt(x), ps.exp(x) and so on, and "
            'ps.cast(x, "i64") for another element type'
        )

    __int__ = __index__ = __complex__ = __trunc__ = __floor__ = __ceil__ = __float__

    def __round__(self, ndigits: int | None = None) -> NoReturn:
        float(self)
        raise AssertionError

    def __format__(self, spec: str) -> str:
        if spec:
            refuse(
                f"a value is not known while a program is written down, so it cannot be shown as "
                f"{spec!r}; {{x}} alone shows its type"
            )
        return repr(self)

    # -- elements ----------------------------------------------------------------------------

    def __len__(self) -> int:  # noqa: PLE0303
        refuse("a value of a program has no len; write x.shape[0]")

    def __iter__(self) -> NoReturn:
        refuse(
            "a value of a program cannot be gone through or unpacked; sums, means and maxima over "
            "dimensions are ps.sum(x, dims), ps.mean(x, dims), ps.amax(x, dims)"
        )

    def __contains__(self, other: Any) -> bool:
        refuse("what is in a value is not known while a program is written down; compare x == y")

    def __getitem__(self, key: Any) -> NoReturn:
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(one, NotATensor) for one in keys):
            way = "write ps.where(condition, x, 0.0) to choose elements"
        elif any(one is None for one in keys):
            way = "write ps.unflatten(x, 0, (x.shape[0], 1)) for x[:, None]"
        else:
            way = (
                "write ps.slice(x, dim) for the part of each rank, parameters apart for what is "
                'used apart, or a function of your own, (y,) = ps.call("part", x, outs=[...])'
            )
        refuse(f"a value of a program has no indexing; {way}")

    def __setitem__(self, key: Any, new: Any) -> None:
        refuse(
            "values do not change, so nothing is written into them; write "
            "x = ps.where(condition, new, x), and x = ps.update(x, new) for a state"
        )

    # -- operators ---------------------------------------------------------------------------

    def __and__(self, other: Any) -> NoReturn:
        refuse(
            "there is no &, |, ^ or ~ of values; join conditions with ps.logical_and(a, b), "
            "ps.logical_or(a, b) and ps.logical_not(a)"
        )

    __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __and__

    def __invert__(self) -> NoReturn:
        self.__and__(self)

    def __mod__(self, other: Any) -> NoReturn:
        refuse(
            "there is no %, // or divmod of values; write x / y, or a function of your own, "
            '(r,) = ps.call("remainder", x, outs=[...])'
        )

    __rmod__ = __floordiv__ = __rfloordiv__ = __divmod__ = __rdivmod__ = __mod__

    # -- other libraries ---------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        _refuse_function("torch", function)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> NoReturn:
        _refuse_function("np", function)

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse("a value of a program makes no NumPy array: it has no numbers yet")


def _refuse_function(library: str, function: Any) -> NoReturn:
    name = getattr(function, "__name__", str(function)).strip("_")
    refuse(
        f"{library}.{name} takes no value of a program; {instead_of(name)}. Tensors and arrays are "
        "given as parameters, numbers as int or float"
    )


def refuse(why: str) -> NoReturn:
    """Raise an error with the user's line."""
    raise located(ProgramError(why)) from None
