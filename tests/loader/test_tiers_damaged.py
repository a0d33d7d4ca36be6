"""A tier is damaged by another process in mid-epoch: the stream stays right and the job lives.

Every case runs a loader in a child process, since a wrong answer may be its death. The child stops
in the middle of its second epoch, when all units lie in the tier; this process damages the tier's
files, and the child goes on. Its whole stream must have the hash of a run without tiers.
"""

import hashlib
import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock
from penstock import Disk, Memory
from penstock.testing.forks import start_child, wait_for

from .conftest import write_tar

BATCH = 20
STOP_AT = 1.5
"""The epoch in which the tier is damaged."""

Damage = Callable[[Path], None]


def large(folder: Path) -> penstock.Dataset:
    """Samples that are units of their own."""
    rng = np.random.default_rng(1)
    write_tar(folder / "x.tar", [{"bin": rng.bytes(70_000 + i)} for i in range(60)])
    return penstock.open(folder)


def packed(folder: Path) -> penstock.Dataset:
    """Samples with checksums in their index."""
    rng = np.random.default_rng(2)
    with penstock.Writer(folder) as writer:
        for i in range(60):
            writer.write({"bin": rng.bytes(70_000 + i), "cls": i})
    return penstock.open(folder)


def small(folder: Path) -> penstock.Dataset:
    """Samples of which a unit holds many."""
    rng = np.random.default_rng(3)
    samples = [{"bin": rng.bytes(int(rng.integers(1, 20_000)))} for i in range(400)]
    write_tar(folder / "x.tar", samples)
    return penstock.open(folder)


def rows(folder: Path) -> penstock.Dataset:
    """Rows of one width, which are gathered."""
    folder.mkdir()
    np.save(folder / "x.npy", np.random.default_rng(4).integers(0, 255, (40_000, 50), np.uint8))
    return penstock.open(folder)


def blocks(folder: Path) -> penstock.Dataset:
    """Samples that are unpacked from blocks."""
    folder.mkdir()
    numbers = np.random.default_rng(5).integers(0, 2**60, 10_000)
    table = pa.table({"a": numbers, "b": numbers[::-1]})
    pq.write_table(table, folder / "a.parquet", row_group_size=500, compression=None)
    return penstock.open(folder)


SETS = {make.__name__: make for make in (large, packed, small, rows, blocks)}
BATCHES = {"rows": 2000, "blocks": 1000}


def spoilt(path: Path) -> None:
    """Flip a bit in every 512 bytes of a file that are there."""
    with path.open("r+b") as file:
        data = np.frombuffer(bytearray(file.read()), np.uint8)
        data[7::512] ^= 4
        file.seek(0)
        file.write(data.tobytes())


def zeroed(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


def cut_off(path: Path) -> None:
    os.truncate(path, 0)


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def stream(
    dataset: penstock.Dataset,
    tiers: list[Any],
    batch_size: int,
    stop: Callable[[penstock.Loader], None] = lambda loader: None,
    stop_at: float = STOP_AT,
) -> tuple[str, penstock.Stats]:
    """Return a hash of all batches of three epochs, and what the loader counted."""
    digest = hashlib.sha256()
    options: dict[str, Any] = {"shuffle": "global", "epochs": 3, "output": "numpy", "threads": 2}
    with penstock.Loader(
        dataset, batch_size=batch_size, tiers=tiers, look_ahead="1MB", **options
    ) as loader:
        for number, batch in enumerate(loader):
            digest.update(batch.ids.tobytes())
            for name in sorted(batch):
                for value in batch[name]:
                    digest.update(np.ascontiguousarray(value).tobytes())
            if number == int(len(loader) / 3 * stop_at):
                stop(loader)
    return digest.hexdigest(), loader.stats()


def is_idle() -> bool:
    """Whether this process does nothing for a moment: its look-ahead is full."""
    before = time.process_time()
    time.sleep(0.1)
    return time.process_time() - before < 0.01


class Job:
    """A loader in a child process that waits in mid-epoch until the block ends."""

    def __init__(
        self,
        dataset: penstock.Dataset,
        tiers: list[Any],
        batch_size: int = BATCH,
        *,
        stop_at: float = STOP_AT,
    ) -> None:
        self._work = partial(stream, dataset, tiers, batch_size, stop_at=stop_at)
        self._expected, _ = stream(dataset, [], batch_size)
        self.said: list[str] = []
        """Warnings of the child."""

    def __enter__(self) -> Path:
        """Return the folder of the first tier."""
        told, telling = os.pipe()
        waiting, self._go = os.pipe()

        def stop(loader: penstock.Loader) -> None:
            # Large samples of a memory tier are copied from a map: not while its file is cut.
            while not is_idle():
                pass
            os.write(telling, loader.stats().tiers[0].folder.encode())
            os.read(waiting, 1)

        def work() -> tuple[str, penstock.Stats, list[str]]:
            said: list[str] = []
            handler = logging.Handler(logging.WARNING)
            handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
            logging.getLogger("penstock").addHandler(handler)
            return *self._work(stop), said

        self._child = start_child(work)
        folder = os.read(told, 4096).decode()
        for end in (told, telling, waiting):
            os.close(end)
        return Path(folder)

    def __exit__(self, *error: object) -> None:
        os.write(self._go, b"x")
        os.close(self._go)
        found, self.stats, self.said = wait_for(self._child)
        assert found == self._expected, f"not the stream of a run without tiers; {self.said}"


@pytest.fixture
def tier_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tier"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("kind", ["disk", "memory"])
@pytest.mark.parametrize("name", SETS)
def test_flipped_bytes_are_fetched_again(
    tmp_path: Path, tier_folder: Path, name: str, kind: str
) -> None:
    tier = Disk(tier_folder, "1GB") if kind == "disk" else Memory("1GB", folder=tier_folder)
    job = Job(SETS[name](tmp_path / "set"), [tier], BATCHES.get(name, BATCH))
    with job as folder:
        spoilt(folder / "data")
    # Blocks may all be unpacked by then, so that the tier is not read any more.
    assert job.stats.tiers[0].num_damaged > 0 or name == "blocks"
    if job.stats.tiers[0].num_damaged:
        (warning,) = job.said
        assert f"unit {warning.split()[1]} of the {kind} tier {folder}" in warning


@pytest.mark.parametrize("kind", ["disk", "memory"])
@pytest.mark.parametrize("name", ["large", "rows", "blocks"])
def test_files_that_are_cut_short_end_nothing(
    tmp_path: Path, tier_folder: Path, name: str, kind: str
) -> None:
    damage = cut_in_half if name == "large" else cut_off
    tier = Disk(tier_folder, "1GB") if kind == "disk" else Memory("1GB", folder=tier_folder)
    with Job(SETS[name](tmp_path / "set"), [tier], BATCHES.get(name, BATCH)) as folder:
        for file in ("data", "state", "sums", "cells"):
            damage(folder / file)


@pytest.mark.parametrize("file", ["state", "sums", "cells"])
@pytest.mark.parametrize("damage", [spoilt, zeroed, cut_off], ids=lambda f: f.__name__)
def test_a_damaged_record_of_a_tier_costs_a_fetch(
    tmp_path: Path, tier_folder: Path, damage: Damage, file: str
) -> None:
    with Job(small(tmp_path / "set"), [Disk(tier_folder, "1GB")]) as folder:
        damage(folder / file)


def test_states_that_claim_more_than_there_is(tmp_path: Path, tier_folder: Path) -> None:
    dataset = small(tmp_path / "set")
    with Job(dataset, [Disk(tier_folder, dataset.size_bytes // 3)]) as folder:
        data = bytearray((folder / "state").read_bytes())
        data[512:] = bytes([max(data[512:])]) * (len(data) - 512)
        with (folder / "state").open("r+b") as file:
            file.write(data)


def test_a_folder_that_is_removed(tmp_path: Path, tier_folder: Path) -> None:
    with Job(large(tmp_path / "set"), [Disk(tier_folder, 30 * 70_100)]) as folder:
        for path in sorted(folder.iterdir()):
            path.unlink()
        folder.rmdir()


def test_files_that_may_not_be_opened_any_more(tmp_path: Path, tier_folder: Path) -> None:
    with Job(large(tmp_path / "set"), [Disk(tier_folder, 30 * 70_100)]) as folder:
        for path in folder.iterdir():
            path.chmod(0)
        folder.chmod(0)


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Path]:
    """A file system that becomes read-only when it finds an error."""
    image, path = tmp_path / "image", tmp_path / "mounted"
    path.mkdir()
    with image.open("wb") as file:
        file.truncate(48 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", "-F", image], capture_output=True, check=False)
    mount = ["mount", "-o", "loop,errors=remount-ro", image, path]
    if made.returncode or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("NOT TESTED: only root can mount a file system")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def make_read_only(path: Path) -> None:
    """Let a file system believe that it has found an error."""
    found = subprocess.run(["findmnt", "-no", "SOURCE", path], capture_output=True, check=True)
    device = Path(found.stdout.decode().strip()).name
    Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("1")
    with pytest.raises(OSError, match="Read-only"):
        (path / "probe").touch()


@pytest.mark.parametrize("damage", [None, spoilt])
@pytest.mark.parametrize("stop_at", [0.4, 1.5], ids=["half-filled", "filled"])
def test_a_disk_that_becomes_read_only_ends_nothing(
    tmp_path: Path, ext4: Path, stop_at: float, damage: Damage | None
) -> None:
    job = Job(large(tmp_path / "set"), [Disk(ext4, "20MB")], stop_at=stop_at)
    with job as folder:
        if damage is not None:
            damage(folder / "data")
        make_read_only(ext4)
    assert len(job.said) <= 2, job.said
