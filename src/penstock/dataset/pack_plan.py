"""Which samples go into which shard: decided from sizes alone, before anything is read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from penstock.dataset.part import Ints
from penstock.dataset.writer_layouts import TAR_BLOCK
from penstock.errors import OptionError
from penstock.order import GlobalOrder, Order, SequentialOrder
from penstock.units import bytes_of

_NPY_HEADER_BYTES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """An order of samples, cut into shards."""

    order: Order
    """Which sample is packed when: epoch 0 of it."""
    starts: Ints
    """Position of the first sample of each shard, and the number of samples at the end."""

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self.starts) - 1

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return int(self.starts[-1])

    def numbers(self, shard: int) -> Ints:
        """Return the samples of a shard, in their order."""
        return self.order.ids(0, int(self.starts[shard]), int(self.starts[shard + 1]))

    def first(self, count: int) -> Ints:
        """Return the samples that are packed first."""
        return self.order.ids(0, 0, count)

    def with_rows(self, row_bytes: int, shard_size: int | str) -> PackPlan:
        """Return the same order cut into shards of rows, which are all of one length."""
        room = max(bytes_of(shard_size) - _NPY_HEADER_BYTES, 0)
        step = max(1, room // max(1, row_bytes))
        starts = np.arange(0, self.num_samples, step, dtype=np.int64)
        return replace(self, starts=np.append(starts, self.num_samples))


def make_plan(
    sizes: Ints, num_fields: int, shard_size: int | str, seed: int | None, limit: int | None
) -> PackPlan:
    """Return a plan for samples of these sizes.

    >>> plan = make_plan(np.array([5000, 100, 100, 9000]), 1, "7KB", None, None)
    >>> [plan.numbers(shard).tolist() for shard in range(plan.num_shards)]
    [[0, 1], [2], [3]]
    """
    order: Order = SequentialOrder(num_samples=len(sizes))
    if seed is not None:
        order = GlobalOrder(num_samples=len(sizes), seed=seed)
    count = len(sizes) if limit is None else min(limit, len(sizes))
    # A header for each member, and on average half a block to fill its last one.
    taken = sizes[order.ids(0, 0, count)] + num_fields * (TAR_BLOCK + TAR_BLOCK // 2)
    return PackPlan(order=order, starts=cut(taken, bytes_of(shard_size)))


def cut(sizes: Ints, size_bytes_max: int, count_max: int | None = None) -> Ints:
    """Return where runs of samples begin that are each within a size, and where the last one ends.

    A sample that is larger than the bound is a run of its own. With `count_max` no run has more
    samples than that.

    >>> cut(np.array([3, 3, 3, 9, 1]), 6).tolist()
    [0, 2, 3, 4, 5]
    """
    if size_bytes_max < 1:
        raise OptionError(f"a run of samples has at least 1 byte, got {size_bytes_max}")
    ends = np.cumsum(sizes, dtype=np.int64)
    starts = [0]
    while starts[-1] < len(ends):
        start = starts[-1]
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + size_bytes_max, side="right"))
        stop = max(stop, start + 1)
        starts.append(stop if count_max is None else min(stop, start + count_max))
    return np.array(starts, np.int64)
