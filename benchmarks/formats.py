"""Formats that belong to nobody: the source itself, a file for each sample, shards in tar.

Shards are what `tar` would write: names in order, `000017.jpg` beside `000017.cls`.
"""

import io
import tarfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks.works import Ragged, Work, write_source

FILES_PER_FOLDER = 256
SHARD_BYTES = 128_000_000
SUFFIX = {"tokens": "bin", "blobs": "bin", "jpeg": "jpg"}


def write(work: Work, source: np.ndarray | Ragged | None, folder: Path, name: str) -> None:
    """Write one of the shared formats; only the source is made from nothing."""
    if name == "source":
        write_source(work, folder)
    elif name == "files":
        write_files(work, source, folder)
    else:
        write_tar(work, source, folder)


def file_of(work: Work, folder: Path, i: int) -> Path:
    return folder / f"{i // FILES_PER_FOLDER:04}" / f"{i:06}.{SUFFIX[work.name]}"


def write_files(work: Work, source: np.ndarray | Ragged, folder: Path) -> None:
    for i in range(work.num_samples):
        path = file_of(work, folder, i)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(source[i].tobytes())


def write_tar(work: Work, source: np.ndarray | Ragged, folder: Path) -> None:
    i = 0
    for number in count():
        with tarfile.open(
            folder / f"shard-{number:05}.tar", "w", format=tarfile.USTAR_FORMAT
        ) as out:
            while out.offset < SHARD_BYTES and i < work.num_samples:
                for member, data in members_of(work, i, source[i].tobytes()):
                    info = tarfile.TarInfo(member)
                    info.size = len(data)
                    out.addfile(info, io.BytesIO(data))
                i += 1
        if i == work.num_samples:
            return


def members_of(work: Work, i: int, data: bytes) -> Iterator[tuple[str, bytes]]:
    if work.has_label:
        yield f"{i:06}.cls", str(i).encode()
    yield f"{i:06}.{SUFFIX[work.name]}", data


def shards_in(folder: Path) -> list[str]:
    return [str(path) for path in sorted(folder.glob("*.tar"))]
