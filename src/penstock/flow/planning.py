"""What to plan next: another batch, or units that later batches will need of the tiers.

Batches come first: a batch is planned while the stage has room for it. When no batch may be planned
and the store has little to do, the tiers are filled ahead, in the order of first use.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.flow.cost import REQUESTS_MAX

NEAR_SPARE = 2
"""Batches planned beyond those that keep all makers busy, where no bytes have to be fetched."""
BATCHES_MAX = 4096
"""Batches planned and not taken, however small they are."""
FILLS_WAITING = 2
"""The tiers are filled ahead while the reads that wait are fewer than this many times the requests
that may be in flight."""
FILL_SAMPLES = 4096
"""Samples of later batches that are looked through for fills at once."""
REQUESTS_MIN = 8
"""Requests that a rank may have in flight, however many ranks its node has."""


def may_plan(
    *,
    num_batches: int,
    size_bytes: int,
    was_near: bool,
    num_makers: int,
    stage_bytes_max: int,
    look_ahead_bytes: Callable[[], int],
) -> bool:
    """Return whether another batch may be planned beside those that are planned and not taken.

    One batch is always allowed, however large: a stage that is too small must not stand still.
    `was_near` says that the latest batch had all its bytes near. Then only as many are planned as
    keep all makers busy, in few buffers that stay warm. Else the flow says how far to look ahead.

    >>> facts = dict(num_makers=2, stage_bytes_max=1000, look_ahead_bytes=lambda: 300)
    >>> [may_plan(num_batches=3, size_bytes=size, was_near=False, **facts) for size in (200, 300)]
    [True, False]
    >>> [may_plan(num_batches=n, size_bytes=500, was_near=True, **facts) for n in (3, 4)]
    [True, False]
    """
    if not num_batches:
        return True
    if num_batches >= BATCHES_MAX or size_bytes >= stage_bytes_max:
        return False
    return num_batches < num_makers + NEAR_SPARE if was_near else size_bytes < look_ahead_bytes()


def may_fill(*, num_waiting: int, requests_limit: int) -> bool:
    """Return whether the stores have room for fills of tiers ahead of the batches.

    `num_waiting` are the reads of stores that are wanted and not done. Reads that other nodes owe
    do not count: those nodes may be waiting for ours.
    """
    return num_waiting < FILLS_WAITING * requests_limit


def requests_max(num_ranks_of_node: int) -> int:
    """Return how many requests a rank may have in flight at one source.

    The flow finds out how many help. Ranks do not know of each other: many at once would only
    queue up at their common link.

    >>> [requests_max(n) for n in (1, 4, 64)]
    [64, 16, 8]
    """
    return max(REQUESTS_MIN, REQUESTS_MAX // num_ranks_of_node)


def pieces_of_batch(
    *, number: int, num_workers: int, num_requests: int, batch_bytes: int, look_ahead_bytes: int
) -> int:
    """Return into how many pieces a batch is cut for worker processes.

    Each piece is a message there and back, which wakes several threads and takes caches from the
    workers. So there are no more pieces than give every worker its requests (`num_requests` for all
    workers together), as many batches as the look-ahead has room for taken together. The first
    batches, which the training loop waits for, are made by all workers together.

    >>> facts = dict(num_workers=16, num_requests=32, look_ahead_bytes=512)
    >>> [pieces_of_batch(number=n, batch_bytes=40, **facts) for n in (0, 1, 2, 3, 100)]
    [16, 8, 4, 3, 3]
    >>> [pieces_of_batch(number=9, batch_bytes=size, **facts) for size in (1, 512, 10_000)]
    [1, 32, 32]
    """
    num_batches = max(1, look_ahead_bytes // max(1, batch_bytes))
    return max(-(-num_requests // num_batches), num_workers >> min(number, 62), 1)
