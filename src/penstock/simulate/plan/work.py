"""What is to be trained: order, world, batch, epochs. One of the three values behind a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock.errors import OptionError
from penstock.world import World

STAGE_BYTES = 512_000_000
"""Memory for samples on their way, a rank."""

Shuffle = Literal["global", "blocks", "blocks-first", "sequential"]
Mode = Literal["global", "blocks", "sequential"]
Peers = Literal["fixed", "locality"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is to be trained."""

    world: World = field(default_factory=World)
    batch_size: int = 256
    """Samples a step on each rank."""
    num_epochs: int = 1
    shuffle: Shuffle = "global"
    compute_samples_s: float | None = None
    """What one rank trains on a second if nothing ever waits; None where nobody knows."""
    peers: Peers | None = None
    """Whether nodes read from each other, and who computes what; None: each is on its own."""
    stage_bytes: int = STAGE_BYTES
    """Memory for samples on their way, a rank."""

    def __post_init__(self) -> None:
        if min(self.batch_size, self.num_epochs, self.stage_bytes) < 1:
            raise OptionError(
                f"a batch of {self.batch_size}, {self.num_epochs} epochs and a stage of "
                f"{self.stage_bytes} bytes: each must be at least 1"
            )
        if self.compute_samples_s is not None and self.compute_samples_s <= 0:
            raise OptionError(
                f"a rank trains on more than 0 samples a second, got {self.compute_samples_s}"
            )

    @property
    def num_nodes(self) -> int:
        """Machines."""
        return self.world.num_nodes

    @property
    def node_batch_size(self) -> float:
        """Samples a step on each node."""
        return self.batch_size * self.world.num_ranks / self.num_nodes

    def mode(self, epoch: int) -> Mode:
        """Return how an epoch is shuffled."""
        if self.shuffle == "blocks-first":
            return "blocks" if epoch == 0 else "global"
        return self.shuffle
