"""Subjects that are files: data sets of every format, indexes, and sets with checksums."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import xxhash

import penstock
from penstock.errors import PenstockError
from testkit.fuzz.mutate import mutated, overwritten
from testkit.fuzz.subjects import Subject, WrongDataError

FIXTURES = Path(__file__).parents[2] / "tests" / "dataset" / "formats" / "fixtures"
SAMPLES_MAX = 64
"""Read one by one of what an input claims to hold."""


def digest_of(value: Any) -> str:
    """Return a hash of a decoded value, whatever it is."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{xxhash.xxh3_64_hexdigest(value.tobytes())}"
    if isinstance(value, dict):
        return str({name: digest_of(each) for name, each in value.items()})
    if isinstance(value, list | tuple):
        return str([digest_of(each) for each in value])
    return repr(bytes(value)) if isinstance(value, memoryview | bytearray) else repr(value)


def values_of(folder: Path) -> list[str]:
    """Open a set and read it, one by one and by a loader; return a digest of each sample."""
    dataset = penstock.open(folder)
    one_by_one = [digest_of(dataset[i]) for i in range(min(len(dataset), SAMPLES_MAX))]
    dataset.key(0)
    if len(dataset) <= SAMPLES_MAX:
        options: dict[str, Any] = {"shuffle": None, "output": "numpy", "threads": 1}
        with penstock.Loader(dataset, batch_size=4, collate=list, **options) as loader:
            in_batches = [digest_of(sample) for batch in loader for sample in batch]
        # The last batch is filled up.
        if in_batches[: len(one_by_one)] != one_by_one:
            raise WrongDataError("a loader reads other values than the data set")
    return one_by_one


def verified_values_of(folder: Path) -> list[str]:
    """Index, verify and pack a set; then read it if `verify` has found nothing wrong.

    Neither `verify` nor `pack` may die of what the set holds, and what `verify` approves is read.
    """
    report = penstock.verify(folder)
    try:
        penstock.pack(folder, folder.parent / "packed", penstock.PackOptions(limit=SAMPLES_MAX))
    except PenstockError:
        shutil.rmtree(folder.parent / "packed", ignore_errors=True)
    if not report.ok:
        return []
    try:
        return values_of(folder)
    except PenstockError as error:
        raise WrongDataError(f"verify found nothing wrong, reading did: {error}") from error


class Files:
    """A folder of which one file is damaged."""

    def __init__(
        self,
        name: str,
        make: Callable[[Path], None],
        *,
        damage: Callable[[Random, bytes], bytes] = mutated,
        which: str = "**/*",
        is_exact: bool = False,
        read: Callable[[Path], list[str]] = values_of,
    ) -> None:
        """`is_exact`: what is read must be what was written, since there are checksums."""
        self.name = name
        self._make, self._damage, self._which, self._is_exact = make, damage, which, is_exact
        self._read = read
        self._good = Path()
        self._values: list[str] = []

    def prepare(self, folder: Path) -> None:
        """Write the good files."""
        self._make(folder)
        self._good = folder
        self._values = values_of(folder)

    def try_one(self, random: Random, folder: Path) -> None:
        """Damage one file, times kept, and read everything."""
        os.environ["PENSTOCK_CACHE"] = str(folder / "cache")
        copy = folder / "data"
        shutil.copytree(self._good, copy)
        paths = sorted(path for path in copy.glob(self._which) if path.is_file())
        path = random.choice(paths)
        status = path.stat()
        path.write_bytes(self._damage(random, path.read_bytes()))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        values = self._read(copy)
        if self._is_exact and values != self._values:
            where = path.relative_to(copy)
            raise WrongDataError(f"{where} was damaged, and other values were read")


def _fixture(name: str, folder: Path, which: str = "*") -> None:
    for path in (FIXTURES / name).glob(which):
        shutil.copy2(path, folder)


def _samples(count: int = 12) -> list[dict[str, Any]]:
    rng = np.random.default_rng(5)
    return [
        {
            "npy": rng.integers(0, 255, (3, i % 4 + 1), np.uint8),
            "json": {"n": i, "list": [i, None, "ä"], "nest": {"x": 1.5}},
            "txt": "words " * i,
            "cls": i,
        }
        for i in range(count)
    ]


def _packed(folder: Path) -> None:
    with penstock.Writer(folder, shard_size="4KB") as writer:
        for sample in _samples():
            writer.write(sample)


def _tar(folder: Path, format: int) -> None:
    """Write plain tars with Python's own library, long names and all."""
    for shard in range(2):
        with tarfile.open(folder / f"x-{shard}.tar", "w", format=format) as tar:
            for i, sample in enumerate(_samples(6)):
                for name, value in sample.items():
                    buffer = io.BytesIO()
                    if name == "npy":
                        np.save(buffer, value)
                    else:
                        text = value if isinstance(value, str) else json.dumps(value)
                        buffer.write(text.encode())
                    info = tarfile.TarInfo(f"{'long' * 30 if i == 2 else ''}{shard}_{i}.{name}")
                    info.size = buffer.tell()
                    buffer.seek(0)
                    tar.addfile(info, buffer)


def _jsonl(folder: Path, *, is_packed: bool = False) -> None:
    lines = [json.dumps({"n": i, "text": "x" * i, "list": [1, 2.5, None]}) for i in range(20)]
    data = "\n".join(lines).encode() + b"\n"
    if is_packed:
        import zstandard

        (folder / "x.jsonl.zst").write_bytes(zstandard.compress(data))
    else:
        (folder / "x.jsonl").write_bytes(data)


def _npy(folder: Path) -> None:
    np.save(folder / "x.npy", np.arange(60, dtype=np.int32).reshape(20, 3))


def _files(folder: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(3)
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        for number, ending in enumerate(
            ("jpg", "png", "webp", "tiff", "npy", "npz", "json", "txt")
        ):
            path = folder / name / f"{number}.{ending}"
            array = rng.integers(0, 255, (8, 8, 3), np.uint8)
            if ending == "npy":
                np.save(path, array)
            elif ending == "npz":
                np.savez(path, a=array)
            elif ending in ("json", "txt"):
                path.write_text('{"a": [1, 2]}')
            else:
                Image.fromarray(array).save(path)


def _parquet(folder: Path) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(_table(), folder / "x.parquet", row_group_size=7)


def _arrow(folder: Path, *, is_stream: bool = False) -> None:
    import pyarrow as pa

    table = _table().drop_columns("dict")  # a dictionary is not in each batch
    new = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with pa.OSFile(str(folder / "x.arrow"), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def _table() -> Any:
    import pyarrow as pa

    count = 20
    return pa.table(
        {
            "n": pa.array(range(count), pa.int64()),
            "text": pa.array(["x" * i if i % 5 else None for i in range(count)]),
            "list": pa.array([[1.5] * (i % 4) for i in range(count)]),
            "map": pa.array(
                [[("a", i), ("b", 2)] for i in range(count)], pa.map_("string", "int32")
            ),
            "struct": pa.array([{"x": i, "y": "z"} for i in range(count)]),
            "dict": pa.array([f"w{i % 3}" for i in range(count)]).dictionary_encode(),
            "bytes": pa.array([bytes(i) for i in range(count)]),
        }
    )


def _indexed(folder: Path) -> None:
    """Write a plain tar set whose index lies beside it, as `penstock index` leaves it."""
    from penstock.dataset.open import look_up, write_index

    _tar(folder, tarfile.PAX_FORMAT)
    write_index(look_up(folder))


_MADE: dict[str, Callable[[Path], None]] = {
    "tar-pax": partial(_tar, format=tarfile.PAX_FORMAT),
    "tar-gnu": partial(_tar, format=tarfile.GNU_FORMAT),
    "mds": partial(_fixture, "mds/all"),
    "mds-zstd": partial(_fixture, "mds/zstd"),
    "litdata": partial(_fixture, "litdata/tuple"),
    "litdata-zstd": partial(_fixture, "litdata/chunk_zstd"),
    "litdata-sample-zstd": partial(_fixture, "litdata/sample_zstd"),
    "jsonl": _jsonl,
    "jsonl-zst": partial(_jsonl, is_packed=True),
    "npy": _npy,
    "files": _files,
    "parquet": _parquet,
    "hf-parquet": partial(_fixture, "hf_parquet/data", which="train*"),
    "arrow": _arrow,
    "arrow-stream": partial(_arrow, is_stream=True),
    "hf-arrow": partial(_fixture, "hf_arrow/train"),
}

_PARSED_APART = ("parquet", "arrow", "jsonl-zst", "mds-zstd", "litdata-zstd", "files")
"""Sets whose samples `verify` and `pack` send to a parser process."""

SUBJECTS: dict[str, Callable[[], Subject]] = {
    **{name: partial(Files, name, make) for name, make in _MADE.items()},
    **{
        f"verify-{name}": partial(Files, f"verify-{name}", _MADE[name], read=verified_values_of)
        for name in _PARSED_APART
    },
    "index": partial(Files, "index", _indexed, which=".penstock/**/*", is_exact=True),
    "index-packed": partial(Files, "index-packed", _packed, which=".penstock/**/*", is_exact=True),
    "packed": partial(Files, "packed", _packed, damage=overwritten, which="*.tar", is_exact=True),
}
