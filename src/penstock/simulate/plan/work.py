"""The training job of a plan: order, world, batch, epochs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock.errors import OptionError
from penstock.world import World

STAGE_BYTES = 512_000_000
"""Memory of a rank for samples that are in flight or wait for their step."""

Shuffle = Literal["global", "blocks", "blocks-first", "sequential"]
Mode = Literal["global", "blocks", "sequential"]
Peers = Literal["fixed", "locality"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A training job."""

    world: World = field(default_factory=World)
    batch_size: int = 256
    """Samples of a rank and step."""
    num_epochs: int = 1
    shuffle: Shuffle = "global"
    compute_samples_s: float | None = None
    """Samples that one rank trains on a second if it never waits; None where it is not known."""
    peers: Peers | None = None
    """How samples are assigned to nodes that read from each other; None: each node is alone."""
    stage_bytes: int = STAGE_BYTES
    """Memory of a rank for samples that are in flight or wait for their step."""

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
        """Number of machines."""
        return self.world.num_nodes

    @property
    def node_batch_size(self) -> float:
        """Samples of a node and step."""
        return self.batch_size * self.world.num_ranks / self.num_nodes

    def mode(self, epoch: int) -> Mode:
        """Return how an epoch is shuffled."""
        if self.shuffle == "blocks-first":
            return "blocks" if epoch == 0 else "global"
        return self.shuffle
