"""Which samples go into which shard: decided from sizes alone, before anything is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from penstock.dataset.part import Ints
from penstock.dataset.writer_layouts import TAR_BLOCK
from penstock.errors import OptionError
from penstock.order import GlobalOrder, Order, SequentialOrder
from penstock.units import bytes_of

_NPY_HEADER_BYTES = 128
_AT_ONCE = 1 << 22
"""Samples whose sizes are looked at together, so that any number is planned in little memory."""


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
    sizes_of: Callable[[Ints], Ints],
    num_samples: int,
    *,
    num_fields: int,
    shard_size: int | str,
    seed: int | None = None,
    limit: int | None = None,
) -> PackPlan:
    """Return a plan for samples whose sizes can be asked for, some at a time.

    >>> sizes = np.array([5000, 100, 100, 9000])
    >>> plan = make_plan(sizes.__getitem__, 4, num_fields=1, shard_size="7KB")
    >>> [plan.numbers(shard).tolist() for shard in range(plan.num_shards)]
    [[0, 1], [2], [3]]
    """
    order: Order = SequentialOrder(num_samples=num_samples)
    if seed is not None:
        order = GlobalOrder(num_samples=num_samples, seed=seed)
    count = num_samples if limit is None else min(limit, num_samples)
    size_bytes_max = bytes_of(shard_size)
    starts = np.zeros(1, np.int64)
    begin, at_once = 0, _AT_ONCE
    while begin < count:
        end = min(begin + at_once, count)
        # A header for each member, and on average half a block to fill its last one.
        taken = sizes_of(order.ids(0, begin, end)) + num_fields * (TAR_BLOCK + TAR_BLOCK // 2)
        found = begin + cut(taken, size_bytes_max)
        if end < count:
            # The last run may go on in the samples that follow, which therefore begin with it.
            found = found[:-1]
            if len(found) == 1:
                at_once *= 2
                continue
        starts = np.append(starts, found[1:])
        begin, at_once = int(found[-1]), _AT_ONCE
    return PackPlan(order=order, starts=starts)


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
