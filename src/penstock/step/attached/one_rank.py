"""One rank: nothing is sent, so the optimizer makes its own steps with the model as it is.

There are no arenas, no copies and no hooks; states stay where torch has them. What `attach` says of
a step holds all the same: gradients are clipped and None afterwards, and `dtype` computes with
narrow weights. Wide ones are kept here then, and take the places of the narrow ones in each step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from penstock.step.attached import fit
from penstock.step.attached.attach import _OPEN, Attached, _taken
from penstock.step.attached.hooks import nothing
from penstock.step.comms.recording import record_step

__all__ = ["AttachedAlone"]

_OURS = ("step", "load_state_dict", "_step_supports_amp_scaling")
"""Attributes of an optimizer that may be replaced."""


class AttachedAlone(Attached):
    """A model and an optimizer that one rank trains."""

    _norm: torch.Tensor | None = None
    _has_stepped = False

    def _open(self) -> None:
        self._groups.__enter__()
        self._wide = WideWeights({})
        if self._dtype is not None:
            self._wide = WideWeights(narrowed(self._model, self._params, self._dtype))
            self._hooks.on_inputs(self._model, self._dtype)
            self._hooks.on_state_dicts(self._model, self._wide)
        self._put_methods()
        self._is_open = True
        _OPEN.add(self)

    def _put_methods(self) -> None:
        """Put our `step` around the optimizer's own; other methods only for wide weights."""
        optimizer: Any = self._optimizer
        self._plain_step = optimizer.step
        self._before = {name: vars(optimizer)[name] for name in _OURS if name in vars(optimizer)}

        def step(_: Any, closure: Callable[[], Any] | None = None) -> Any:
            return self._step(closure)

        # A scheduler made before would warn of a step that it has not wrapped itself.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = MethodType(step, optimizer)
        if self._clip is not None:
            # A fused optimizer would scale gradients back after they are clipped.
            optimizer._step_supports_amp_scaling = False
        if self._dtype is not None:
            optimizer.load_state_dict = self.load_state_dict

    def _remove_methods(self) -> None:
        for name in _OURS:
            vars(self._optimizer).pop(name, None)
        vars(self._optimizer).update(self._before)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of all gradients of the last step before clipping; None without `clip`."""
        return self._norm

    @property
    def sent_bytes(self) -> int:
        """Bytes sent: none."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state as torch does."""
        return type(self._optimizer).state_dict(self._optimizer)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of torch's optimizer, or of an attached one with any number of ranks."""
        with self._wide.in_place():  # states take the type of the weights
            type(self._optimizer).load_state_dict(self._optimizer, dict(state_dict))

    def close(self) -> None:
        """Take everything off again."""
        if not self._is_open:
            return
        self._is_open = False
        _OPEN.discard(self)
        self._hooks.remove()
        self._remove_methods()
        if self._dtype is not None:  # states take the type of the weights that are left
            self._optimizer.load_state_dict(self._optimizer.state_dict())
        if self._owns_groups:
            self._groups.close()

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip gradients by their norm, and return it, as torch does."""
        self._norm = nn.utils.clip_grad_norm_(
            self._params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )
        return self._norm

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float) -> None:
        """Clip each element of the gradients to this size."""
        nn.utils.clip_grad_value_(self._params, clip_value)

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the optimizer's own step."""
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._has_stepped:
            self._has_stepped = True
            fit.warn_of_strangers(self._model, _taken())
        if self._dtype is None:
            self._clip_and_step()
        else:
            with self._wide.in_place():
                self._clip_and_step()
        for param in self._params:
            param.grad = None
        self._stepped_ns = record_step(self._stepped_ns)
        return loss

    def _clip_and_step(self) -> None:
        if self._clip is not None:
            self._norm = nn.utils.clip_grad_norm_(self._params, self._clip)
        self._plain_step()


class WideWeights:
    """Weights in full precision, by the parameters that compute with rounded ones."""

    def __init__(self, exact: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self._exact = exact
        self._versions: dict[torch.Tensor, int] = {}
        """Versions of parameters before they are loaded."""

    before_save = after_save = staticmethod(nothing)

    def before_load(self, module: nn.Module, *_: Any) -> None:
        """See what weights are before a module's are loaded."""
        self._versions |= {param: param._version for param in module.parameters(recurse=False)}

    @torch.no_grad()
    def after_load(self, module: nn.Module, *_: Any) -> None:
        """Go on from weights that were loaded into the model, which are rounded."""
        for param in module.parameters(recurse=False):
            if param in self._exact and param._version != self._versions.get(param):
                self._exact[param].copy_(param)

    @contextlib.contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """Give parameters and gradients their wide type in this block."""
        narrow = {param: param.data for param in self._exact}
        for param, exact in self._exact.items():
            _adopt(exact, param.data)
            _become(param, exact)
        try:
            yield
        finally:
            for param, rounded in narrow.items():
                _become(param, rounded)
                param.copy_(self._exact[param])


def narrowed(
    model: nn.Module, params: list[torch.Tensor], dtype: torch.dtype
) -> dict[torch.Tensor, torch.Tensor]:
    """Round all float32 parameters of a model; return those that are trained as they were."""
    exact = {}
    for param in dict.fromkeys([*model.parameters(), *params]):
        if param.dtype == torch.float32:
            exact[param] = param.data
            param.data = param.data.to(dtype)
    return {param: exact[param] for param in params if param in exact}


def _become(param: torch.Tensor, data: torch.Tensor) -> None:
    grad, param.grad = param.grad, None
    param.data = data
    if grad is not None:
        param.grad = grad.to(data.dtype)


def _adopt(exact: torch.Tensor, rounded: torch.Tensor) -> None:
    """Take over what someone has changed where weights are used."""
    as_sent = exact.to(rounded.dtype)
    if rounded.device.type == "cpu" and torch.equal(rounded, as_sent):
        return  # a GPU is not asked
    exact.copy_(torch.where(rounded != as_sent, rounded.to(exact.dtype), exact))
