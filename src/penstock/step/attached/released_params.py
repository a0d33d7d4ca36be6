"""Parameters whose values are not there: a read from Python first has them brought.

A parameter that waits for its values has another class meanwhile, and every operation that wants
them calls `fetch` first:

* After a step a gather brings the new weights, and `fetch` waits for it.
* With reshard the memory is given back. It is given back in place, so every view that autograd has
  kept sees the weights again when they come; until then a kernel that reads it would end the
  process. `fetch` gathers while a model runs, and elsewhere raises an error that says what to do.

What asks for the shape or the type of a tensor, and not for its values, gets past without a fetch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

__all__ = ["Absence", "asks_no_values", "is_in_backward", "stand_in", "tensors_in"]

_NOT_ABOUT = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Attributes that are tensors with the same memory."""
_ABOUT = {
    *("__hash__", "__len__", "dim", "element_size", "get_device", "is_complex", "is_contiguous"),
    *("is_floating_point", "ndimension", "nelement", "numel", "register_hook", "requires_grad_"),
    *("register_post_accumulate_grad_hook", "size", "storage_offset", "stride", "untyped_storage"),
}
"""Methods that ask for no values."""


class _Away:
    """The class of a parameter whose values are not there."""

    _fetch: Callable[[], None]
    """Brings the values, and gives the parameter its own class back."""
    _part: torch.Tensor | None = None
    """Stands for it in a state that is saved in parts."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if asks_no_values(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **named)
        if func is torch.Tensor.detach and args[0]._part is not None:
            return args[0]._part
        for tensor in tensors_in([*args, *named.values()]):
            if isinstance(tensor, _Away):
                tensor._fetch()
        return func(*args, **named)

    def __deepcopy__(self, memo: Any) -> Any:
        self._fetch()  # torch would ask for the class, which is this one, before it reads
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._fetch()
        return self.__reduce_ex__(protocol)


class Absence:
    """Parameters that come and go together, or that one `fetch` brings."""

    def __init__(self, params: Sequence[torch.Tensor], fetch: Callable[[], None]) -> None:
        self._params = list(params)
        self._kinds = [type(param) for param in params]
        # A class for each caller: what fetches is found there, and instances stay as they are.
        by_kind = {
            kind: type("Away", (_Away, kind), {"_fetch": staticmethod(fetch)})
            for kind in dict.fromkeys(self._kinds)
        }
        self._away = [by_kind[kind] for kind in self._kinds]

    def begin(self, which: Iterable[int] | None = None) -> None:
        """Say that values are not there: of all parameters, or of some by their place."""
        for at in range(len(self._params)) if which is None else which:
            self._params[at].__class__ = self._away[at]

    def end(self, which: Iterable[int] | None = None) -> None:
        """Say that values are there again."""
        for at in range(len(self._params)) if which is None else which:
            self._params[at].__class__ = self._kinds[at]
            # Of a save that failed: it would stand for the values when they are away again.
            vars(self._params[at]).pop("_part", None)

    def absent(self) -> list[int]:
        """Return which are not there, by their place."""
        pairs = enumerate(zip(self._params, self._away, strict=True))
        return [at for at, (param, away) in pairs if type(param) is away]


def stand_in(param: torch.Tensor, part: torch.Tensor | None) -> None:
    """Set what stands for an absent parameter in a state that is saved; None ends it."""
    if isinstance(param, _Away):
        param._part = part


def asks_no_values(func: Any) -> bool:
    """Whether a function of tensors asks for their shape or type, and not for values."""
    name = func.__name__
    if name in ("__get__", "__set__"):
        return getattr(func.__self__, "__name__", "") not in _NOT_ABOUT
    return name in _ABOUT


def is_in_backward() -> bool:
    """Whether autograd is at work, and what is computed now is computed for it."""
    task: int = torch._C._current_graph_task_id()
    return task != -1


def tensors_in(values: Iterable[Any], depth: int = 3) -> Iterator[torch.Tensor]:
    """Yield the tensors among values, and in lists in them; torch nests lists once."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple) and depth:
            yield from tensors_in(value, depth - 1)
