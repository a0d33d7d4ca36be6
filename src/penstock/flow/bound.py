"""The fewest bytes that must come from the store, whatever anybody does.

S bytes in the data set, C bytes of cache in the whole job, E epochs that visit every sample once.
When an epoch ends at most C bytes are resident, and a byte fetched during an epoch cannot serve
twice in it. So each epoch after the first reads at least S - C, for any order, policy and number of
nodes:

    store bytes ≥ S + (E - 1) · max(0, S - C)

A cache that fills up and never evicts meets it. Belady's rule (evict what is used furthest ahead)
cannot beat it on plain epochs, and LRU is far from it. Where samples repeat unevenly the bound is
that of windows, or exactly Belady's bytes for the string of accesses at hand.

Here a byte need not stay in the cache while it is used: it may pass through.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.errors import OptionError


def epochs_bound(size_bytes: int, cache_bytes: int, num_epochs: int, warm_bytes: int = 0) -> int:
    """Return the fewest bytes that some whole epochs read from the store.

    `warm_bytes` of the data set are already in the cache when they begin.

    >>> epochs_bound(100, 30, 3), epochs_bound(100, 30, 3, warm_bytes=30), epochs_bound(100, 200, 9)
    (240, 210, 100)
    """
    if num_epochs < 0:
        raise OptionError(f"a run has 0 epochs or more, got {num_epochs}")
    first = epoch_bound(size_bytes, warm_bytes)
    later = epoch_bound(size_bytes, cache_bytes)
    return first + (num_epochs - 1) * later if num_epochs else 0


def epoch_bound(size_bytes: int, held_bytes: int) -> int:
    """Return the fewest bytes that one epoch reads when so many are held as it begins.

    >>> epoch_bound(100, 30), epoch_bound(100, 130)
    (70, 0)
    """
    return windows_bound([size_bytes], held_bytes, held_bytes)


def windows_bound(
    distinct_bytes: Sequence[int] | npt.NDArray[np.int64], cache_bytes: int, warm_bytes: int = 0
) -> int:
    """Return a lower bound for any accesses, cut into windows in any way.

    A window that uses U distinct bytes finds at most C of them: sum of max(0, U - C). The first one
    finds what is warm. Epochs are windows, and so is what has passed of the last epoch.

    >>> windows_bound([100, 100, 40], cache_bytes=30)
    180
    """
    if min(cache_bytes, warm_bytes, *distinct_bytes, 0) < 0:
        raise OptionError(
            f"bytes cannot be negative: windows of {list(distinct_bytes)}, {cache_bytes} of cache, "
            f"{warm_bytes} warm"
        )
    held = [warm_bytes] + [cache_bytes] * len(distinct_bytes)
    return sum(max(0, int(u) - h) for u, h in zip(distinct_bytes, held, strict=False))


def belady_bytes(ids: npt.ArrayLike, sizes: npt.ArrayLike, cache_bytes: int) -> int:
    """Return the fewest bytes that a string of accesses reads, every use known ahead.

    After each access the bytes whose next use is furthest ahead are evicted first, even those just
    read. That is the minimum where samples can be kept in part, and a lower bound where they cannot
    (that problem is NP-hard). O(n log n) for n accesses; `sizes` is by id.

    >>> belady_bytes([0, 1, 2, 0, 1, 2], [10, 10, 10], 20)
    40
    """
    accesses, by_id = np.asarray(ids, np.int64), np.asarray(sizes, np.int64)
    next_use = _next_uses(accesses).tolist()
    resident: dict[int, int] = {}
    furthest: list[tuple[int, int]] = []
    held = read = 0
    for at, (i, size) in enumerate(zip(accesses.tolist(), by_id[accesses].tolist(), strict=True)):
        had = resident.pop(i, 0)
        read += size - had
        held -= had
        if next_use[at] == len(accesses):
            continue  # Never again: it need not stay.
        resident[i] = size
        held += size
        heapq.heappush(furthest, (-next_use[at], i))
        while held > cache_bytes:
            # Each entry is of a later use than now, so its sample is resident, whole or in part.
            other = furthest[0][1]
            kept = max(0, resident[other] - (held - cache_bytes))
            held -= resident[other] - kept
            resident[other] = kept
            if kept == 0:
                heapq.heappop(furthest)
    return read


def _next_uses(accesses: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return for each access where its sample is used next; the length where it is not."""
    out = np.full(len(accesses), len(accesses), np.int64)
    by_id = np.argsort(accesses, kind="stable")
    same = accesses[by_id[1:]] == accesses[by_id[:-1]]
    out[by_id[:-1][same]] = by_id[1:][same]
    return out


def lru_hit_ratio(cached_share: float) -> float:
    """Return the share of accesses that an LRU cache of c = C/S finds in shuffled epochs.

    A sample's reuse distance is 1 - x(1 - y) of the set with x, y uniform: between its place x in
    one epoch and its place y in the next lie the rest of the one and the start of the other, less
    what they share. P(distance < c) = c + (1 - c) · ln(1 - c).

    >>> [round(lru_hit_ratio(c), 3) for c in (0.0, 0.1, 0.2, 0.5, 0.9, 1.0)]
    [0.0, 0.005, 0.021, 0.153, 0.67, 1.0]
    """
    if cached_share < 0:
        raise OptionError(f"a share is 0 or more, got {cached_share}")
    if cached_share >= 1:
        return 1.0
    return cached_share + (1 - cached_share) * math.log1p(-cached_share)
