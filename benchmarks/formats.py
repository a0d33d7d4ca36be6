"""Formats that belong to nobody: the source itself, a file for each sample, shards in tar.

Shards are what `tar` would write: names in order, `000017.jpg` beside `000017.cls`.
"""

import io
import tarfile
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks.works import Ragged, Work, write_source

FILES_PER_FOLDER = 256
SHARD_BYTES = 128_000_000
Fields = dict[str, bytes]
"""A sample: the ending of each of its files, and what is in it."""
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
    kind, blobs = SUFFIX[work.name], (source[i].tobytes() for i in range(len(source)))
    write_shards(folder, labelled(kind, blobs) if work.has_label else ({kind: b} for b in blobs))


def labelled(kind: str, blobs: Iterable[bytes], num_labels: int = 10**6) -> Iterator[Fields]:
    """Yield samples of a blob and a label: their number, modulo that of labels."""
    for i, blob in enumerate(blobs):
        yield {"cls": b"%d" % (i % num_labels), kind: blob}


def write_shards(
    folder: Path, samples: Iterable[Fields], *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write samples into shards that are closed when they have a size."""
    folder.mkdir(exist_ok=True)
    numbered = enumerate(samples)
    item = next(numbered, None)
    for shard in count():
        path = folder / f"shard-{shard:05}.tar"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as out:
            while item is not None and out.offset < shard_bytes:
                i, fields = item
                for kind, data in fields.items():
                    member = tarfile.TarInfo(f"{i:06}.{kind}")
                    member.size = len(data)
                    out.addfile(member, io.BytesIO(data))
                item = next(numbered, None)
        if item is None:
            return


def shards_in(folder: Path) -> list[str]:
    return [str(path) for path in sorted(folder.glob("*.tar"))]
