"""Small data sets of every kind of addressing."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock

Make = Callable[[Path], penstock.Dataset]


def tar_of(sizes: Sequence[int], path: Path, first: int = 0) -> None:
    with tarfile.open(path, "w") as archive:
        for i, size in enumerate(sizes, first):
            member = tarfile.TarInfo(f"{i:06}.bin")
            member.size = int(size)
            data = np.random.default_rng(i).bytes(int(size))
            archive.addfile(member, io.BytesIO(data))


def small_tar(folder: Path) -> penstock.Dataset:
    for shard in range(3):
        sizes = np.random.default_rng(shard).integers(0, 9_000, 60)
        tar_of(sizes.tolist(), folder / f"{shard}.tar", shard * 60)
    return penstock.open(folder)


def mixed_tar(folder: Path) -> penstock.Dataset:
    for shard in range(2):
        sizes = np.random.default_rng(shard).choice([100, 5_000, 40_000, 65_536, 200_000], 40)
        tar_of(sizes.tolist(), folder / f"{shard}.tar", shard * 40)
    return penstock.open(folder)


def large_tar(folder: Path) -> penstock.Dataset:
    tar_of([70_000 + 1_000 * i for i in range(20)], folder / "a.tar")
    return penstock.open(folder)


def two_tables(folder: Path) -> penstock.Dataset:
    random = np.random.default_rng(1)
    np.save(folder / "x.npy", random.integers(0, 255, (400, 1_500), np.uint8))
    np.save(folder / "y.npy", np.arange(400))
    return penstock.open(folder, fields={"x": "x.npy", "y": "y.npy"})


def large_rows(folder: Path) -> penstock.Dataset:
    np.save(folder / "x.npy", np.random.default_rng(1).integers(0, 255, (12, 70_000), np.uint8))
    return penstock.open(folder)


def parquet(folder: Path) -> penstock.Dataset:
    for shard in range(2):
        table = pa.table({"text": [f"row {i} of {shard} " * 20 for i in range(100)]})
        pq.write_table(table, folder / f"{shard}.parquet", row_group_size=15)
    return penstock.open(folder)


def files(folder: Path) -> penstock.Dataset:
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        for i in range(15):
            (folder / name / f"{i:02}.dat").write_bytes(bytes([i]) * (i * 7_000))
    return penstock.open(folder)


def several_parts(folder: Path) -> penstock.Dataset:
    from penstock.dataset.open import look_up, write_index

    for shard in range(3):
        tar_of([3_000 + i for i in range(70)], folder / f"{shard}.tar", shard * 70)
        write_index(look_up(folder))
    dataset = penstock.open(folder)
    assert len(dataset.bound) == 3
    return dataset


MAKERS: dict[str, Make] = {
    make.__name__: make
    for make in (
        small_tar,
        mixed_tar,
        large_tar,
        two_tables,
        large_rows,
        parquet,
        files,
        several_parts,
    )
}


@pytest.fixture(scope="session")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, penstock.Dataset]:
    out = {}
    for name, make in MAKERS.items():
        folder = tmp_path_factory.mktemp(name) / "set"
        folder.mkdir()
        out[name] = make(folder)
    return out
