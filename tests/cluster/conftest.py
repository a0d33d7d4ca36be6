"""One network for all tests of many nodes; skipped, and said so, where none can be made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.cluster_site import Site, open_site
from testkit.network import Link, can_make_networks
from tests.cluster.small import NUM_SAMPLES, SAMPLE_BYTES

REASON = can_make_networks("bridge")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if REASON is None:
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"no networks here: {REASON}"))


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """Four nodes, then two that have nothing but IPv6."""
    links = {f"n{k}": Link(rate="10gbit") for k in range(4)}
    links |= {f"v{k}": Link(rate="10gbit", has_ipv4=False) for k in range(2)}
    with open_site(links, num_samples=NUM_SAMPLES, sample_bytes=SAMPLE_BYTES) as made:
        yield made
