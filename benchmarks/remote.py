"""The remote set: 4,096 samples of 110,000 bytes, in the format of each loader.

Samples are random bytes that begin with their number, so ids are seen at the far end of a loader.
It is written once for each format below `.peers/data/remote`; a store serves one such folder.
Shards and chunks are small enough that the smallest cache asked about holds several.
"""

import shutil
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np

from benchmarks import formats
from benchmarks.process import DATA
from benchmarks.works import SEED, Ragged, Work, write_ragged

WORK = Work(name="blobs", num_samples=4096, batch_size=256)
"""By name, blobs: what a batch looks like is the same."""
SAMPLE_BYTES = 110_000
SIZE_BYTES = WORK.num_samples * SAMPLE_BYTES
SAMPLES_A_SHARD = 128


def samples() -> Iterator[bytes]:
    for i in range(WORK.num_samples):
        rng = np.random.default_rng([SEED, i])
        yield i.to_bytes(8, "little") + rng.bytes(SAMPLE_BYTES - 8)


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


def write_shards(source: Ragged, folder: Path) -> None:
    for number, first in enumerate(range(0, WORK.num_samples, SAMPLES_A_SHARD)):
        with tarfile.open(shard_of(folder, number), "w", format=tarfile.USTAR_FORMAT) as shard:
            for i in range(first, min(first + SAMPLES_A_SHARD, WORK.num_samples)):
                [(name, data)] = formats.members_of(WORK, i, source[i].tobytes())
                member = tarfile.TarInfo(name)
                member.size = len(data)
                shard.addfile(member, BytesIO(data))


def shard_of(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05}.tar"


NUM_SHARDS = -(-WORK.num_samples // SAMPLES_A_SHARD)


def write_own(root: Path, format_name: str, folder: Path) -> None:
    """Write the source, or one of the formats that belong to nobody."""
    if format_name == "source":
        write_ragged(folder, samples())
    elif format_name == "files":
        formats.write_files(WORK, open_source(root), folder)
    else:
        write_shards(open_source(root), folder)


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
