"""Assignment: who computes which sample of a global batch.

The order fixes the global batch; which rank computes which of its samples can be chosen. `fixed`
goes by the place in the batch, wherever samples lie. `local`, here, gives a sample to the node that
holds it as far as the shares allow. Shares stay as they are, so only what a node has too much of
moves to nodes that have too little. With random homes and b samples per node and step that is the
share sqrt((1 - 1/N) / (2 pi b)) of the samples, and no assignment moves fewer.

Every rank computes the whole assignment of every step, so it must be cheap and the same everywhere:
integers only, in a time that grows with the batch alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.dataset.part import Ints


def assign_local(homes_of_samples: Ints, node_of_rank: Ints, sizes: Ints) -> Ints:
    """Return the samples of a global batch by rank: places in the batch, one share after the other.

    `homes_of_samples` has the node of each sample, a negative number where it has none; `sizes` the
    share of each rank. Of the samples that a node has too many of, the last in the batch move.
    Those without a home go to the nodes that have the least to do, one after the other; what moves
    fills the rest.

    >>> assign_local(np.array([0, 0, 0, 1, -1, 0]), np.array([0, 1]), np.array([3, 3]))
    array([0, 1, 2, 3, 4, 5])
    >>> assign_local(np.array([1, 1, 0, 1, 0, 0]), np.array([0, 0, 1]), np.array([2, 1, 3]))
    array([2, 4, 5, 0, 1, 3])
    """
    quota = np.zeros(int(node_of_rank.max()) + 1, np.int64)
    np.add.at(quota, node_of_rank, sizes)
    assert int(quota.sum()) == len(homes_of_samples), f"{quota.sum()=} {len(homes_of_samples)=}"
    nodes = _stayed(homes_of_samples, quota)
    moves = np.flatnonzero(nodes < 0)
    # Samples without a home come first: they are read from the store wherever they go, so they can
    # fill whatever is emptiest.
    has_home = homes_of_samples[moves] >= 0
    moves = np.concatenate([moves[~has_home], moves[has_home]])
    nodes[moves] = _emptiest(quota - np.bincount(nodes[nodes >= 0], minlength=len(quota)))
    by_node = np.argsort(_narrow(nodes), kind="stable")
    out = np.empty(len(nodes), np.int64)
    out[_slots(node_of_rank, sizes)] = by_node
    return out


def _stayed(homes: Ints, quota: Ints) -> Ints:
    """Return the node of each sample that stays at home; -1 for the others."""
    known = np.where((homes >= 0) & (homes < len(quota)), homes, len(quota))
    order = np.argsort(_narrow(known), kind="stable")
    node = known[order]
    counts = np.bincount(node, minlength=len(quota) + 1)
    place = np.arange(len(node)) - (np.cumsum(counts) - counts)[node]
    out = np.empty(len(homes), np.int64)
    out[order] = np.where(place < np.append(quota, 0)[node], node, -1)
    return out


def _emptiest(open_slots: Ints) -> Ints:
    """Return the nodes that get one sample more, one after the other, always the emptiest.

    >>> _emptiest(np.array([1, 3, 0, 2]))
    array([1, 1, 3, 0, 1, 3])
    """
    node = np.repeat(np.arange(len(open_slots)), open_slots)
    left = np.repeat(np.cumsum(open_slots), open_slots) - np.arange(len(node))
    out: Ints = node[np.argsort(-left, kind="stable")]
    return out


def _slots(node_of_rank: Ints, sizes: Ints) -> Ints:
    """Return the places of all shares in the answer, node by node."""
    ranks = np.argsort(node_of_rank, kind="stable")
    starts = (np.cumsum(sizes) - sizes)[ranks]
    lengths = sizes[ranks]
    before = np.cumsum(lengths) - lengths
    out: Ints = np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
    return out


def _narrow(nodes: Ints) -> npt.NDArray[np.signedinteger[Any]]:
    """Return node numbers in few bits: these are sorted in a time that grows with their count."""
    return nodes.astype(np.int16) if int(nodes.max(initial=0)) < 1 << 15 else nodes
