"""What a read costs: time = latency + bytes / bandwidth, and what follows from it.

Three numbers describe a store from a node: the latency L to the first byte of a request, what one
connection carries, and what the link carries when many requests are in flight. While few are in
flight, latency rules and larger reads pay; once the link is full, only needed bytes count.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from penstock.errors import OptionError
from penstock.machine import StoreModel

REQUESTS_MAX = 64
"""The most requests that a node has in flight."""
LINK_BOUND_SHARE = 0.95
"""On a full link a block is read whole only if at least this share of it is used."""
_Z99 = NormalDist().inv_cdf(0.99)


def read_s(size_bytes: float, latency_s: float, bytes_s: float) -> float:
    """Return how long one read takes.

    >>> read_s(1_000_000, 0.02, 50e6)
    0.04
    """
    return latency_s + size_bytes / bytes_s


def merge_gap_bytes(latency_s: float, bytes_s: float, num_requests: int = 1) -> int:
    """Return the largest gap between two wanted ranges that is worth reading.

    On one connection a second request costs its latency and a gap costs gap/bandwidth, so they are
    equal at L·b. With K requests in flight on a link of b bytes/s the latency of one is spent while
    the others transfer: a request holds one of K slots for L, that is L/K of everybody's time,
    while the gap's bytes hold the whole link for gap/b. So it is L·b/K. Both agree where the link
    is not full, since K connections then carry K times what one does.

    >>> merge_gap_bytes(0.015, 50e6), merge_gap_bytes(0.015, 400e6, num_requests=32)
    (750000, 187500)
    """
    if min(latency_s, bytes_s) < 0 or num_requests < 1:
        raise OptionError(
            f"a latency of {latency_s} s, {bytes_s} bytes/s and {num_requests} requests in flight "
            "make no sense: the first two are 0 or more, the last 1 or more"
        )
    return round(latency_s * bytes_s / num_requests)


def whole_block_share(
    num_samples: int, sample_bytes: float, latency_s: float, connection_bytes_s: float
) -> float:
    """Return the share of a block from which on reading it whole beats reading samples.

    A block of m samples takes L + m·s/b; used samples one by one take φ·m·(L + s/b). Equal at
    φ = (1/m + x) / (1 + x) with x = (s/b) / L: near 1/m where latency rules, near 1 where it does
    not.

    >>> round(whole_block_share(76, 110_000, 0.015, 50e6), 2)
    0.14
    """
    if latency_s <= 0:
        return 1.0
    x = (sample_bytes / connection_bytes_s) / latency_s
    return (1 / max(1, num_samples) + x) / (1 + x)


def reads_whole(
    used_share: float,
    *,
    num_samples: int,
    sample_bytes: float,
    latency_s: float,
    connection_bytes_s: float,
    is_link_bound: bool = False,
) -> bool:
    """Return whether a block of which a share is used before it is dropped is read whole.

    On a full link every byte that is not used delays one that is: whole only if nearly all is used.

    >>> facts = dict(num_samples=76, sample_bytes=110_000, latency_s=0.015, connection_bytes_s=50e6)
    >>> reads_whole(0.2, **facts), reads_whole(0.2, **facts, is_link_bound=True)
    (True, False)
    """
    if num_samples <= 1:
        return True
    if is_link_bound:
        return used_share >= LINK_BOUND_SHARE
    return used_share >= whole_block_share(num_samples, sample_bytes, latency_s, connection_bytes_s)


def look_ahead_s(
    latency_s: float, latency_p99_s: float, num_reads: int, late_share: float = 0.01
) -> float:
    """Return how long before its step a read must begin, so that few steps wait.

    A step of `num_reads` reads waits for the slowest of them. For it to be late in a share ε of the
    steps, each read may be late with probability ε/num_reads: that quantile of the latency, taken
    as log-normal through its median and its 99th percentile. The tail sets the depth, not the mean.

    >>> round(look_ahead_s(0.005, 0.005 * math.exp(0.5 * 2.3263), 64 * 64), 3)
    0.049
    """
    late = min(0.5, late_share / max(1, num_reads))
    # Of the small tail itself, since 1 - late rounds to 1 for very many reads.
    return log_normal_s(latency_s, latency_p99_s, -NormalDist().inv_cdf(late))


def log_normal_s(latency_s: float, latency_p99_s: float, deviations: float) -> float:
    """Return a latency so many standard deviations from its median, taken as log-normal.

    >>> log_normal_s(0.01, 0.05, 0.0), round(log_normal_s(0.01, 0.05, 2.3263), 3)
    (0.01, 0.05)
    """
    if latency_s <= 0:
        return 0.0
    sigma = math.log(max(latency_p99_s, latency_s) / latency_s) / _Z99
    return latency_s * math.exp(sigma * deviations)


def store_bytes_s(store: StoreModel, request_bytes: float, num_nodes: int = 1) -> float:
    """Return what the store delivers to one node of several that all read, by requests of a size.

    The least of: what a node's link carries, what as many requests as are allowed in flight bring
    (each waits L and then transfers like a single one), a node's part of what the store gives all
    of them, and of the requests a second that it answers.
    """
    rate = max(_in_flight_bytes_s(store, k, request_bytes) for k in _in_flight_choices(store))
    if store.shared is not None:
        rate = min(rate, store.shared.at(num_nodes) / num_nodes)
    if store.requests_s_max is not None:
        rate = min(rate, store.requests_s_max * request_bytes / num_nodes)
    return rate


def requests_in_flight(store: StoreModel, request_bytes: float) -> int:
    """Return the fewest requests in flight that bring about all that a node can get."""
    choices = _in_flight_choices(store)
    rates = [_in_flight_bytes_s(store, k, request_bytes) for k in choices]
    return next(k for k, rate in zip(choices, rates, strict=True) if rate >= 0.99 * max(rates))


def _in_flight_choices(store: StoreModel) -> list[int]:
    counts = {*store.throughput.counts, *(2**i for i in range(7))}
    return sorted(c for c in counts if c <= REQUESTS_MAX) or [REQUESTS_MAX]


def _in_flight_bytes_s(store: StoreModel, num_requests: int, request_bytes: float) -> float:
    one_s = store.read_s(request_bytes, num_requests)
    return num_requests * request_bytes / one_s if one_s else store.throughput.at(num_requests)


def connection_bytes_s(store: StoreModel) -> float:
    """Return what one request alone carries once its first byte has come."""
    return store.without_latency().throughput.at(1)
