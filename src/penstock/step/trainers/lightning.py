"""Lightning: a strategy that attaches a module's optimizers where `ddp` would wrap the module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.errors import MissingPackageError
from penstock.step.attached.attach import Attached, attach

try:
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise MissingPackageError("AttachStrategy", "lightning", "lightning") from error

__all__ = ["AttachStrategy"]


class AttachStrategy(DDPStrategy):
    """For `Trainer(strategy=AttachStrategy())`: a fit attaches the module, and closes it again.

    `options` are those of `attach`, all others those of Lightning's `DDPStrategy`.
    """

    def __init__(self, *, options: Mapping[str, Any] | None = None, **more: Any) -> None:
        super().__init__(**more)
        self.attach_options = dict(options or {})
        self.attached: list[Attached] = []
        """In the order of the optimizers."""
        self._has_failed = False

    def configure_ddp(self) -> None:
        """Leave the module as it is."""

    def setup(self, trainer: Any) -> None:
        """Attach every optimizer of a fit, and have gradients clipped where they are summed up."""
        self._close()  # what an error has left: now ranks are together again
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        module: Any = self.lightning_module
        self.attached = [attach(module, each, **self.attach_options) for each in self.optimizers]
        plugin: Any = self.precision_plugin
        plugin.clip_gradients = self._clip_gradients

    def _clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm"
    ) -> None:
        if clip_val <= 0:
            return
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        attached = self.attached[self.optimizers.index(plain)]
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None:
            scaler.unscale_(plain)
        if gradient_clip_algorithm == "value":
            attached.clip_grad_value_(clip_val)
        else:
            attached.clip_grad_norm_(clip_val)

    def training_step(self, *args: Any, **more: Any) -> Any:
        """Call the module for it, as its hooks wait for the parameters that it has itself."""
        with self.precision_plugin.train_step_context():
            return self._called("training_step", *args, **more)

    def validation_step(self, *args: Any, **more: Any) -> Any:
        """Call the module for it, as in training."""
        with self.precision_plugin.val_step_context():
            return self._called("validation_step", *args, **more)

    def _called(self, step: str, *args: Any, **more: Any) -> Any:
        module: Any = self.lightning_module
        return self._forward_redirection(module, module, step, *args, **more)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Add gradients up in this block; a later step sends them."""
        with contextlib.ExitStack() as stack:
            for each in self.attached:
                stack.enter_context(each.accumulate())
            yield

    def on_exception(self, exception: BaseException) -> None:
        """Remember that ranks may be at different places: they cannot close together."""
        self._has_failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Leave a plain module and plain optimizers behind."""
        if not self._has_failed:
            self._close()
        super().teardown()

    def _close(self) -> None:
        for each in self.attached:
            each.close()
        self.attached, self._has_failed = [], False
