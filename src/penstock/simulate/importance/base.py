"""What every compared system is: a stream of samples to train on, and a cache that it is read by.

A training loop drives one like this:

    drawn = source.draw()                       # again whenever the stretch is used up
    for each global batch of drawn:
        hits = source.access(ids)               # which samples need not be read from the store
        losses = forward(ids)                   # one for each sample
        step on mean(weights * losses)
        source.observe(ids, losses)
    source.validated(accuracy)                  # after each epoch
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.order import Ids

Floats: TypeAlias = npt.NDArray[np.floating[Any]]
Bools: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnStretch:
    """A stretch of the stream: a window or an epoch."""

    ids: Ids
    """Samples in the order of use."""
    weights: Floats
    """Factor of each loss; 1 where nothing is corrected. Batch loss = mean(weights * losses)."""


class TrainingSource(Protocol):
    """A way to choose samples and to keep some of them near; one of those that are compared."""

    name: str

    def draw(self) -> DrawnStretch:
        """Return the next stretch of the stream; called when the last one is used up."""
        ...

    def access(self, ids: Ids) -> Bools:
        """Read one global batch, in order, and return which samples were in the cache."""
        ...

    def observe(self, ids: Ids, losses: Floats) -> None:
        """Take in the per-sample losses of one global batch, after its step."""
        ...

    def validated(self, accuracy: float) -> None:
        """Take in the validation accuracy of an epoch. Only SHADE looks at it."""
        ...
