"""Accelerate: an `Accelerator` whose `prepare` attaches a model instead of wrapping it in DDP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from penstock.errors import MissingPackageError, OptionError, StateError
from penstock.step.attached.attach import Attached, attach

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType
except ImportError as error:
    raise MissingPackageError("AttachAccelerator", "accelerate", "hf") from error

__all__ = ["AttachAccelerator"]

_PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class AttachAccelerator(Accelerator):  # type: ignore[misc]  # Accelerate has no types
    """An `Accelerator` that attaches optimizers with their models; `options` are those of `attach`.

    `free_memory` and `end_training` close what is attached, so all ranks call them.
    """

    def __init__(self, *args: Any, options: Mapping[str, Any] | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self.begin_to_attach(options or {})

    def begin_to_attach(self, options: Mapping[str, Any]) -> None:
        """Attach with these options what is prepared from now on."""
        if self.distributed_type not in _PLAIN:
            raise OptionError(
                f"{self.distributed_type} wraps models itself, and attach stands for plain DDP; "
                "leave it out, and attach with reshard=True to keep weights in slices"
            )
        self.attach_options = dict(options)
        self.attached: dict[Attached, set[torch.Tensor]] = {}
        """What `attach` has returned, with the parameters that it trains."""
        self._trained: list[nn.Module] = []
        self._idle: set[nn.Module] = set()
        """Models prepared for training, and those of them that have no optimizer yet."""

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models first: optimizers are attached with theirs."""
        places: Any = device_placement or [None] * len(args)
        ready = [
            self.prepare_model(each, place) if isinstance(each, nn.Module) else each
            for each, place in zip(args, places, strict=True)
        ]
        return super().prepare(*ready, device_placement=device_placement)

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Do all that Accelerate does, except for DDP."""
        model = super().prepare_model(model, device_placement, evaluation_mode=True)
        is_trained = not evaluation_mode and any(p.requires_grad for p in model.parameters())
        if is_trained and model not in self._trained:
            self._trained.append(model)
            self._idle.add(model)
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Attach an optimizer with the model that it trains, before Accelerate wraps it."""
        plain = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
        params = {param for group in plain.param_groups for param in group["params"]}
        models = [model for model in self._trained if not params.isdisjoint(model.parameters())]
        if len(models) != 1:
            raise OptionError(
                f"parameters of the {type(plain).__name__} are in {len(models)} prepared models; "
                "prepare its model first or in the same call, and several models as one nn.Module"
            )
        attached = attach(models[0], plain, **self.attach_options)
        self.attached[attached] = {param for param in params if param.requires_grad}
        self._idle.discard(models[0])
        return super().prepare_optimizer(optimizer, device_placement)

    def backward(self, loss: torch.Tensor, **more: Any) -> None:
        """Refuse to make gradients that nobody would reduce."""
        if self._idle:
            raise StateError(
                f"{len(self._idle)} of {len(self._trained)} models are prepared without their "
                "optimizer, and ranks would train them apart; prepare it as well, or a model that "
                "is not trained by prepare_model(model, evaluation_mode=True)"
            )
        super().backward(loss, **more)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Add gradients up in this block; a later step sends them."""
        with contextlib.ExitStack() as stack:
            for each in self.attached:
                stack.enter_context(each.accumulate())
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip by the norm of the gradients of all ranks, and return it."""
        return self._unscaled(parameters).clip_grad_norm_(max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element of the gradients of all ranks."""
        self._unscaled(parameters).clip_grad_value_(clip_value)

    def _unscaled(self, parameters: Any) -> Attached:
        self.unscale_gradients()
        given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        wanted = {param for param in given if param.requires_grad}
        for attached, params in self.attached.items():
            if params == wanted:
                return attached
        each = ", ".join(f"{len(p & wanted)} of {len(p)}" for p in self.attached.values()) or "none"
        raise OptionError(
            f"clip {len(wanted)} parameters, of which attached optimizers have {each}; clip all "
            "parameters of an optimizer together, and those of another one in a call of its own"
        )

    def detach(self) -> None:
        """Leave plain models and optimizers behind; all ranks call it."""
        for each in self.attached:
            each.close()
        self.begin_to_attach(self.attach_options)

    def free_memory(self, *objects: Any) -> Any:
        """Forget all that was prepared."""
        self.detach()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """Detach before the process group goes."""
        self.detach()
        super().end_training()
