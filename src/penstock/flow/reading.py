"""What measurements of the stores say about reads: which gaps to read, which blocks to read whole,
and how long to wait for what another process is fetching.

`plan.cost` has the formulas; here they meet what a flow has measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.flow import cost
from penstock.flow.choice import peer_of
from penstock.flow.flow import FlowRates
from penstock.flow.source import SourceRates

GAP_BYTES_MIN = 2 << 10
"""Read rather than asked around in any case: the headers of a request and of its answer take about
as many bytes on the wire."""
CLAIM_S, CLAIM_TAILS = 2.0, 4.0
"""A claim that is held longer than this, and than so many times what a slow request takes, may be
held by a process that is stopped."""
HURRY_S = 30.0
"""After a process that is stopped was given up, nobody is waited for, for so long."""


def stores_of(rates: FlowRates) -> list[SourceRates]:
    """Return what was measured of stores; peers are another matter."""
    return [source for name, source in rates.sources.items() if peer_of(name) is None]


def gap_bytes(stores: Iterable[SourceRates], range_bytes: int, *, requests_max: int) -> int:
    """Return the largest gap between two ranges that is read rather than asked around.

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
    """Return whether a block is read whole of which this rank uses a share."""
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

    Longer than fetching them takes, and not at all for a while after that was in vain: a process
    that is stopped may hold many claims.
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
