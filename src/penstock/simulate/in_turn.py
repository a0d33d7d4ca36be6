"""Readers in turn: how a published model counts the nodes that read the store at the same time.

The simulator of the NoPFS thesis goes through the nodes one by one. Whenever a node reads, it
counts the others that have read at that time or later; nodes whose turn comes later have read
nothing yet. This is here to compare with published numbers, and nothing else should use it. Two
cases:

* Turns within a step (nothing is read ahead, or all is planned at once before the first step): node
  i meets the i nodes before it, until they are done. The first node has the store to itself, the
  last one is the slowest and sets the pace.
* Reading ahead: every node has a clock of its own, and whoever is furthest ahead in time meets
  nobody, the next one node, and so on. Being alone makes fast, so nodes overtake each other, and
  each gets the mean of the rates with 1, 2, … n readers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.simulate.job import Floats


def overtaking_s(
    store_bytes: Floats, other_s: Floats, byte_s: Callable[[Floats], Floats], threads: int
) -> Floats:
    """Return how long each node needs for each step when nodes overtake each other."""
    readers = (store_bytes > 0).sum(axis=1)
    pace = np.zeros_like(store_bytes)
    for count in range(1, store_bytes.shape[1] + 1):
        rate = byte_s(np.full(len(readers), float(count)))[:, None]
        whole_s = (store_bytes * rate + other_s) / threads
        one = np.divide(1.0, whole_s, where=whole_s > 0, out=np.full_like(whole_s, np.inf))
        pace += np.where((count <= readers)[:, None], one, 0.0)
    alone_s = other_s / threads
    mean_s = np.divide(readers[:, None], pace, where=pace > 0, out=np.zeros_like(pace))
    return np.where(store_bytes > 0, mean_s, alone_s)


def in_turn_s(
    store_bytes: Floats,
    other_s: Floats,
    byte_s: Callable[[Floats], Floats],
    threads: int,
) -> Floats:
    """Return how long each node needs for each step when nodes take turns within it."""
    steps, nodes = store_bytes.shape
    out = np.zeros((steps, nodes))
    ends = np.zeros((steps, 0))
    for node in range(nodes):
        mine, other = store_bytes[:, node], other_s[:, node]
        left, now = np.ones(steps), np.zeros(steps)
        # Phases end where an earlier node ends; in each the number of readers is fixed.
        for phase in range(node + 1):
            readers = np.full(steps, float(node + 1 - phase))
            whole_s = (mine * byte_s(readers) + other) / threads
            end = ends[:, phase] if phase < node else np.full(steps, np.inf)
            room = np.maximum(end - now, 0.0)
            share = np.minimum(left, np.divide(room, whole_s, where=whole_s > 0, out=left.copy()))
            now = now + share * whole_s
            left = left - share
        out[:, node] = now
        end = np.where(mine > 0, now, 0.0)
        ends = np.sort(np.column_stack([ends, end]), axis=1)
    return out
