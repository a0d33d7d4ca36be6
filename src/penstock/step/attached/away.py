"""Tensors whose memory is given back: what stands for them, and who may have them fetched.

Memory of a tensor is given back in place: every view that autograd has kept sees it again when it
comes. Until then a kernel that reads it would end the process. So a parameter that is away has
another class meanwhile, and whatever wants its values from Python has to get past it: while a model
runs the weights are fetched, elsewhere it is an error that says what to do. A gradient that was
sent is stood for by a tensor of no size that only knows its shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from penstock.errors import StateError
from penstock.step.attached.record import tensors_in

__all__ = ["Gone", "come_back", "go_away", "gone", "stand_in"]

_DEPTH_MAX = 3
_NOT_ABOUT = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Attributes that are tensors with the same memory."""
_ABOUT = {
    *("__hash__", "__len__", "dim", "element_size", "get_device", "is_complex", "is_contiguous"),
    *("is_floating_point", "ndimension", "nelement", "numel", "register_hook", "requires_grad_"),
    *("register_post_accumulate_grad_hook", "size", "storage_offset", "stride", "untyped_storage"),
}
"""What asks for no values."""


class _Away:
    """What a parameter is while its memory is given back."""

    _fetch: Callable[[], None]
    _part: torch.Tensor | None = None
    """What a state has of it that is saved in parts."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if _is_about(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **named)
        if func is torch.Tensor.detach and args[0]._part is not None:
            return args[0]._part
        for tensor in tensors_in([*args, *named.values()], _DEPTH_MAX):
            if isinstance(tensor, _Away):
                tensor._fetch()
        return func(*args, **named)


@cache
def _away(kind: type) -> type:
    return type("Away", (_Away, kind), {})


def go_away(param: torch.Tensor, fetch: Callable[[], None]) -> None:
    """Say that a parameter's values are not there; `fetch` has it come back, or raises."""
    if not isinstance(param, _Away):
        param.__class__ = _away(type(param))
        vars(param)["_fetch"] = fetch


def come_back(param: torch.Tensor) -> None:
    """Say that a parameter's values are there again."""
    if isinstance(param, _Away):
        vars(param).pop("_fetch")
        vars(param).pop("_part", None)
        param.__class__ = type(param).__mro__[2]


def stand_in(param: torch.Tensor, part: torch.Tensor | None) -> None:
    """Say what a state that is saved has of a parameter that is away, until it is told None."""
    if isinstance(param, _Away):
        param._part = part


class Gone(torch.Tensor):
    """A gradient that was sent. It may be thrown away, or set to zero, and that is all."""

    is_zero = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.zero_:
            args[0].is_zero = True
            return args[0]
        if not _is_about(func):
            raise StateError(
                "this gradient was reduced and scattered in backward, and its memory given back; "
                "to clip gradients, attach with clip=, to see or change them, run backward in "
                "attached.accumulate()"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def gone(param: torch.Tensor) -> Gone:
    """Return what stands for the gradient of a parameter."""
    zero = torch.zeros((), dtype=param.dtype, device=param.device)
    return zero.expand(param.shape).as_subclass(Gone)


def _is_about(func: Any) -> bool:
    name = func.__name__
    if name in ("__get__", "__set__"):
        return getattr(func.__self__, "__name__", "") not in _NOT_ABOUT
    return name in _ABOUT
