"""What a run reads from its store, as the store counts it, against the least that it could."""

from pathlib import Path

import numpy as np
import pytest
from testkit.shaper import Shaper

import penstock
from penstock.flow.bound import epochs_bound

from .conftest import write_tar

NUM_ROWS = 1200
NUM_EPOCHS = 3


def write_rows(folder: Path) -> None:
    """Write rows of 200 to 2,000 bytes as tars, headers and padding between them."""
    rng = np.random.default_rng(0)
    for shard in range(3):
        first = shard * NUM_ROWS // 3
        rows = [{"bin": rng.bytes(int(n))} for n in rng.integers(200, 2000, NUM_ROWS // 3)]
        write_tar(folder / f"x-{shard}.tar", rows, first)


def read_epochs(dataset: penstock.Dataset, shaper: Shaper, **options: object) -> penstock.Stats:
    """Go through all epochs; what the loader has counted is what the store has."""
    before = shaper.counts().body_bytes
    with penstock.Loader(dataset, batch_size=100, epochs=NUM_EPOCHS, **options) as loader:  # type: ignore[arg-type]
        ids = [i for batch in loader for i in batch.ids.tolist()]
    assert sorted(ids) == sorted([*range(len(dataset))] * NUM_EPOCHS)
    assert shaper.counts().body_bytes - before == loader.stats().store_bytes
    return loader.stats()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_partial_caches_of_tiny_rows_read_about_the_least_possible(
    tmp_path: Path, share: float
) -> None:
    write_rows(tmp_path / "rows")
    (tmp_path / "tier").mkdir()
    object_bytes = sum(path.stat().st_size for path in (tmp_path / "rows").glob("*.tar"))
    capacity = int(share * object_bytes)
    with Shaper.of_folder(tmp_path / "rows") as shaper:
        dataset = penstock.open(shaper.uri, store=shaper.options)
        tiers = [penstock.Disk(tmp_path / "tier", capacity)] if share else []
        stats = read_epochs(dataset, shaper, tiers=tiers)
    assert stats.bound_bytes is not None
    assert stats.bound_ratio is not None
    assert 1.0 <= stats.bound_ratio <= 1.1
    # The bound is one: no cache of so many bytes could do with less.
    assert stats.bound_bytes >= epochs_bound(dataset.size_bytes, capacity, NUM_EPOCHS)
    # Nor is more read than if every epoch read the objects as they lie.
    assert stats.store_bytes <= epochs_bound(object_bytes, capacity, NUM_EPOCHS)


@pytest.mark.parametrize("shuffle", ["blocks", "blocks-first"])
@pytest.mark.parametrize("has_tier", [False, True])
def test_runs_that_are_read_whole_are_in_the_bound_with_what_lies_between(
    tmp_path: Path, shuffle: str, has_tier: bool
) -> None:
    write_rows(tmp_path / "rows")
    (tmp_path / "tier").mkdir()
    tiers = [penstock.Disk(tmp_path / "tier", "400KB")] if has_tier else []
    with Shaper.of_folder(tmp_path / "rows") as shaper:
        dataset = penstock.open(shaper.uri, store=shaper.options)
        stats = read_epochs(dataset, shaper, shuffle=shuffle, tiers=tiers)
    assert stats.bound_ratio is not None
    assert stats.bound_ratio >= 1.0
    # With a tier, some runs are read whole and of others the rows alone: less is possible.
    assert has_tier or stats.bound_ratio <= 1.1
