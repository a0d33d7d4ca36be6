"""What the summary of a run says of the bytes that it read: never less than the least possible."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock import Loader, Memory, World
from penstock.dataset.dataset import Dataset
from penstock.engine.stats import SourceStats, Stats


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def rows(tmp_path: Path) -> Dataset:
    """Rows of their own content: tiers are found by what they hold, and belong to the user."""
    seed = uuid.uuid4().int
    np.save(tmp_path / "rows.npy", np.random.default_rng(seed).random((600, 512)))
    return penstock.open(tmp_path / "rows.npy")


def seen(dataset: Dataset, cache: float, tmp_path: Path, **more: object) -> Iterator[Stats]:
    """Yield what is counted, after every batch."""
    size = int(cache * dataset.size_bytes)
    options = {"batch_size": 16, "output": "numpy", "epochs": 3} | more
    with Loader(dataset, tiers=[Memory(size, folder=tmp_path)], **options) as loader:  # type: ignore[arg-type]
        for _ in loader:
            yield loader.stats()


def check(stats: Stats) -> None:
    assert stats.bound_ratio is None or stats.bound_ratio >= 1
    for ratio in re.findall(r"([0-9.]+) (?:of|times) the least possible", str(stats)):
        assert float(ratio) >= 1, str(stats)


@pytest.mark.parametrize("cache", [0.3, 1.1])
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_job_alone_reads_at_least_the_least(
    rows: Dataset, tmp_path: Path, cache: float, drop_last: bool
) -> None:
    for stats in seen(rows, cache, tmp_path, drop_last=drop_last):
        check(stats)
    # A small set: what is read ahead at the end of an epoch may serve the beginning of the next.
    assert stats.bound_ratio is not None or stats.store_bytes > 0.9 * (stats.bound_bytes or 0)


def test_windows_that_overlap_have_no_ratio_below_one(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.random.default_rng(uuid.uuid4().int).random(40_000))
    dataset = penstock.open(tmp_path / "tokens.npy", sequence_length=512, sequence_stride=64)
    assert dataset.size_bytes > 7 * 8 * 40_000
    for stats in seen(dataset, 1.1, tmp_path):
        check(stats)


def test_ranks_of_one_tier_read_for_each_other(rows: Dataset, tmp_path: Path) -> None:
    ranks = [
        seen(rows, 1.1, tmp_path, world=World(rank=rank, num_ranks=2), epochs=1) for rank in (0, 1)
    ]
    for pair in zip(*ranks, strict=True):
        for stats in pair:
            check(stats)


def test_less_than_the_least_is_told_as_what_it_is() -> None:
    read = {"s3": SourceStats(size_bytes=929, requests=1, seconds=1.0)}
    stats = Stats(
        samples=1, batches=1, stall_s=0.0, elapsed_s=1.0, decode_s=0.0, sources=read,
        bound_bytes=1000,
    )  # fmt: skip
    assert stats.bound_ratio is None
    assert "least possible" not in str(stats)
    assert "from stores: 929 B; alone and without look-ahead, this rank would have read" in str(
        stats
    )
