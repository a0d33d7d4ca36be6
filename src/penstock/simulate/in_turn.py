"""Readers in turn: a published model's idea of who reads the store at the same time.

The simulator of the NoPFS thesis goes through the nodes of a step one by one and asks, whenever a
node reads, which others have read within a moment. Nodes that come later in the loop have not read
anything yet. So node i meets only the i nodes before it, and only until they are done with their
part of the step: the first node always has the store to itself, the last one is the slowest and
sets the pace. It is kept here to compare with published numbers; nothing else should use it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.simulate.job import Floats


def in_turn_s(
    store_bytes: Floats,
    other_s: Floats,
    busy_s: Floats,
    byte_s: Callable[[Floats], Floats],
    threads: int,
) -> Floats:
    """Return how long each node needs for each step, by step and node.

    A node is among the readers of its step for `busy_s` at least, if it reads the store at all.
    """
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
        end = np.where(mine > 0, np.maximum(now, busy_s[:, node]), 0.0)
        ends = np.sort(np.column_stack([ends, end]), axis=1)
    return out
