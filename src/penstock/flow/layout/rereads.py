"""How often a uniform shuffle reads blocks that can only be read whole.

To read a sample of a block is to read the whole block. A stage keeps the latest blocks; in a
uniform shuffle the next sample of a block finds it there with probability stage over blocks. With m
samples of a block used in an epoch, a block is read 1 + (m - 1) · (1 - stage / blocks) times: once
where the stage holds all blocks, and once for every sample where it holds few.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.dataset.dataset import Dataset
from penstock.dataset.mixture import Mixture
from penstock.errors import OptionError
from penstock.flow.layout.cuts import cut_table
from penstock.flow.layout.units import chosen_by_part
from penstock.units import show_bytes

FACTOR_MAX = 2.0
"""The most that a default order may read in an epoch, as a multiple of the bytes of the data
set."""


def times_read(samples_a_block: float, blocks_bytes: float, stage_bytes: float) -> float:
    """Return how often an epoch of a uniform shuffle reads a block.

    >>> times_read(1000, 8e9, stage_bytes=8e9), times_read(1000, 8e9, stage_bytes=0.8e9)
    (1.0, 900.1)
    """
    found = min(1.0, stage_bytes / max(1.0, blocks_bytes))
    return 1 + max(0.0, samples_a_block - 1) * (1 - found)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSet:
    """The samples of a data set that lie in blocks."""

    num_samples: int
    num_blocks: int
    size_bytes: int

    @property
    def samples_a_block(self) -> float:
        """Samples that can only be read together."""
        return self.num_samples / max(1, self.num_blocks)

    def factor(
        self, *, tier_bytes: float, stage_bytes: float, num_ranks: int = 1, unpacked: float = 1.0
    ) -> float:
        """Return what an epoch of a uniform shuffle reads, as a multiple of the blocks' bytes.

        Blocks in tiers are read once. Of the others each of several ranks uses its share of the
        samples, and keeps them unpacked, which takes `unpacked` times as much memory.
        """
        if not self.num_blocks:
            return 1.0
        rest_bytes = max(0.0, self.size_bytes - tier_bytes)
        times = times_read(self.samples_a_block / num_ranks, rest_bytes * unpacked, stage_bytes)
        return 1 + (times - 1) * rest_bytes / max(1, self.size_bytes)


def block_set_of(dataset: Dataset | Mixture) -> BlockSet:
    """Return what of a data set, or of a view of one, lies in blocks."""
    num_samples = num_blocks = size_bytes = 0
    for tables, chosen in chosen_by_part(dataset):
        if len(chosen) and tables[0].addressing == "blocks":
            cut = cut_table(tables[0], chosen)
            num_samples += len(chosen)
            num_blocks += cut.num_units
            size_bytes += int(cut.lengths.sum())
    return BlockSet(num_samples=num_samples, num_blocks=num_blocks, size_bytes=size_bytes)


def refuse_rereads(
    dataset: Dataset | Mixture, blocks: BlockSet, factor: float, stage_bytes: int
) -> None:
    """Raise `OptionError` where an order that nobody asked for would read blocks over and over."""
    if factor <= FACTOR_MAX:
        return
    in_blocks = "" if isinstance(dataset, Mixture) else "shuffle='blocks' reads each block once. "
    raise OptionError(
        f"{dataset!r} can only be read in blocks of about {blocks.samples_a_block:,.0f} samples, "
        f"{show_bytes(blocks.size_bytes)} in all, and look_ahead holds {show_bytes(stage_bytes)}: "
        f"the default order, a uniform shuffle, would read and unpack about {factor:,.0f} times "
        f"the data set in each epoch. {in_blocks}For a uniform shuffle give tiers= or look_ahead= "
        "that hold the data set, or write it anew with `penstock pack`. shuffle='global' "
        "accepts the cost"
    )
