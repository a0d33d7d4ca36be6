"""Gaps, whole blocks and claims, by what was measured; and which way samples take."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.flow import SourceRates
from penstock.flow.reading import (
    CLAIM_S,
    GAP_BYTES_MIN,
    HURRY_S,
    ClaimPatience,
    gap_bytes,
    reads_block_whole,
)
from penstock.flow.routes import Route, routes_of


def store(*, limit: int = 64, latency_s: float = 0.02, bytes_s: float = 400e6) -> SourceRates:
    return SourceRates(
        bytes_s=bytes_s,
        full_bytes_s=bytes_s,
        latency_p50_s=latency_s,
        latency_p99_s=2 * latency_s,
        in_flight=0,
        limit=limit,
    )


def test_gaps_are_read_only_where_requests_are_scarce() -> None:
    assert gap_bytes([store(limit=32)], 1 << 20, requests_max=64) == GAP_BYTES_MIN
    assert gap_bytes([store(limit=64)], 1 << 20, requests_max=64) == round(0.02 * 400e6 / 64)
    assert gap_bytes([], 1 << 20, requests_max=64) == GAP_BYTES_MIN


@given(st.integers(0, 1 << 24), st.floats(0.001, 1), st.floats(1e6, 1e10))
def test_a_gap_is_never_longer_than_what_is_wanted(
    range_bytes: int, latency_s: float, bytes_s: float
) -> None:
    found = gap_bytes([store(latency_s=latency_s, bytes_s=bytes_s)], range_bytes, requests_max=64)
    assert GAP_BYTES_MIN <= found <= max(GAP_BYTES_MIN, range_bytes)


@pytest.mark.parametrize(
    ("stores", "share", "expected"),
    [([], 1.0, True), ([], 0.5, False), ([store()], 0.5, True), ([store(limit=8)], 0.5, False)],
)
def test_a_block_is_read_whole_where_latency_rules(
    stores: list[SourceRates], share: float, expected: bool
) -> None:
    size = {"num_samples": 100, "size_bytes": 1_000_000, "requests_max": 64}
    assert reads_block_whole(stores, share, **size) == expected


def test_a_claim_is_waited_for_until_one_was_given_up() -> None:
    patience = ClaimPatience()
    assert patience.seconds([], 100.0) == CLAIM_S
    assert patience.seconds([store(latency_s=5.0)], 100.0) == 40.0
    patience.gave_up(100.0)
    assert patience.seconds([], 100.0 + HURRY_S / 2) == 0.0
    assert patience.seconds([], 100.0 + HURRY_S) == CLAIM_S


flags = st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=20)


@given(flags, st.booleans())
def test_the_nearest_way_is_taken(facts: list[tuple[bool, bool, bool]], in_runs: bool) -> None:
    placed, spread, bare = np.array(facts).T
    routes = routes_of(
        placed, in_runs=in_runs, is_run_bare=lambda: bare, can_come_from_peers=lambda: spread
    ).tolist()
    for route, is_placed, can_come_from_peers, is_bare in zip(
        routes, placed, spread, bare, strict=True
    ):
        if is_placed or can_come_from_peers:
            assert route == (Route.TIER if is_placed else Route.PEER)
        else:
            in_run = in_runs and (is_bare or not placed.any())
            assert route == (Route.RUN if in_run else Route.ALONE)


def test_nobody_is_asked_who_has_what_where_all_of_it_is_here() -> None:
    def asked() -> np.ndarray:
        raise AssertionError("other nodes were looked up")

    assert routes_of(np.ones(3, bool), can_come_from_peers=asked).tolist() == [Route.TIER] * 3
