"""Damaged files of formats that native code parses: an error of ours, never a death.

The files are opened and read in one process of their own, because a fault here would end it.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import simplejpeg

import penstock
from penstock.errors import DecodeError, FormatError

NUM_DAMAGED = 60
NUM = 30


READER = """
import sys
from pathlib import Path
import penstock
for path in sorted(Path(sys.argv[1]).iterdir()):
    print(path, flush=True)
    try:
        for sample in penstock.open(path):
            pass
    except penstock.errors.PenstockError as error:
        assert ".parquet" in str(error) or ".arrow" in str(error), error
"""


def table() -> pa.Table:
    numbers = range(NUM)
    names = pa.map_(pa.string(), pa.string())
    return pa.table(
        {
            "number": numbers,
            "text": [f"row {n} é" for n in numbers],
            "ragged": [list(range(n % 5)) for n in numbers],
            "map": pa.array([[("k", str(n))] for n in numbers], names),
            "struct": [{"a": n, "b": [str(n)]} for n in numbers],
            "bytes": [bytes(n) for n in numbers],
            "some": pa.array([n if n % 3 else None for n in numbers]),
            "date": pa.array(numbers, pa.date32()),
            "time": pa.array(numbers, pa.timestamp("ms")),
            "sum": pa.array(list(numbers), pa.decimal128(10, 2)),
        }
    )


def written(kind: str) -> bytes:
    file = io.BytesIO()
    if kind == "parquet":
        pq.write_table(table(), file, row_group_size=10)
    else:
        make = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
        codec = "lz4" if kind == "lz4" else None
        options = pa.ipc.IpcWriteOptions(compression=codec)
        with make(file, table().schema, options=options) as writer:
            writer.write_table(table(), max_chunksize=10)
    return file.getvalue()


def damaged(data: bytes, random: np.random.Generator, lowest: int) -> bytes:
    """Flip a bit, or write over one to eight bytes."""
    out = bytearray(data)
    at = int(random.integers(lowest, len(data)))
    if random.random() < 0.5:
        out[at] ^= 1 << int(random.integers(8))
    else:
        over = random.choice([b"\xff", b"\0", b"\x7f", random.bytes(8)])[:8]
        length = min(int(random.integers(1, 9)), len(data) - at)
        out[at : at + length] = (over * 8)[:length]
    return bytes(out)


@pytest.mark.parametrize("kind", ["parquet", "stream", "file", "lz4"])
def test_a_damaged_file_is_an_error_that_names_it(kind: str, tmp_path: Path) -> None:
    # Of Parquet, this seed has a footer that pyarrow aborts on.
    data, random = written(kind), np.random.default_rng(3)
    suffix = "parquet" if kind == "parquet" else "arrow"
    footer = int.from_bytes(data[-8:-4], "little") + 8 if kind == "parquet" else 0
    for n in range(NUM_DAMAGED):
        # Half of them in the footer, where there is one.
        lowest = len(data) - footer if footer and n % 2 else 0
        folder = tmp_path / "sets" / f"{n:03}"
        folder.mkdir(parents=True)
        (folder / f"a.{suffix}").write_bytes(damaged(data, random, lowest))
    env = {**os.environ, "PENSTOCK_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", READER, str(tmp_path / "sets")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode} {done.stdout[-100:]} {done.stderr[-2000:]}"
    assert len(done.stdout.split()) == NUM_DAMAGED


def test_a_wrong_offset_in_a_map_is_an_error(tmp_path: Path) -> None:
    names = pa.map_(pa.string(), pa.string())
    keys = pa.table({"map": pa.array([[("key", "value")]] * 50, names)})
    with pa.ipc.new_stream(tmp_path / "a.arrow", keys.schema) as writer:
        writer.write_table(keys)
    data = (tmp_path / "a.arrow").read_bytes()
    # The offsets of the keys are 0, 3, 6, … as 32-bit numbers.
    offsets = np.arange(0, 153, 3, np.int32).tobytes()
    bad = offsets[:40] + (0x7000_0000).to_bytes(4, "little") + offsets[44:]
    assert offsets in data
    (tmp_path / "a.arrow").write_bytes(data.replace(offsets, bad, 1))
    dataset = penstock.open(tmp_path)
    with pytest.raises(FormatError, match=r"a\.arrow.* cannot be decoded"):
        dataset[10]


def test_feather_of_version_1_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.feather").write_bytes(b"FEA1" + bytes(60) + b"FEA1")
    with pytest.raises(FormatError, match=r"a\.feather .*Feather of version 1"):
        penstock.open(tmp_path)


def test_rows_that_take_no_bytes_are_not_made_before_they_are_asked_for(tmp_path: Path) -> None:
    nulls = pa.Array.from_buffers(pa.null(), 2**31 - 1, [None])
    nothing = pa.RecordBatch.from_arrays([nulls], names=["a"])
    with pa.ipc.new_stream(tmp_path / "a.arrow", nothing.schema) as writer:
        writer.write_batch(nothing)
    dataset = penstock.open(tmp_path)
    assert len(dataset) == 2**31 - 1
    assert dataset[1 << 30] == {"a": None}


def test_a_page_that_does_not_match_its_checksum_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(pa.table({"a": np.arange(1000)}), path, **options)
    data = bytearray(path.read_bytes())
    data[data.index(np.arange(500, 510).tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"(?i)crc checksum"):
        penstock.open(tmp_path)[0]


def test_a_jpeg_that_claims_more_pixels_than_anybody_has_is_an_error(tmp_path: Path) -> None:
    data = bytearray(simplejpeg.encode_jpeg(np.zeros((64, 64, 3), np.uint8)))
    head = data.index(b"\xff\xc0")
    data[head + 5 : head + 9] = (60000).to_bytes(2, "big") * 2
    (tmp_path / "a.jpg").write_bytes(data)
    with pytest.raises(DecodeError, match=r"a\.jpg.*pixels"):
        penstock.open(tmp_path)[0]
