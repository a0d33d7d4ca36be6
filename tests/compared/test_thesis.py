"""The table of the NoPFS thesis: every published ratio within 3 %, with a tenth of the samples."""

from __future__ import annotations

import pytest
from benchmarks.policies import POLICIES
from benchmarks.thesis import COLUMNS, PUBLISHED, published_ratio, scenario

from penstock.simulate import run

CASES = [
    pytest.param(policy, column, id=f"{policy if isinstance(policy, str) else 'alone'}-{column}")
    for policy in PUBLISHED
    if policy != "nopfs"
    for column in COLUMNS
    if published_ratio(policy, column) is not None
]


@pytest.mark.parametrize(("policy", "column"), CASES)
def test_a_ratio_is_as_published(policy: str, column: str) -> None:
    result = run(scenario(column, share=0.1), POLICIES.get(policy, policy))
    assert result.time_ratio == pytest.approx(published_ratio(policy, column), rel=0.03)


@pytest.mark.parametrize("column", COLUMNS)
def test_the_lower_bound_itself_is_as_published(column: str) -> None:
    result = run(scenario(column, share=0.1), POLICIES["perfect"])
    published = PUBLISHED["perfect"][list(COLUMNS).index(column)]
    assert result.time_s == pytest.approx(published, rel=0.02)


def test_nopfs_with_peers_is_within_a_tenth_of_what_was_published_without() -> None:
    result = run(scenario("1,200 GB", share=0.1), "nopfs")
    assert result.time_ratio == pytest.approx(published_ratio("nopfs", "1,200 GB"), rel=0.10)


def test_where_the_store_is_shared_for_real_the_published_gain_is_gone() -> None:
    # Six threads of four nodes cannot each have a node's share of 146 MB/s.
    real = scenario("600 GB", share=0.1, as_published=False)
    nopfs, ours = run(real, "nopfs"), run(real, "ours")
    assert nopfs.time_ratio > 1.4
    assert ours.time_ratio < nopfs.time_ratio
    assert ours.byte_ratio == pytest.approx(1.0, abs=0.001)
