from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.cluster_job import delivered, expected, peer_bytes, total
from benchmarks.cluster_site import Site
from tests.cluster.small import NUM_SAMPLES, SAMPLE_BYTES, run, task_of

from penstock.flow.bound import epochs_bound

SLACK = 1.01
ASKED_TWICE_BYTES = 10 * SAMPLE_BYTES
"""What is late on a busy machine is asked for again elsewhere; without peers it would be a half."""
OVERHEAD = 1.25
"""What an interface may count above the payload: headers, and the index that each rank reads."""


def most(bound_bytes: int) -> float:
    """Return what the store may have served where that much is the least."""
    return SLACK * bound_bytes + ASKED_TWICE_BYTES


@pytest.mark.parametrize("share", [1.2, 0.3])
def test_the_store_serves_what_no_cache_could_spare_it(
    site: Site, tmp_path: Path, share: float
) -> None:
    task = task_of(site, tmp_path, disk=int(share * site.size_bytes / 2))
    before = site.store.host.counters()
    ends = run(task, site.nodes[:2])
    counted = site.store.host.counters() - before
    bound_bytes = epochs_bound(site.size_bytes, min(site.size_bytes, 2 * task.disk), task.epochs)
    assert delivered(tmp_path) == expected(NUM_SAMPLES, task)
    assert total(ends, "store_bytes") <= most(bound_bytes)
    assert counted.out_bytes <= OVERHEAD * bound_bytes
    assert peer_bytes(ends) > 0


@pytest.mark.parametrize(("num_nodes", "assignment"), [(1, "fixed"), (4, "fixed"), (4, "locality")])
def test_any_number_of_nodes_delivers_the_same_global_batches(
    site: Site, tmp_path: Path, num_nodes: int, assignment: str
) -> None:
    task = task_of(site, tmp_path, options={"assignment": assignment})
    ends = run(task, site.nodes[:num_nodes])
    assert total(ends, "store_bytes") <= most(site.size_bytes)
    assert delivered(tmp_path) == expected(NUM_SAMPLES, task)


def test_nodes_with_nothing_but_ipv6_read_from_each_other(site: Site, tmp_path: Path) -> None:
    task = task_of(site, tmp_path, endpoint=site.store.access_ipv6.endpoint)
    ends = run(task, site.nodes[4:])
    assert delivered(tmp_path) == expected(NUM_SAMPLES, task)
    assert total(ends, "store_bytes") <= most(site.size_bytes)
    assert peer_bytes(ends) > 0
