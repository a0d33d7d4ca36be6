"""Tiny data sets on disk, in the shapes that a loader treats differently."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import penstock


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)


_ABOUT_LATE_REQUESTS = ("test_deadlines", "test_rough_weather")


@pytest.fixture(autouse=True)
def no_copies_of_late_requests(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine makes requests late; what is counted must not depend on it."""
    if request.module.__name__.rpartition(".")[2] not in _ABOUT_LATE_REQUESTS:
        monkeypatch.setattr("penstock.flow.source.TOKENS_FIRST", 0.0)
        monkeypatch.setattr("penstock.flow.flow.TOKEN_SHARE", 0.0)
        monkeypatch.setattr("penstock.flow.hedge.WAITED_S", float("inf"))


def write_tar(path: Path, samples: list[dict[str, bytes]], first: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for i, sample in enumerate(samples):
            for extension, data in sample.items():
                member = tarfile.TarInfo(f"{first + i:06}.{extension}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


MakeRows = Callable[[int], penstock.Dataset]


@pytest.fixture
def make_rows(tmp_path: Path) -> MakeRows:
    """Rows of an array: row i is 16 numbers from i * 16 on."""

    def make(num_samples: int) -> penstock.Dataset:
        folder = tmp_path / f"rows-{num_samples}"
        folder.mkdir()
        rows = np.arange(num_samples * 16, dtype=np.int32).reshape(num_samples, 16)
        np.save(folder / "rows.npy", rows)
        return penstock.open(folder)

    return make


@pytest.fixture
def blobs(tmp_path: Path) -> penstock.Dataset:
    """300 samples in three tars: a blob whose length and content tell its number, and the
    number."""
    for shard in range(3):
        numbers = range(shard * 100, shard * 100 + 100)
        samples = [{"bin": bytes([i % 251]) * (1000 + i), "cls": str(i).encode()} for i in numbers]
        write_tar(tmp_path / "blobs" / f"x-{shard:03}.tar", samples, shard * 100)
    return penstock.open(tmp_path / "blobs")


@pytest.fixture
def meeting_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ranks without a process group find each other."""
    monkeypatch.setenv("PENSTOCK_RENDEZVOUS", str(tmp_path / "meet"))
    return tmp_path / "meet"
