"""What is read to index a remote set is not read again for the first epoch."""

import json
from pathlib import Path

import numpy as np
import pytest
from testkit.shaper import Fixed, Shape, Shaper

import penstock
from penstock.errors import OptionError

from .conftest import write_tar

FAR = Shape(latency=Fixed(0.05))
"""A store where a request takes longer than a hundred kilobytes do."""


def write_members(folder: Path, size_bytes: int, num_samples: int) -> int:
    rng = np.random.default_rng(0)
    for shard in range(2):
        numbers = range(shard * num_samples // 2, (shard + 1) * num_samples // 2)
        samples = [{"bin": rng.bytes(size_bytes), "cls": str(i).encode()} for i in numbers]
        write_tar(folder / f"x-{shard}.tar", samples, numbers.start)
    return sum(path.stat().st_size for path in folder.glob("*.tar"))


def epoch(dataset: penstock.Dataset, **options: object) -> penstock.Stats:
    with penstock.Loader(dataset, batch_size=8, **options) as loader:  # type: ignore[arg-type]
        ids = [i for batch in loader for i in batch["cls"].tolist()]
    assert sorted(ids) == [*range(len(dataset))]
    return loader.stats()


@pytest.mark.parametrize(("size_bytes", "num_samples"), [(110_000, 64), (2_000_000, 8), (700, 800)])
def test_index_and_first_epoch_together_read_the_set_once(
    tmp_path: Path, size_bytes: int, num_samples: int
) -> None:
    total = write_members(tmp_path / "set", size_bytes, num_samples)
    (tmp_path / "tier").mkdir()
    tiers = [penstock.Disk(tmp_path / "tier", "100MB")]
    with Shaper.of_folder(tmp_path / "set", FAR) as shaper:
        before = shaper.counts().body_bytes  # The server's own listing is not of the set.
        dataset = penstock.open(shaper.uri, store=shaper.options, tiers=tiers)
        stats = epoch(dataset, tiers=tiers)
        assert shaper.counts().body_bytes - before <= 1.02 * total + 20_000
    # The first two members of an object are left out while its store is measured.
    assert stats.store_bytes <= 0.1 * total or size_bytes > 1_000_000
    assert dataset.passed is not None
    assert dataset.passed.held_bytes <= 0.02 * total + 20_000, "what tiers took is given back"
    left = [path.name for path in (tmp_path / "tier").iterdir()]
    assert left == ["penstock"], "nothing is left beside the tier"


def test_lines_that_were_read_to_find_their_ends_are_not_read_again(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "tier").mkdir()
    lines = [json.dumps({"cls": i, "text": "x" * 500}) for i in range(800)]
    (tmp_path / "set" / "a.jsonl").write_text("\n".join(lines) + "\n")
    tiers = [penstock.Disk(tmp_path / "tier", "100MB")]
    with Shaper.of_folder(tmp_path / "set", FAR) as shaper:
        dataset = penstock.open(shaper.uri, store=shaper.options, tiers=tiers)
        assert epoch(dataset, tiers=tiers).store_bytes == 0


def test_bytes_that_passed_are_the_bytes_of_the_store(tmp_path: Path) -> None:
    write_members(tmp_path / "set", 50_000, 40)
    (tmp_path / "tier").mkdir()
    tiers = [penstock.Disk(tmp_path / "tier", "100MB")]
    with Shaper.of_folder(tmp_path / "set", FAR) as shaper:
        dataset = penstock.open(shaper.uri, store=shaper.options, tiers=tiers)
        expected = [dataset[i]["bin"] for i in range(len(dataset))]
        with penstock.Loader(dataset[:], batch_size=8, tiers=tiers, output="numpy") as loader:
            for batch in loader:
                for i, value in zip(batch.ids.tolist(), batch["bin"], strict=True):
                    assert bytes(value) == expected[i]
        assert loader.stats().store_bytes < 0.2 * dataset.size_bytes, "a view takes it, too"


def test_tiers_that_hold_a_part_are_not_given_more_than_that(tmp_path: Path) -> None:
    total = write_members(tmp_path / "set", 110_000, 64)
    (tmp_path / "tier").mkdir()
    tiers = [penstock.Disk(tmp_path / "tier", total // 2 + 1000)]
    with Shaper.of_folder(tmp_path / "set", FAR) as shaper:
        dataset = penstock.open(shaper.uri, store=shaper.options, tiers=tiers)
        assert dataset.passed is not None
        assert dataset.passed.held_bytes <= total // 2 + 1000
        stats = epoch(dataset, tiers=tiers)
        assert stats.store_bytes <= 0.6 * total


def test_members_of_megabytes_are_not_read_for_their_headers(tmp_path: Path) -> None:
    total = write_members(tmp_path / "set", 2_000_000, 8)
    with Shaper.of_folder(tmp_path / "set", FAR) as shaper:
        penstock.open(shaper.uri, store=shaper.options)
        assert shaper.counts().body_bytes <= 0.02 * total


def test_where_nothing_may_be_written_the_second_open_reads_no_object(
    tmp_path: Path,
) -> None:
    write_members(tmp_path / "set", 700, 100)
    with Shaper.of_folder(tmp_path / "set", FAR) as shaper:
        first = penstock.open(shaper.uri, store=shaper.options)
        before = shaper.counts().body_bytes
        second = penstock.open(shaper.uri, store=shaper.options)
        listed = shaper.counts().body_bytes - before
    assert not (tmp_path / "set" / ".penstock").exists(), "this server takes no writes"
    assert second.fingerprint == first.fingerprint
    assert listed < 5_000, "a listing, and no object"


def test_what_is_not_a_tier_is_refused(tmp_path: Path) -> None:
    write_members(tmp_path / "set", 700, 10)
    with Shaper.of_folder(tmp_path / "set") as shaper, pytest.raises(OptionError, match="a place"):
        penstock.open(shaper.uri, store=shaper.options, tiers=["/scratch"])  # type: ignore[list-item]
