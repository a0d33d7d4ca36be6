"""Steps: how an epoch's positions fall into global batches, and these into shares of ranks.

A global batch is a run of positions, a share is a run of the global batch. So what a step trains on
depends on neither the world size nor where the run was interrupted: after a resume at position p,
step k covers positions p + k * G to p + (k + 1) * G, whoever computes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.errors import OptionError
from penstock.order.keys import Ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The steps of one epoch, or of what is left of it.

    >>> steps = Steps(num_samples=10, global_batch_size=4, num_ranks=2)
    >>> steps.num_steps, steps.share(rank=1)
    (3, (2, 4))
    >>> steps.positions(step=2, rank=1)
    (array([0, 1]), array([False, False]))
    """

    num_samples: int
    """Positions in the epoch."""
    global_batch_size: int
    """Samples that the whole world uses in one step."""
    num_ranks: int = 1
    """Ranks that share each global batch."""
    drop_last: bool = False
    """Leave out the last, incomplete global batch instead of padding it."""
    start: int = 0
    """The first position: where a resumed epoch goes on."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_ranks <= self.global_batch_size:
            raise OptionError(
                f"a global batch of {self.global_batch_size} samples cannot be shared by "
                f"{self.num_ranks} ranks; each rank needs at least 1 sample"
            )
        if not 0 <= self.start <= self.num_samples or self.num_samples < 1:
            raise OptionError(
                f"position {self.start} does not lie in an epoch of {self.num_samples} samples"
            )
        if self.drop_last and self.num_samples < self.global_batch_size:
            raise OptionError(
                f"an epoch of {self.num_samples} samples has no complete global batch of "
                f"{self.global_batch_size}; make it smaller, or set drop_last=False"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch from its beginning; the same on every rank."""
        return self._steps_for(self.num_samples)

    @property
    def num_steps(self) -> int:
        """Steps from `start` to the end of the epoch; the same on every rank."""
        return self._steps_for(self.num_samples - self.start)

    def share(self, rank: int) -> tuple[int, int]:
        """Return the part of each global batch that a rank gets, as bounds inside the batch.

        Equal parts when the number of ranks divides the batch, else they differ by at most one.
        """
        if not 0 <= rank < self.num_ranks:
            raise OptionError(f"there are {self.num_ranks} ranks, none has number {rank}")
        size = self.global_batch_size
        return rank * size // self.num_ranks, (rank + 1) * size // self.num_ranks

    def bounds(self, step: int) -> tuple[int, int]:
        """Return the positions that a step covers, without padding: what it really uses."""
        if not 0 <= step < self.num_steps:
            raise OptionError(f"there are {self.num_steps} steps, none has number {step}")
        first = self.start + step * self.global_batch_size
        return first, min(first + self.global_batch_size, self.num_samples)

    def positions(self, step: int, rank: int) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """Return a rank's positions at a step, and which of them are not padding.

        Padding repeats the epoch from its beginning, so that all ranks have full shares to compute
        and collectives match; the mask keeps it out of losses and counts.
        """
        first, _ = self.bounds(step)
        low, high = self.share(rank)
        positions = np.arange(first + low, first + high, dtype=np.int64)
        mask = positions < self.num_samples
        return positions % self.num_samples, mask

    def position_after(self, num_steps: int) -> int:
        """Return the position to save once so many steps are done; at most the epoch's end."""
        if not 0 <= num_steps <= self.num_steps:
            raise OptionError(f"there are {self.num_steps} steps, {num_steps} cannot be done")
        return min(self.start + num_steps * self.global_batch_size, self.num_samples)

    def _steps_for(self, num_samples: int) -> int:
        if self.drop_last:
            return num_samples // self.global_batch_size
        return -(-num_samples // self.global_batch_size)
