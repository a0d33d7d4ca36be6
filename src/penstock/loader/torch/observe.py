"""Losses of a step for importance sampling: reported to the loader, and weighted.

Training loops, Accelerate and Lightning need only `weighted_loss`. Hugging Face's Trainer makes a
new dictionary of each batch, without the batch's attributes; `WeightedLossMixin` keeps the batch
itself.
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.errors import OptionError, StateError
from penstock.loader.batch import Batch
from penstock.loader.loader import Loader


def weighted_loss(loader: Loader, batch: Batch, losses: torch.Tensor) -> torch.Tensor:
    """Report one loss a sample to the loader, and return the loss to differentiate.

    With any other `shuffle` nothing is reported and the weights are `batch.mask`, so the same
    training loop works with all of them. Divides by the size of the batch, as `mean` does.
    """
    if not isinstance(loader, Loader):
        raise OptionError(
            f"weighted_loss needs the penstock.Loader that made the batch, got a "
            f"{type(loader).__name__}"
        )
    weights = batch.mask
    if loader.importance is not None:
        loader.observe(batch, losses)
        weights = batch.weights
    loss: torch.Tensor = (losses * weights.to(losses.device)).mean()
    return loss


class WeightedLossMixin:
    """For `class MyTrainer(WeightedLossMixin, transformers.Trainer)`: define `sample_losses`.

    `get_train_dataloader` has to return a `penstock.Loader`. The loss of evaluations is the plain
    mean of `sample_losses`.
    """

    _batch: Any = None
    """The batch that is trained on now, as the loader made it."""

    def sample_losses(self, outputs: Any, inputs: Any) -> torch.Tensor:
        """Return one loss a sample from the outputs and inputs of the model."""
        raise OptionError(
            f"{type(self).__name__} has no sample_losses(self, outputs, inputs); define one that "
            "returns one loss a sample"
        )

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Do a step as the Trainer does, with a loss that is a mean over samples."""
        if not isinstance(inputs, Batch):
            raise StateError(
                f"the trainer has read a {type(inputs).__name__}; WeightedLossMixin is for one "
                "whose get_train_dataloader returns a penstock.Loader"
            )
        self._batch = inputs
        try:
            # Without `num_items_in_batch`, the Trainer divides the mean by its accumulation steps.
            step: Any = super().training_step(model, inputs)  # type: ignore[misc]
        finally:
            self._batch = None
        return step  # type: ignore[no-any-return]

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the weighted loss of the batch that is trained on, or the mean elsewhere."""
        outputs = model(**inputs)
        losses = self.sample_losses(outputs, inputs)
        if self._batch is None:
            loss = losses.mean()
        else:
            loader = self.callback_handler.train_dataloader  # type: ignore[attr-defined]
            loss = weighted_loss(loader, self._batch, losses)
        return (loss, outputs) if return_outputs else loss
