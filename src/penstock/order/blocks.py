"""Blocks first, samples second: an order that an object store can serve in large reads.

In each epoch the blocks are permuted, every `window_blocks` of them in a row make a window, and the
samples of a window are permuted among themselves. A loader that holds two windows therefore reads
every block once and whole. The price is that samples mix only within a window: `quality` says how
well. Blocks may have any sizes, also 0, so where a window starts is a prefix sum over the permuted
sizes; that is the only table, made once per epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.arguments import count_of
from penstock.errors import OptionError
from penstock.order.keys import Ids, check_epoch, key_of, seed_of
from penstock.order.orders import Description, check_range, checked_ids, num_samples_of
from penstock.order.permutation import Permutation

_LAYOUTS_KEPT = 4
"""Tables kept: this epoch and the next, for a training and a validation order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlocksOrder:
    """Blocks permuted, then samples permuted within windows of blocks.

    >>> order = BlocksOrder(block_starts=[0, 3, 6, 8, 12], seed=7, window_blocks=2)
    >>> order.ids(0, 0, 12)
    array([ 0,  2,  4,  1,  5,  3,  9,  6,  8, 11, 10,  7])
    """

    mode: ClassVar[str] = "blocks"
    block_starts: Ids
    """The first sample id of each block, then the number of samples."""
    seed: int
    """Picks the permutations of all epochs."""
    window_blocks: int
    """Blocks whose samples are mixed."""
    blocks_hash: str = field(init=False)
    """Stands for `block_starts` in comparisons."""

    def __post_init__(self) -> None:
        starts = np.array(self.block_starts, dtype=np.int64)
        if starts.ndim != 1 or len(starts) < 2 or starts[0] != 0 or (np.diff(starts) < 0).any():
            raise OptionError(
                "block_starts must be the first sample id of each block, rising from 0, and then "
                f"the number of samples; got {starts[:4].tolist()} … of shape {starts.shape}"
            )
        num_samples_of(int(starts[-1]))
        object.__setattr__(self, "seed", seed_of(self.seed))
        object.__setattr__(self, "window_blocks", count_of("window_blocks", self.window_blocks))
        starts.setflags(write=False)
        object.__setattr__(self, "block_starts", starts)
        digest = xxhash.xxh3_64_hexdigest(starts.astype("<i8", copy=False).tobytes())
        object.__setattr__(self, "blocks_hash", digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlocksOrder) and self.describe() == other.describe()

    def __hash__(self) -> int:
        return hash((self.blocks_hash, self.seed, self.window_blocks))

    def __reduce__(self) -> tuple[Callable[..., BlocksOrder], tuple[()]]:
        return partial(
            BlocksOrder,
            block_starts=self.block_starts,
            seed=self.seed,
            window_blocks=self.window_blocks,
        ), ()

    @property
    def num_samples(self) -> int:
        """Samples in all blocks."""
        return int(self.block_starts[-1])

    @property
    def num_blocks(self) -> int:
        """Blocks in the data set."""
        return len(self.block_starts) - 1

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Return the sample ids at positions start to stop of an epoch."""
        check_range(self, epoch, start, stop)
        layout = _layout(self, epoch)
        ids = np.empty(stop - start, dtype=np.int64)
        at = start
        while at < stop:
            window = layout.window_of(at)
            first, end = layout.window_bounds(window)
            upto = min(end, stop)
            places = np.arange(at - first, upto - first, dtype=np.uint64)
            mixed = self._permutation(epoch, window, end - first).forward(places).view(np.int64)
            ids[at - start : upto - start] = layout.ids_in(window, mixed + first)
            at = upto
        return ids

    def positions(self, epoch: int, ids: npt.ArrayLike) -> Ids:
        """Return the position of each id in an epoch."""
        check_epoch(epoch)
        layout = _layout(self, epoch)
        windows, unmixed = layout.unmixed_of(checked_ids(ids, self.num_samples))
        by_window = np.argsort(windows, kind="stable")
        edges = np.flatnonzero(np.diff(windows[by_window], prepend=-1, append=-1))
        positions = np.empty(len(unmixed), dtype=np.int64)
        for run in map(slice, edges[:-1], edges[1:]):
            here = by_window[run]
            window = int(windows[here[0]])
            first, end = layout.window_bounds(window)
            permutation = self._permutation(epoch, window, end - first)
            positions[here] = permutation.inverse(unmixed[here] - first).view(np.int64) + first
        return positions

    def describe(self) -> Description:
        """Return mode and parameters, with a hash for the table of blocks."""
        return {
            "mode": self.mode,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "window_blocks": self.window_blocks,
            "blocks_hash": self.blocks_hash,
        }

    def _permutation(self, epoch: int, window: int, size: int) -> Permutation:
        return Permutation(size=size, key=key_of(self.seed, "window", epoch, window))


@dataclass(frozen=True, slots=True, kw_only=True)
class _EpochLayout:
    """Where the blocks of one epoch lie. A place is a block's number after the permutation."""

    window_blocks: int
    block_starts: Ids
    block_at: Ids
    """Place to block."""
    place_of: Ids
    """Block to place."""
    place_starts: Ids
    """Samples before each place."""
    window_starts: Ids
    """Samples before each window."""

    def window_of(self, position: int) -> int:
        # From the right, because an empty window starts where the next one does.
        return int(np.searchsorted(self.window_starts, position, side="right")) - 1

    def window_bounds(self, window: int) -> tuple[int, int]:
        return int(self.window_starts[window]), int(self.window_starts[window + 1])

    def ids_in(self, window: int, unmixed: Ids) -> Ids:
        """Return the sample ids at places of a window before its samples were mixed."""
        first = window * self.window_blocks
        blocks = self.block_at[first : first + self.window_blocks]
        starts = self.place_starts[first : first + len(blocks)]
        shift = self.block_starts[blocks] - starts
        return unmixed + shift[np.searchsorted(starts, unmixed, side="right") - 1]

    def unmixed_of(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return the window of each id, and its place before the window's samples were mixed."""
        blocks = np.searchsorted(self.block_starts, ids, side="right") - 1
        places = self.place_of[blocks]
        shift = self.place_starts[places] - self.block_starts[blocks]
        return places // self.window_blocks, ids + shift


@lru_cache(maxsize=_LAYOUTS_KEPT)
def _layout(order: BlocksOrder, epoch: int) -> _EpochLayout:
    # A pure function of its arguments: threads that race here compute the same table twice.
    permutation = Permutation(size=order.num_blocks, key=key_of(order.seed, order.mode, epoch))
    block_at = permutation.forward(np.arange(order.num_blocks)).view(np.int64)
    place_of = np.empty_like(block_at)
    place_of[block_at] = np.arange(order.num_blocks)
    place_starts = np.zeros(order.num_blocks + 1, dtype=np.int64)
    np.cumsum(np.diff(order.block_starts)[block_at], out=place_starts[1:])
    window_starts = np.append(place_starts[: -1 : order.window_blocks], order.num_samples)
    for table in (block_at, place_of, place_starts, window_starts):
        table.setflags(write=False)
    return _EpochLayout(
        window_blocks=order.window_blocks,
        block_starts=order.block_starts,
        block_at=block_at,
        place_of=place_of,
        place_starts=place_starts,
        window_starts=window_starts,
    )
