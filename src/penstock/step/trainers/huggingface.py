"""Hugging Face's Trainer: a mixin under which `train` attaches the model, and closes it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.errors import OptionError
from penstock.step.trainers.accelerate import AttachAccelerator

__all__ = ["AttachMixin"]


class AttachMixin:
    """For `class MyTrainer(AttachMixin, transformers.Trainer)`: attaches where DDP would be."""

    attach_options: Mapping[str, Any] = {}
    """What `attach` is called with, besides model and optimizer."""

    args: Any
    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Have the Trainer's Accelerator attach what it prepares."""
        if self.args.n_gpu > 1:
            raise OptionError(
                f"one process with {self.args.n_gpu} GPUs: the Trainer would use DataParallel, and "
                f"attach needs a process for each; torchrun --nproc-per-node {self.args.n_gpu}"
            )
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        # The Trainer makes it from many arguments, by the name of the class that it has imported.
        self.accelerator.__class__ = AttachAccelerator
        self.accelerator.begin_to_attach(self.attach_options)

    def train(self, *args: Any, **others: Any) -> Any:
        """Train, and leave a plain model behind: one rank alone may save it."""
        result = super().train(*args, **others)  # type: ignore[misc]
        self.accelerator.detach()
        return result
