"""The remote set: 4,096 samples of 110,000 bytes and a label, in the format of each loader.

The label is a sample's number, so ids are seen at the far end of a loader. The set is written once
for each format below `.peers`; a store serves one such folder. Shards and chunks are small enough
that the smallest cache asked about holds several.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks import formats
from benchmarks.process import DATA
from benchmarks.works import SEED, Ragged, Work, write_ragged

WORK = Work(name="blobs", num_samples=4096, batch_size=256)
"""By name, blobs: what a batch looks like is the same."""
SAMPLE_BYTES = 110_000
SIZE_BYTES = WORK.num_samples * SAMPLE_BYTES
NUM_SHARDS = 32
SHARD_BYTES = WORK.num_samples // NUM_SHARDS * (SAMPLE_BYTES // 512 + 4) * 512
"""In tar: two headers, and both fields in blocks of 512 bytes."""


def samples() -> Iterator[bytes]:
    for i in range(WORK.num_samples):
        rng = np.random.default_rng([SEED, i])
        yield rng.bytes(SAMPLE_BYTES)


def folder_of(root: Path, format_name: str) -> Path:
    return root / DATA / "remote" / format_name


def files_bytes(folder: Path) -> int:
    """Return what the files below a folder take, holes left out; they may vanish meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512 if path.is_file() else 0
        except OSError:
            continue
    return total


def stored_bytes(root: Path, format_name: str) -> int:
    """Return how large the set is in one format."""
    folder = folder_of(root, format_name)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_own(root: Path, format_name: str, folder: Path) -> None:
    """Write the source, or one of the formats that belong to nobody."""
    if format_name == "source":
        write_ragged(folder, samples())
    elif format_name == "files":
        formats.write_files(WORK, open_source(root), folder)
    else:
        source = open_source(root)
        blobs = (source[i].tobytes() for i in range(len(source)))
        formats.write_shards(folder, formats.labelled("bin", blobs), shard_bytes=SHARD_BYTES)


def open_source(root: Path) -> Ragged:
    return Ragged(folder_of(root, "source"))


class Writing:
    """A folder that gets its name when all of it is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.partial = folder.with_name(f"{folder.name}.partial")

    def __enter__(self) -> Path:
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        return self.partial

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.partial.rename(self.folder)
