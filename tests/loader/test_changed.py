"""Objects that change under a running job: the indexed bytes or an error, never other bytes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.loader.conftest import write_tar

import penstock
from penstock.dataset.pack import PackOptions, pack
from penstock.errors import ChangedError, CorruptError
from penstock.storage.locate import open_store

if TYPE_CHECKING:
    from tests.conftest import Bucket

NUM_SAMPLES = 200
BLOB_BYTES = 3000


def blob(i: int) -> bytes:
    return bytes([i]) * BLOB_BYTES


def blob_shards(folder: Path) -> Path:
    for shard in range(2):
        numbers = range(shard * 100, shard * 100 + 100)
        write_tar(folder / f"{shard}.tar", [{"bin": blob(i)} for i in numbers], shard * 100)
    return folder


def other_shard(path: Path, num_samples: int) -> bytes:
    """Return a shard with other samples in the place of the indexed ones."""
    write_tar(path, [{"bin": bytes([255]) * BLOB_BYTES} for _ in range(num_samples)])
    return path.read_bytes()


def deliver(dataset: penstock.Dataset, change: Callable[[], object], **options: Any) -> None:
    """Check every sample that is delivered; make the change after the first batch."""
    with penstock.Loader(
        dataset, batch_size=4, epochs=4, output="numpy", look_ahead="30KB", **options
    ) as loader:
        for number, batch in enumerate(loader):
            for i, value in zip(batch.ids.tolist(), next(iter(batch.values())), strict=True):
                assert bytes(value) == blob(i), f"batch {number}: wrong bytes for sample {i}"
            if number == 0:
                change()


@pytest.mark.parametrize("num_samples", [100, 150], ids=["as long", "longer"])
@pytest.mark.parametrize("way", ["global", "blocks", "tier", "process", "sample"])
def test_an_object_that_is_replaced_in_mid_run_is_an_error_at_the_first_byte(
    s3: Bucket, tmp_path: Path, way: str, num_samples: int
) -> None:
    store = open_store(s3.uri, s3.options)
    for path in sorted(blob_shards(tmp_path / "plain").iterdir()):
        store.write(path.name, path.read_bytes())
    dataset = penstock.open(s3.uri, store=s3.options)

    def change() -> None:
        for name in ("0.tar", "1.tar"):
            store.write(name, other_shard(tmp_path / "other.tar", num_samples))

    with pytest.raises(ChangedError, match=r"\d\.tar is not the object that was indexed.*rebuild"):
        if way == "sample":
            assert dataset[7]["bin"] == blob(7)
            change()
            dataset[8]
        else:
            (tmp_path / "tier").mkdir()
            tiers = [penstock.Disk(tmp_path / "tier", "300KB")] if way == "tier" else []
            order = {"shuffle": "blocks"} if way == "blocks" else {}
            workers = {"workers": 1} if way == "process" else {}
            if way == "blocks":  # One block is the whole set: it is read once.
                change()
            deliver(dataset, change, tiers=tiers, **order, **workers)


def test_an_object_that_changes_while_it_is_indexed_is_noticed(
    s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(s3.uri, s3.options)
    store.write("0.tar", (blob_shards(tmp_path / "plain") / "0.tar").read_bytes())
    listing = type(store.inner).list  # type: ignore[attr-defined]

    def list_and_change(self: Any, prefix: str = "") -> Any:
        yield from list(listing(self, prefix))
        if prefix == "":
            store.write("0.tar", other_shard(tmp_path / "other.tar", 100))

    monkeypatch.setattr(type(store.inner), "list", list_and_change)  # type: ignore[attr-defined]
    with pytest.raises(ChangedError, match=r"0\.tar is not the object that was indexed"):
        penstock.open(s3.uri, store=s3.options)


def rewrite(path: Path) -> None:
    """Change bytes of a file and nothing else that can be seen but its time."""
    size_bytes = path.stat().st_size
    before_ns = path.stat().st_mtime_ns
    while path.stat().st_mtime_ns == before_ns:  # the clock of a file system ticks slowly
        with path.open("r+b") as file:
            for offset in range(0, size_bytes, 512):
                file.seek(offset)
                file.write(b"\xff")


KINDS: dict[str, Callable[[Path], object]] = {}


def kind(name: str) -> Callable[[Callable[[Path], object]], Callable[[Path], object]]:
    return lambda make: KINDS.setdefault(name, make)


@kind("tar")
def _tar(folder: Path) -> None:
    blob_shards(folder)


@kind("packed")
def _packed(folder: Path) -> None:
    pack(blob_shards(folder.parent / "plain"), folder, PackOptions(shard_size="100KB"))


@kind("files")
def _files(folder: Path) -> None:
    folder.mkdir()
    for i in range(NUM_SAMPLES):
        (folder / f"{i:04}.dat").write_bytes(blob(i))


@kind("rows")
def _rows(folder: Path) -> None:
    folder.mkdir()
    numbers = np.arange(NUM_SAMPLES, dtype=np.uint8)
    np.save(folder / "bin.npy", np.repeat(numbers[:, None], BLOB_BYTES, axis=1))


@kind("parquet")
def _parquet(folder: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    folder.mkdir()
    table = pa.table({"bin": [blob(i) for i in range(NUM_SAMPLES)]})
    pq.write_table(table, folder / "x.parquet", row_group_size=10, compression="none")


def data_files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file() and ".penstock" not in p.parts]


@pytest.mark.parametrize("open_max", [256, 1], ids=["mapped", "read"])
@pytest.mark.parametrize("made", KINDS)
def test_a_local_file_that_is_rewritten_at_the_same_size_is_an_error(
    tmp_path: Path, made: str, open_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engine.reads.OPEN_MIN", open_max)
    monkeypatch.setattr("penstock.engine.reads._OPEN_SHARE", 10**9)
    KINDS[made](tmp_path / "set")
    dataset = penstock.open(tmp_path / "set")
    assert bytes(next(iter(dataset[3].values()))) == blob(3)

    def change() -> None:
        for path in data_files(tmp_path / "set"):
            rewrite(path)

    if made == "parquet":  # Blocks are read once and stay: it may have read all of them.
        change()
    with pytest.raises(ChangedError, match=r"is not the object that was indexed: (\d+) bytes.*\1"):
        deliver(dataset, change, shuffle="global")
    with pytest.raises(ChangedError, match="is not the object that was indexed"):
        dataset[154]


def test_a_local_file_that_is_replaced_by_name_is_an_error_or_read_as_it_was(
    tmp_path: Path,
) -> None:
    """Whoever holds the old file reads the old bytes; whoever opens the name sees the new file."""
    folder = blob_shards(tmp_path / "set")
    dataset = penstock.open(folder)

    def change() -> None:
        for name in ("0.tar", "1.tar"):
            other_shard(tmp_path / "other.tar", 100)
            (tmp_path / "other.tar").rename(folder / name)

    deliver(dataset, change)
    with pytest.raises(ChangedError, match="is not the object that was indexed"):
        dataset[154]


@pytest.mark.parametrize("made", ["packed", "packed rows"])
def test_a_loader_compares_local_samples_with_their_checksums(tmp_path: Path, made: str) -> None:
    folder = tmp_path / "set"
    if made == "packed rows":
        _rows(tmp_path / "rows")
        pack(tmp_path / "rows", folder, PackOptions(format="npy", shard_size="100KB"))
    else:
        _packed(folder)
    deliver(penstock.open(folder), lambda: None)
    dataset = penstock.open(folder)
    path = max(data_files(folder))
    status = path.stat()
    with path.open("r+b") as file:  # in the middle of its samples, without a trace in its time
        file.seek(status.st_size // 2)
        file.write(b"\xff")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(CorruptError, match=r"sample \d+ .*checksum.*restore it"):
        deliver(dataset, lambda: None)


def test_a_copy_of_a_set_is_read_by_its_size_where_marks_are_of_another_kind(
    s3: Bucket, tmp_path: Path
) -> None:
    """Times of a folder say nothing about a bucket's objects, and etags nothing about files."""
    folder = blob_shards(tmp_path / "set")
    in_folder = penstock.open(folder)
    store = open_store(s3.uri, s3.options)
    for path in data_files(folder):
        store.write(path.name, path.read_bytes())
    for part in in_folder.parts:
        for number in range(part.tables[0].num_objects):
            info = part.tables[0].info(number)
            assert (
                store.read_range(info, 512, 9)
                == memoryview(folder.joinpath(info.key).read_bytes())[512:521]
            )
    in_bucket = penstock.open(s3.uri, store=s3.options)
    local = open_store(shutil.copytree(folder, tmp_path / "copy"))
    info = in_bucket.parts[0].tables[0].info(0)
    assert info.etag
    assert local.read_range(info, 512, 9) == store.read_range(info, 512, 9)
