"""Probes that take no time, and data to point them at."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from penstock.simulate.probe import Effort

TINY = Effort(
    copy_s=0.02,
    memory_s=0.03,
    disk_s=0.05,
    store_s=0.1,
    decode_s=0.03,
    repeats=2,
    working_set_bytes=4 << 20,
    file_bytes_max=4 << 20,
    store_bytes_max=8 << 20,
    in_flight_max=8,
)


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """An empty folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two tar shards of 40 samples each, between 2 and 150 kB, with a number to decode."""
    folder = tmp_path / "shards"
    folder.mkdir()
    generator = np.random.default_rng(3)
    for shard in range(2):
        with tarfile.open(folder / f"x-{shard}.tar", "w") as archive:
            for i in range(40):
                blob = generator.bytes(2_000 if i % 2 else 150_000)
                for extension, data in (("bin", blob), ("cls", str(i).encode())):
                    member = tarfile.TarInfo(f"{shard * 40 + i:05}.{extension}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    return folder
