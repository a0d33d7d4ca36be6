"""Gradients between backward and step, which are not yet what users expect to read.

A gradient is this rank's own then (`OwnGrad`), and a user who reads it expects the mean over
ranks. Where a gradient was sent and its memory was given back, a tensor of no size that knows the
shape takes its place (`ReleasedGrad`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from penstock.errors import StateError
from penstock.step.attached.released_params import asks_no_values, is_in_backward, tensors_in

__all__ = [
    "OwnGrad",
    "ReleasedGrad",
    "guard_grad",
    "own_grad",
    "plain_grad",
    "released_grad",
    "unread_grad",
]

_ZEROING = (torch.Tensor.zero_, torch._foreach_zero_)
"""What writes to a gradient without reading it."""


class OwnGrad(torch.Tensor):
    """A gradient of this rank alone; before it is read, all ranks put the mean in its place."""

    _read: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        # Hooks in backward come before any exchange, with DDP as well.
        if not (asks_no_values(func) or func in _ZEROING or is_in_backward()):
            for tensor in tensors_in([*args, *named.values()]):
                if isinstance(tensor, OwnGrad):
                    tensor._read()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **named)

    # Copies and pickles are plain tensors, without what reads.
    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.clone()
        return plain.__reduce_ex__(protocol)


def guard_grad(param: torch.Tensor, read: Callable[[], None]) -> None:
    """Call `read` before the gradient of a parameter is read."""
    grad = param.grad
    if type(grad) is torch.Tensor and grad.layout == torch.strided:
        param.grad = own_grad(grad, read)


def plain_grad(param: torch.Tensor) -> None:
    """Let the gradient of a parameter be read as it is."""
    if isinstance(param.grad, OwnGrad):
        with torch._C.DisableTorchFunctionSubclass():
            param.grad = param.grad.as_subclass(torch.Tensor)


def own_grad(grad: torch.Tensor, read: Callable[[], None]) -> OwnGrad:
    """Return the same gradient, with `read` called before it is read."""
    own = grad.as_subclass(OwnGrad)
    own._read = read
    return own


class ReleasedGrad(torch.Tensor):
    """A gradient that was sent. It may be thrown away, or set to zero, and that is all."""

    is_zero = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.zero_:
            args[0].is_zero = True
            return args[0]
        if not asks_no_values(func):
            raise unread_grad()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def unread_grad() -> StateError:
    """Return what is raised where a gradient is read that no rank has."""
    return StateError(
        "with reshard=True gradients are reduced and scattered in backward, and no rank has the "
        "mean of a whole one; to clip, or to know the norm, call attached.clip_grad_norm_() or "
        "attach with clip=; to see or change own gradients, run backward in attached.accumulate()"
    )


def released_grad(param: torch.Tensor) -> ReleasedGrad:
    """Return what stands for the gradient of a parameter."""
    zero = torch.zeros((), dtype=param.dtype, device=param.device)
    return zero.expand(param.shape).as_subclass(ReleasedGrad)
