"""Tiers: each byte is fetched once, and what comes out is what went in."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from testkit.shaper import Fixed, Shape, Shaper

import penstock
from penstock import Disk, Memory
from penstock.errors import CorruptError, OptionError

from .conftest import MakeRows, write_tar

BLOB_BYTES = 70_000
NUM_BLOBS = 96


@pytest.fixture(autouse=True)
def tier_folder(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()


@pytest.fixture
def large(tmp_path: Path) -> penstock.Dataset:
    """96 samples of 70 kB in three tars: units of their own."""
    for shard in range(3):
        numbers = range(shard * 32, shard * 32 + 32)
        samples = [{"bin": bytes([i]) * BLOB_BYTES} for i in numbers]
        write_tar(tmp_path / "large" / f"x-{shard}.tar", samples, shard * 32)
    return penstock.open(tmp_path / "large")


def is_once(fetched_bytes: int, size_bytes: int) -> bool:
    """Whether all was fetched once, and between neighbours the headers of a tar."""
    return size_bytes <= fetched_bytes < size_bytes + size_bytes // BLOB_BYTES * 1024


def run(dataset: Any, tiers: Any, **options: Any) -> tuple[list[int], penstock.Stats]:
    """Go through all epochs, looking at every byte."""
    options = {"batch_size": 16, "epochs": 3, "output": "numpy"} | options
    ids: list[int] = []
    with penstock.Loader(dataset, tiers=tiers, **options) as loader:
        for batch in loader:
            for i, value in zip(batch.ids.tolist(), batch["bin"], strict=True):
                assert len(value) == BLOB_BYTES
                assert (value == i).all()
            ids += batch.ids[batch.mask].tolist()
    return ids, loader.stats()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 0.9, 1.0, 1.5])
def test_the_store_is_read_as_often_as_it_must_be(
    large: penstock.Dataset, tmp_path: Path, share: float
) -> None:
    tier = Disk(tmp_path / "tier", int(share * large.size_bytes) or 1)
    ids, stats = run(large, [tier])
    assert sorted(ids) == sorted([*range(NUM_BLOBS)] * 3)
    assert stats.bound_bytes is not None
    held = sum(t.held_bytes for t in stats.tiers)
    assert held <= share * large.size_bytes + 1
    # The bound, but for one unit that did not fit and the small gaps between neighbours.
    assert stats.store_bytes <= stats.bound_bytes + 2 * BLOB_BYTES + 3 * NUM_BLOBS * 1024
    assert stats.store_bytes >= large.size_bytes + 2 * max(0, large.size_bytes - held)


def test_two_tiers_hold_different_bytes(large: penstock.Dataset, tmp_path: Path) -> None:
    half = large.size_bytes // 2
    _, stats = run(large, [Memory(half), Disk(tmp_path / "tier", half + BLOB_BYTES)])
    assert is_once(stats.store_bytes, large.size_bytes)
    memory, disk = stats.tiers
    assert memory.held_bytes + disk.held_bytes == large.size_bytes
    assert stats.sources["tier:memory"].size_bytes == 3 * memory.held_bytes
    assert stats.sources["tier:disk"].size_bytes == 3 * disk.held_bytes
    assert not Path(memory.folder).exists(), "the last user takes a memory tier away"
    assert Path(disk.folder).exists()


def test_a_second_run_finds_what_the_first_one_left(
    large: penstock.Dataset, tmp_path: Path
) -> None:
    tier = Disk(tmp_path / "tier", "1GB")
    run(large, [tier], epochs=1)
    ids, stats = run(large, [tier], epochs=1)
    assert sorted(ids) == [*range(NUM_BLOBS)]
    assert stats.store_bytes == 0
    assert stats.bound_bytes == 0


def test_what_was_damaged_meanwhile_is_fetched_again(
    large: penstock.Dataset, tmp_path: Path
) -> None:
    tier = Disk(tmp_path / "tier", "1GB")
    _, stats = run(large, [tier], epochs=1)
    data = Path(stats.tiers[0].folder) / "data"
    with data.open("r+b") as file:
        file.seek(5 * BLOB_BYTES + 17)
        file.write(b"\xff\xfe")
    _, stats = run(large, [tier], epochs=1)
    assert stats.store_bytes == BLOB_BYTES


def test_a_larger_memory_tier_takes_over_from_the_disk(
    large: penstock.Dataset, tmp_path: Path
) -> None:
    disk = Disk(tmp_path / "tier", "1GB")
    run(large, [disk], epochs=1)
    _, stats = run(large, [Memory(large.size_bytes // 2), disk], epochs=1)
    assert stats.store_bytes == 0
    assert stats.tiers[0].held_bytes > 0


def test_a_folder_that_is_not_there_is_a_mistake(large: penstock.Dataset, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"nowhere does not exist.*make the folder"):
        run(large, [Disk(tmp_path / "nowhere", "1GB")])


@pytest.mark.parametrize("tiers", ["8GB", ["8GB"], None, 8, [Memory("1GB"), "/scratch"]])
def test_tiers_that_are_none_are_a_mistake(large: penstock.Dataset, tiers: Any) -> None:
    with pytest.raises(OptionError, match=r"a tier is a place and a size"):
        penstock.Loader(large, batch_size=4, tiers=tiers)


def test_a_loader_that_nobody_holds_keeps_its_tiers_open(
    large: penstock.Dataset, tmp_path: Path
) -> None:
    batches = iter(
        penstock.Loader(large, batch_size=16, tiers=[Memory(large.size_bytes)], output="numpy")
    )
    for batch in batches:
        for i, value in zip(batch.ids.tolist(), batch["bin"], strict=True):
            assert (value == i).all()


def test_a_stopped_job_delays_another_once(large: penstock.Dataset, tmp_path: Path) -> None:
    # It is stopped while it holds claims: the store answers it slowly.
    with Shaper.of_folder(tmp_path / "large", Shape(latency=Fixed(0.5))) as shaper:
        code = (
            "import sys, penstock\n"
            "from penstock.storage.options import StoreOptions\n"
            f"dataset = penstock.open({shaper.uri!r}, store={shaper.options!r}, check=False)\n"
            f"tier = penstock.Disk({str(tmp_path / 'tier')!r}, '1GB')\n"
            "loader = penstock.Loader(dataset, batch_size=96, tiers=[tier])\n"
            "batches = iter(loader)\n"
            "print('x', flush=True)\n"
            "next(batches)\n"
        )
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.read(1) == "x"
        before = shaper.counts().requests
        while shaper.counts().requests - before < 2:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGSTOP)
        try:
            begin = time.monotonic()
            _, stats = run(large, [Disk(tmp_path / "tier", "1GB")], epochs=1)
            assert stats.samples == NUM_BLOBS
            assert time.monotonic() - begin < 20, "one wait of two seconds, not one for each unit"
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def test_small_samples_are_kept_in_runs(blobs: penstock.Dataset, tmp_path: Path) -> None:
    with penstock.Loader(
        blobs, batch_size=30, epochs=2, tiers=[Disk(tmp_path / "tier", "1GB")], output="numpy"
    ) as loader:
        for batch in loader:
            for i, value, number in zip(batch.ids, batch["bin"], batch["cls"], strict=True):
                assert int(bytes(number)) if isinstance(number, memoryview) else number == i
                assert len(value) == 1000 + i
    stats = loader.stats()
    folder = stats.sources["folder"]
    assert folder.requests < 30, "runs of some hundred kilobytes, not one for each of 300 samples"
    assert folder.size_bytes < 1.6 * blobs.size_bytes, "the headers of a tar are as large as these"


def test_rows_are_gathered_from_a_tier(make_rows: MakeRows, tmp_path: Path) -> None:
    dataset = make_rows(10_000)
    with penstock.Loader(
        dataset, batch_size=100, epochs=2, tiers=[Disk(tmp_path / "tier", "1GB")], output="numpy"
    ) as loader:
        for batch in loader:
            assert (batch["data"][:, 0] == batch.ids * 16).all()
            assert (batch["data"][:, 15] == batch.ids * 16 + 15).all()
    assert loader.stats().store_bytes == dataset.size_bytes


def test_two_arrays_side_by_side(tmp_path: Path) -> None:
    folder = tmp_path / "pair"
    folder.mkdir()
    np.save(folder / "x.npy", np.arange(5000 * 8, dtype=np.int16).reshape(5000, 8))
    np.save(folder / "y.npy", np.arange(5000, dtype=np.int64))
    dataset = penstock.open(folder, fields={"x": "x.npy", "y": "y.npy"})
    # Room for a part of it only: some samples have one array in the tier and the other not.
    tier = Disk(tmp_path / "tier", dataset.size_bytes // 3)
    with penstock.Loader(dataset, batch_size=64, epochs=2, tiers=[tier], output="numpy") as loader:
        for batch in loader:
            assert (batch["y"] == batch.ids).all()
            assert (batch["x"][:, 0] == (batch.ids * 8).astype(np.int16)).all()


def test_a_view_fills_only_its_own_samples(large: penstock.Dataset, tmp_path: Path) -> None:
    view = large.select([3, 50, 95, 4, 17])
    with penstock.Loader(
        view, batch_size=5, epochs=4, tiers=[Disk(tmp_path / "tier", "1GB")], output="numpy"
    ) as loader:
        for batch in loader:
            base = view.base_ids(batch.ids)
            assert [int(v[0]) for v in batch["bin"]] == base.tolist()
    assert is_once(loader.stats().store_bytes, 5 * BLOB_BYTES)


def test_worker_processes_read_from_the_tier(large: penstock.Dataset, tmp_path: Path) -> None:
    tier = Disk(tmp_path / "tier", "1GB")
    options: dict[str, Any] = {"batch_size": 24, "epochs": 2, "workers": 2}
    with penstock.Loader(large, tiers=[tier], transform=first_byte, **options) as loader:
        for batch in loader:
            assert batch["first"].tolist() == batch.ids.tolist()
    stats = loader.stats()
    assert is_once(stats.store_bytes, large.size_bytes)
    assert stats.sources["tier:disk"].size_bytes == 2 * large.size_bytes


def first_byte(sample: dict[str, Any]) -> dict[str, int]:
    return {"first": sample["bin"][0]}


def test_a_mixture_has_tiers_too(large: penstock.Dataset, tmp_path: Path) -> None:
    mixture = penstock.Mixture([large[:32], large[32:]], [0.5, 0.5])
    _, stats = run(mixture, [Disk(tmp_path / "tier", "1GB")], epochs=2)
    # As many draws as two epochs have. One that comes again soon may find the first not yet kept.
    assert stats.samples == 2 * NUM_BLOBS
    assert stats.store_bytes < 1.5 * large.size_bytes
    assert stats.bound_bytes is None, "a mixture does not see every sample once an epoch"


def test_what_a_mixture_uses_more_often_is_kept_first(
    large: penstock.Dataset, tmp_path: Path
) -> None:
    rare, often = large[:64], large[64:]
    mixture = penstock.Mixture([rare, often], [0.1, 0.9])
    _, stats = run(mixture, [Disk(tmp_path / "tier", 32 * BLOB_BYTES)], epochs=2)
    # Only the rare ones are read from the store again and again.
    assert is_once(stats.store_bytes - round(0.1 * stats.samples) * BLOB_BYTES, 32 * BLOB_BYTES)


RANK = """
import sys
import penstock
from penstock.storage.tier_sizes import Disk
folder, tier, rank, num_ranks = sys.argv[1:]
world = penstock.World(rank=int(rank), num_ranks=int(num_ranks))
dataset = penstock.open(folder)
with penstock.Loader(
    dataset, batch_size=4, epochs=2, world=world, tiers=[Disk(tier, "1GB")], output="numpy"
) as loader:
    for batch in loader:
        for i, value in zip(batch.ids, batch["bin"]):
            assert (value == i).all()
print(loader.stats().store_bytes)
"""


def start_rank(folder: Path, tier: Path, rank: int, num_ranks: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", RANK, str(folder), str(tier), str(rank), str(num_ranks)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def test_ranks_and_jobs_fetch_each_byte_once_between_them(
    large: penstock.Dataset, tmp_path: Path
) -> None:
    # Two ranks of one job, and another job on the same data at the same time.
    started = [
        start_rank(tmp_path / "large", tmp_path / "tier", rank, num_ranks)
        for rank, num_ranks in ((0, 2), (1, 2), (0, 1))
    ]
    fetched = [int(process.communicate(timeout=60)[0]) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert is_once(sum(fetched), large.size_bytes)


@pytest.mark.parametrize("after", [1, 7, 20])
def test_killed_in_the_middle_the_next_run_goes_on_with_what_is_there(
    large: penstock.Dataset, tmp_path: Path, after: int
) -> None:
    code = RANK.replace(
        "for i, value",
        f"if batch.step == {after}: sys.stdout.write('x'); "
        "sys.stdout.flush(); __import__('time').sleep(60)\n        for i, value",
    )
    words = [sys.executable, "-c", code, str(tmp_path / "large"), str(tmp_path / "tier"), "0", "1"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.read(1) == "x"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    ids, stats = run(large, [Disk(tmp_path / "tier", "1GB")], epochs=1)
    assert sorted(ids) == [*range(NUM_BLOBS)]
    assert stats.store_bytes <= large.size_bytes - after * 4 * (BLOB_BYTES - 1024)


def test_a_store_that_lies_is_found_out(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    with penstock.Writer(folder) as writer:
        for i in range(8):
            writer.write({"bin": bytes([i]) * BLOB_BYTES})
    shard = next(folder.glob("*.tar"))
    data = bytearray(shard.read_bytes())
    at = data.index(bytes([3]) * 1000)
    data[at + 500] ^= 1
    times = shard.stat()
    shard.write_bytes(data)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    dataset = penstock.open(folder)
    with pytest.raises(CorruptError, match=r"sample 3.*checksum.*penstock verify"):
        run(dataset, [Disk(tmp_path / "tier", "1GB")], batch_size=8)


def test_blocks_first_is_blocks_and_then_global(large: penstock.Dataset, tmp_path: Path) -> None:
    tier = Disk(tmp_path / "tier", "1GB")
    ids, stats = run(large, [tier], shuffle="blocks-first", epochs=2)
    blocks, _ = run(large, [tier], shuffle="blocks", epochs=1)
    uniform, _ = run(large, [tier], shuffle="global", epochs=2)
    assert ids[:NUM_BLOBS] == blocks
    assert ids[NUM_BLOBS:] == uniform[NUM_BLOBS:]
    assert is_once(stats.store_bytes, large.size_bytes)
