"""Tiers of an importance order: units come and go, and the stream is what it is without tiers."""

import gc
import itertools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Disk, Memory, World
from penstock.engine.stream import BatchStream
from penstock.engine.tier_residency import _RunSteps
from penstock.order import GlobalOrder
from penstock.storage.locate import open_store

from .conftest import write_tar

NUM, SIZE = 400, 9_000
PAGED = 12_288
LOSSES = np.random.default_rng(0).lognormal(0, 1, NUM).astype(np.float32)


@pytest.fixture
def remote(s3: Any, tmp_path: Path) -> penstock.Dataset:
    samples = [{"bin": bytes([i % 251]) * SIZE} for i in range(NUM)]
    write_tar(tmp_path / "far" / "x.tar", samples)
    store = open_store(s3.uri, s3.options)
    store.write("far/x.tar", (tmp_path / "far" / "x.tar").read_bytes())
    return penstock.open(f"{s3.uri.rstrip('/')}/far/", store=s3.options)


def options_of(**more: Any) -> dict[str, Any]:
    return {
        "global_batch_size": 20,
        "epochs": 5,
        "seed": 3,
        "shuffle": penstock.Importance(window=0.5),
        "output": "numpy",
        "look_ahead": 20 * SIZE * 2,
        **more,
    }


def taken(loader: penstock.Loader) -> list[Any]:
    """Go through a loader, look at every byte, report losses; return ids and weights."""
    found = []
    for batch in loader:
        for i, value in zip(batch.ids.tolist(), batch["bin"], strict=True):
            assert len(value) == SIZE
            assert (value == i % 251).all()
        loader.observe(batch, LOSSES[batch.ids])
        found.append((batch.ids.tolist(), batch.weights.tolist()))
    return found


def without_tiers(remote: penstock.Dataset, **more: Any) -> list[Any]:
    with penstock.Loader(remote, workers="here", **options_of(**more)) as loader:
        return taken(loader)


@pytest.mark.parametrize("workers", ["here", 1])
def test_the_stream_is_that_without_tiers_and_hits_exceed_the_share_that_is_cached(
    remote: penstock.Dataset, workers: Any
) -> None:
    size = int(0.2 * NUM) * PAGED
    options = options_of(workers=workers, tiers=[Memory(size)])
    with penstock.Loader(remote, **options) as loader:
        found = taken(loader)
        stats = loader.stats()
    assert found == without_tiers(remote)
    hits = stats.cache_hits
    assert hits is not None
    assert hits.used_bytes == 5 * NUM * PAGED
    # The first epoch is cold; a cache that never evicts would have 16 % in all.
    assert 0.16 < hits.share <= hits.most_share
    assert hits.num_evicted > 0
    assert stats.store_bytes < 0.85 * 5 * NUM * SIZE
    assert "cache hits" in str(stats)


def test_a_tier_never_takes_more_than_its_capacity_and_gives_everything_back(
    remote: penstock.Dataset,
) -> None:
    size = 50 * PAGED
    with penstock.Loader(remote, **options_of(workers="here", tiers=[Memory(size)])) as loader:
        batches, largest = iter(loader), 0
        for batch in batches:
            assert loader._engine is not None
            assert loader._engine._opened is not None
            [tier] = loader._engine._opened.local_tiers.tiers.tiers
            largest = max(largest, tier.files.data_taken_bytes)
            loader.observe(batch, LOSSES[batch.ids])
        units = np.arange(NUM)
        num_here = int(tier.present(units).sum())
        # Whatever came and went: there is no room that nothing lies in.
        assert tier.files.data_taken_bytes == num_here * PAGED
    assert 40 * PAGED < largest <= size


def test_what_a_disk_tier_holds_is_used_by_the_next_run(
    remote: penstock.Dataset, tmp_path: Path
) -> None:
    def run() -> tuple[list[Any], Any]:
        tiers = [Disk(tmp_path / "tier", 200 * PAGED)]
        with penstock.Loader(remote, **options_of(workers=1, tiers=tiers, epochs=1)) as loader:
            return taken(loader), loader.stats()

    (tmp_path / "tier").mkdir()
    first, cold = run()
    again, warm = run()
    assert first == again
    assert warm.store_bytes < 0.7 * cold.store_bytes


def test_units_that_vanish_are_read_from_the_store(remote: penstock.Dataset) -> None:
    options = options_of(workers="here", tiers=[Memory(80 * PAGED)])
    with penstock.Loader(remote, **options) as loader:
        over = threading.Event()

        def drop_some() -> None:
            rng = np.random.default_rng(1)
            while not over.wait(0.001):
                opened = loader._engine and loader._engine._opened
                if opened:
                    opened.local_tiers.tiers.tiers[0].drop(int(rng.integers(NUM)))

        dropper = threading.Thread(target=drop_some)
        dropper.start()
        try:
            found = taken(loader)
        finally:
            over.set()
            dropper.join()
        assert all(tier.num_damaged == 0 for tier in loader.stats().tiers)
    assert found == without_tiers(remote)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_ranks_of_one_node_and_of_several_deliver_the_same_stream(
    remote: penstock.Dataset, tmp_path: Path, num_nodes: int
) -> None:
    """On one node they share its tier; several nodes ask each other."""

    def go(rank: int) -> list[Any]:
        world = World(rank=rank, num_ranks=2, num_nodes=num_nodes)
        tier = tmp_path / f"node{world.node}"
        tier.mkdir(exist_ok=True)
        more = {"tiers": [Disk(tier, 60 * PAGED)], "world": world, "workers": "here"}
        with penstock.Loader(remote, peers=str(tmp_path / "meet"), **options_of(**more)) as loader:
            return taken(loader)

    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(go, range(2)))
    whole = [(a + b, v + w) for (a, v), (b, w) in zip(*parts, strict=True)]
    assert whole == without_tiers(remote)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("start", [0, 40, 90, 100])
def test_decisions_go_by_the_batches_of_the_run(drop_last: bool, start: int) -> None:
    order = GlobalOrder(num_samples=100, seed=1)
    stream = BatchStream(
        dataset=None,  # type: ignore[arg-type]  # Not looked at.
        order=order,
        world=World(),
        global_batch_size=20,
        drop_last=drop_last,
    )
    slots = itertools.islice(stream.slots(0, start, None), 12)
    expected = [(slot.epoch, int(slot.positions[0])) for slot in slots]
    steps = _RunSteps(stream, 0, start)
    assert [steps.next()[:2] for _ in range(12)] == expected


def test_a_loader_that_nobody_holds_goes_at_once(remote: penstock.Dataset) -> None:
    gc.collect()
    gc.disable()
    try:
        loader = penstock.Loader(remote, **options_of(workers=1))
        batches = iter(loader)
        loader.observe(batch := next(batches), LOSSES[batch.ids])
        client = weakref.ref(loader._client)
        del loader, batches, batch
        assert client() is None
    finally:
        gc.enable()


def test_samples_much_smaller_than_a_page_are_kept_in_runs_for_good(tmp_path: Path) -> None:
    """A page for each would hold little: here 64 of 4,096 bytes."""
    np.save(tmp_path / "rows.npy", np.arange(40_000 * 8, dtype=np.int64).reshape(-1, 8))
    dataset = penstock.open(tmp_path / "rows.npy")
    losses = np.random.default_rng(0).lognormal(size=40_000).astype(np.float32)
    options = options_of(workers="here", epochs=3, global_batch_size=1000)
    with penstock.Loader(dataset, **options, tiers=[Memory("1MB")]) as loader:
        for batch in loader:
            assert (batch["data"][:, 0] == 8 * batch.ids).all()
            loader.observe(batch, losses[batch.ids])
        stats = loader.stats()
    assert stats.tiers[0].held_bytes > 500_000
    assert stats.cache_hits is None
