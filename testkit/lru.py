"""A textbook LRU cache, to compare formulas and policies with."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt


def lru_bytes(ids: npt.ArrayLike, sizes: npt.ArrayLike, capacity_bytes: int) -> int:
    """Return the bytes that an LRU cache of whole samples reads on a string of accesses.

    A sample larger than the cache passes through.

    >>> lru_bytes([0, 1, 2, 0, 1, 2], [10, 10, 10], 20)
    60
    """
    accesses, by_id = np.asarray(ids, np.int64), np.asarray(sizes, np.int64)
    resident: OrderedDict[int, int] = OrderedDict()
    held = read = 0
    for i, size in zip(accesses.tolist(), by_id[accesses].tolist(), strict=True):
        if i in resident:
            resident.move_to_end(i)
            continue
        read += size
        if size > capacity_bytes:
            continue
        resident[i] = size
        held += size
        while held > capacity_bytes:
            held -= resident.popitem(last=False)[1]
    return read
