"""What measurements of the stores say about reads: which gaps to read, which blocks to read whole,
and how long to wait for what another process is fetching.

The formulas are in `cost`; here they are given what a flow has measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.flow import cost
from penstock.flow.choice import peer_of
from penstock.flow.flow import FlowRates
from penstock.flow.source import SourceRates

GAP_BYTES_MIN = 2 << 10
"""A gap up to this size is always read: the headers of another request and its answer take about as
many bytes on the wire."""
CLAIM_S, CLAIM_TAILS = 2.0, 4.0
"""A claim may belong to a stopped process if it is held for longer than `CLAIM_S` and for longer
than `CLAIM_TAILS` slow requests take."""
HURRY_S = 30.0
"""After a claim of a stopped process was given up, no claim is waited for during this time."""


def stores_of(rates: FlowRates) -> list[SourceRates]:
    """Return what was measured of stores; peers are another matter."""
    return [source for name, source in rates.sources.items() if peer_of(name) is None]


def gap_bytes(stores: Iterable[SourceRates], range_bytes: int, *, requests_max: int) -> int:
    """Return the largest gap between two ranges that is read rather than skipped by a new request.

    While the flow could have more requests in flight, another one costs no time and a gap does.
    Where there are as many as there may be, a request costs its share of their time. A gap is never
    longer than the ranges themselves, `range_bytes` on average: latency and bandwidth are measured
    on all reads, and fills of many kilobytes say nothing about rows of a few hundred bytes. So at
    most half of what is read is not wanted.
    """
    bound = [s for s in stores if s.limit >= requests_max and s.full_bytes_s]
    gaps = [cost.merge_gap_bytes(s.latency_p50_s, s.full_bytes_s, requests_max) for s in bound]
    return max(GAP_BYTES_MIN, min(range_bytes, max(gaps, default=0)))


def reads_block_whole(
    stores: Iterable[SourceRates],
    used_share: float,
    *,
    num_samples: int,
    size_bytes: int,
    requests_max: int,
) -> bool:
    """Return whether a block is read whole if this rank uses a share of it."""
    if used_share == 1:
        return True
    known = [s for s in stores if s.full_bytes_s]
    if not known:
        return False
    s = max(known, key=lambda s: s.full_bytes_s)
    return cost.reads_whole(
        used_share,
        num_samples=num_samples,
        sample_bytes=size_bytes / num_samples,
        latency_s=s.latency_p50_s,
        connection_bytes_s=s.full_bytes_s / s.limit,
        is_link_bound=s.limit < requests_max,
    )


class ClaimPatience:
    """How long to wait for units that another process of this node has claimed.

    Longer than fetching them takes. After a claim was given up, not at all for a while: a stopped
    process may hold many claims.
    """

    def __init__(self) -> None:
        self._hurries_until_s = 0.0

    def seconds(self, stores: Sequence[SourceRates], now_s: float) -> float:
        """Return how long to wait from now on."""
        if now_s < self._hurries_until_s:
            return 0.0
        return max([CLAIM_S, *(CLAIM_TAILS * s.latency_p99_s for s in stores)])

    def gave_up(self, now_s: float) -> None:
        """Take note that a claim was waited for in vain."""
        self._hurries_until_s = now_s + HURRY_S
