"""torch.amp.GradScaler on an attached optimizer.

A scaler looks for infinities in gradients and scales them back, on each rank by itself. Here the
gradients of a rank are parts of sums that are on their way. So its look goes to the sums instead,
of all ranks: they find the same, make the same steps, leave out the same, and go on with the same
scale. The scaler's own function is replaced for attached optimizers, as long as there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from penstock.errors import OptionError

__all__ = ["Scaling", "Unscale", "refuse_narrow", "taken_scale"]

Unscale = Callable[[torch.Tensor], torch.Tensor]
"""Multiplies sums with a number and returns whether any is infinite, or is no number."""
_scaler: Any = GradScaler
_plain: Any = GradScaler._unscale_grads_
_NAME = "_penstock_unscale"


class Scaling:
    """Leads scalers to an attached optimizer, until it is removed."""

    _num_open = 0

    def __init__(self, optimizer: Optimizer, unscale: Unscale) -> None:
        self._optimizer = optimizer
        vars(optimizer)[_NAME] = unscale
        named: Any = optimizer
        # A scaler then calls `step` in any case, and says to it what it has found.
        self._could_scale = getattr(optimizer, "_step_supports_amp_scaling", False)
        named._step_supports_amp_scaling = True
        Scaling._num_open += 1
        _scaler._unscale_grads_ = _unscale_grads

    def remove(self) -> None:
        """Leave the optimizer to scalers as it was."""
        vars(self._optimizer).pop(_NAME, None)
        named: Any = self._optimizer
        named._step_supports_amp_scaling = self._could_scale
        Scaling._num_open -= 1
        if not Scaling._num_open:
            _scaler._unscale_grads_ = _plain


def _unscale_grads(
    scaler: Any,
    optimizer: Optimizer,
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    allow_fp16: bool,
) -> Any:
    """Do what the scaler's own function does, which returns what it has found on each device."""
    unscale: Unscale | None = vars(optimizer).get(_NAME)
    if unscale is None:
        return _plain(scaler, optimizer, inv_scale, found_inf, allow_fp16)
    found = unscale(inv_scale)
    return {found.device: found}


def refuse_narrow(params: Iterable[torch.Tensor]) -> None:
    """Refuse a scaler where sums of gradients are as narrow as what it protects."""
    if any(param.dtype == torch.float16 for param in params):
        raise OptionError(
            "a GradScaler with weights of float16: their gradients are summed in float16, and what "
            "the scaler saves would be lost when it is scaled back; keep weights in float32 and "
            "compute under autocast, or use dtype=torch.bfloat16 without a scaler"
        )


def taken_scale(optimizer: Optimizer) -> tuple[torch.Tensor | None, bool]:
    """Return by what gradients are to be divided yet, and whether a scaler has found infinities."""
    scale: torch.Tensor | None = getattr(optimizer, "grad_scale", None)
    found = getattr(optimizer, "found_inf", None)
    return scale, found is not None and bool(found)
