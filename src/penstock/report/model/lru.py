"""Hits of a cache that evicts what was used least recently: the page cache, roughly."""

from __future__ import annotations

import math
from collections import OrderedDict
from functools import lru_cache
from typing import Any

import numpy as np

_ITEMS = 2000
_EPOCHS = 4


def lru_hits(share: Any) -> Any:
    """Return the share of hits when every epoch reads all samples once, in a new order.

    A sample read at place u of one epoch and v of the next survives if the part of the set that
    was not touched in between, u·(1-v), is at least 1 - share; this is the integral over u and v.

    >>> lru_hits(np.array([0.0, 0.25, 0.5, 0.9, 1.0])).round(3).tolist()
    [0.0, 0.034, 0.153, 0.67, 1.0]
    """
    missing = np.clip(1.0 - share, 0.0, 1.0)
    return 1.0 - missing + missing * np.log(np.where(missing > 0, missing, 1.0))


def node_hits(share: float, nodes: int) -> float:
    """Return the hits of one of several nodes, each with a cache for that share of all samples.

    Every epoch gives a node another random part of the set: what it has kept is mostly not what it
    reads. There is no short formula; the order is drawn and the cache is played.
    """
    if nodes == 1 or share <= 0 or share >= 1:
        return float(lru_hits(share))
    return _played_hits(round(share, 3), nodes)


@lru_cache(maxsize=256)
def _played_hits(share: float, nodes: int) -> float:
    items = max(_ITEMS, 50 * nodes)
    per_epoch, capacity = items // nodes, max(1, round(share * items))
    epochs = max(_EPOCHS, math.ceil(3 * capacity / per_epoch))
    rng = np.random.default_rng(0)
    held: OrderedDict[int, None] = OrderedDict()
    num_hits = num_reads = 0
    for epoch in range(epochs):
        for item in rng.permutation(items)[:per_epoch].tolist():
            if item in held:
                held.move_to_end(item)
            elif len(held) >= capacity:
                held.popitem(last=False)
            num_hits += item in held and epoch >= epochs // 2
            held[item] = None
            num_reads += epoch >= epochs // 2
    return num_hits / max(1, num_reads)
