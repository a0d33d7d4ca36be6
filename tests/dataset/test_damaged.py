"""Indexes, manifests and caches that are damaged or were made to do harm: an error of ours."""

from __future__ import annotations

import io
import json
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

import penstock
from penstock.dataset.build_scan import WorkFolder
from penstock.dataset.catalog import PartRef, cache_folder
from penstock.dataset.columns import map_columns, write_columns
from penstock.dataset.open import look_up, write_index
from penstock.dataset.part import open_part
from penstock.dataset.part_files import check_bounds, open_verified
from penstock.errors import CorruptError, DatasetError, FormatError, OptionError, PenstockError
from penstock.storage.folder import FolderStore
from penstock.storage.locate import open_store


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Rows of an array: one flipped offset would read other rows."""
    folder = tmp_path / "rows"
    folder.mkdir()
    np.save(folder / "x.npy", np.arange(600, dtype=np.int64))
    write_index(look_up(folder))
    return folder


@pytest.fixture
def written(tmp_path: Path) -> Path:
    with penstock.Writer(tmp_path / "written", shard_size="2KB") as writer:
        for i in range(12):
            writer.write({"txt": f"sample {i}", "cls": i})
    return tmp_path / "written"


def part_of(folder: Path) -> Path:
    (path,) = (folder / ".penstock" / "all" / "parts").glob("*.idx")
    return path


def rewritten(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Change the columns of a part and give it the name that its bytes then have."""
    path = part_of(folder)
    columns = map_columns(path)
    arrays, meta = {n: np.array(a) for n, a in columns.items()}, dict(columns.meta)
    change(arrays, meta)
    path.unlink()
    write_columns(path, arrays, meta)
    name = xxhash.xxh3_128_hexdigest(path.read_bytes())
    path.rename(path.with_name(f"{name}.idx"))
    manifest = folder / ".penstock" / "all" / "v000001.json"
    said = json.loads(manifest.read_text())
    said["parts"][0] |= {"name": name, "size_bytes": path.with_name(f"{name}.idx").stat().st_size}
    manifest.write_text(json.dumps(said))


# -- a name is a hash ------------------------------------------------------------------------------


def test_one_flipped_base_offset_is_not_another_row(rows: Path) -> None:
    path = part_of(rows)
    columns = map_columns(path)
    arrays = {n: np.array(a) for n, a in columns.items()}
    arrays["t0.base"][0] += 8
    write_columns(path, arrays, columns.meta)
    for name in (rows, path):
        with pytest.raises(CorruptError, match=f"its name says {path.stem}"):
            penstock.open(name)


def test_a_large_part_is_hashed_once_for_a_file_and_again_when_it_is_touched(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.dataset.part_files.READ_BYTES_MAX", 64)
    path, stamps = part_of(rows), tmp_path / "stamps"
    hashed: list[str] = []
    real = xxhash.xxh3_128_hexdigest

    def counted(data: Any) -> str:
        hashed.append(real(data))
        return hashed[-1]

    monkeypatch.setattr("penstock.dataset.part_files.xxhash.xxh3_128_hexdigest", counted)
    for _ in range(3):
        open_verified(path, path.stem, stamps)
    assert hashed == [path.stem]
    shutil.copy2(path, tmp_path / path.name)
    open_verified(tmp_path / path.name, path.stem, stamps)
    assert len(hashed) == 2, "a copy of the file is another file"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CorruptError):
        open_verified(path, path.stem, stamps)
    path.write_bytes(whole)
    open_verified(path, path.stem, stamps)
    assert len(hashed) == 4


def test_a_damaged_copy_in_the_cache_is_downloaded_again(s3: Any) -> None:
    with penstock.Writer(s3.uri, store=s3.options) as writer:
        for i in range(5):
            writer.write({"txt": f"sample {i}"})
    first = penstock.open(s3.uri, store=s3.options)
    (copy,) = (cache_folder() / "parts").glob("*.idx")
    copy.write_bytes(copy.read_bytes()[:-1] + b"?")
    again = penstock.open(s3.uri, store=s3.options)
    assert [s["txt"] for s in again] == [s["txt"] for s in first]
    assert xxhash.xxh3_128_hexdigest(copy.read_bytes()) == copy.stem


def test_what_a_killed_build_left_is_verified_before_it_is_used(rows: Path, tmp_path: Path) -> None:
    part = open_part(part_of(rows))
    work = WorkFolder(store=FolderStore(tmp_path / "work"), prefix="")
    work.keep("unit", part)
    assert work.part("unit").fingerprint == part.fingerprint
    path = tmp_path / "work" / "unit.idx"
    columns = map_columns(path)
    arrays = {n: np.array(a) for n, a in columns.items()}
    arrays["t0.base"][0] += 8
    write_columns(path, arrays, columns.meta)
    with pytest.raises(CorruptError, match=r"unit\.idx is damaged"):
        work.part("unit")


# -- values that a hash does not vouch for ---------------------------------------------------------


@pytest.mark.parametrize("kind", ["|O8", "O", "<U4", "|V16", "<M8[ns]", ">i8", "nonsense", ""])
def test_only_plain_numbers_are_columns(rows: Path, kind: str) -> None:
    path = part_of(rows)
    data = path.read_bytes()
    end = 16 + int.from_bytes(data[12:16], "little")
    head = json.loads(data[16:end])
    head["columns"]["t0.object.size"]["dtype"] = kind
    new = json.dumps(head).encode()
    start, at = -(-end // 64) * 64, -(-(16 + len(new)) // 64) * 64
    other = rows / "other.idx"
    other.write_bytes(
        (data[:12] + len(new).to_bytes(4, "little") + new).ljust(at, b"\0") + data[start:]
    )
    with pytest.raises(FormatError, match="plain numbers"):
        penstock.open(other)


CHANGES: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "offset outside": lambda a, m: a["t0.offset"].__setitem__(3, 10**6),
    "length outside": lambda a, m: a["t0.length"].__setitem__(3, 10**9),
    "member outside": lambda a, m: a["member.length"].__setitem__((3, 0), 10**6),
    "first falls": lambda a, m: a["t0.object.first"].__setitem__(1, 10**6),
    "first below 0": lambda a, m: a["t0.object.first"].__setitem__(0, -1),
    "size below 0": lambda a, m: a["t0.object.size"].__setitem__(0, -1),
    "texts cut": lambda a, m: a["key.ends"].__setitem__(-1, 10**6),
    "keys fall": lambda a, m: a["key.ends"].__setitem__(0, 10**6),
    "a column too short": lambda a, m: a.__setitem__("t0.offset", a["t0.offset"][:-1]),
    "a column missing": lambda a, m: a.pop("t0.length"),
    "no etags": lambda a, m: a.pop("t0.object.etag.ends"),
    "no format": lambda a, m: m.pop("format"),
    "another addressing": lambda a, m: m.__setitem__("tables", ["blocks"]),
    "unknown addressing": lambda a, m: m.__setitem__("tables", ["pages"]),
    "no tables": lambda a, m: m.__setitem__("tables", []),
    "fields are texts": lambda a, m: m.__setitem__("fields", ["txt"]),
    "an object type": lambda a, m: m["fields"][0].__setitem__("dtype", "|O8"),
    "checksums missing": lambda a, m: a.__setitem__("checksum", a["checksum"][:2]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_part_that_makes_no_sense_is_refused_though_its_hash_is_right(
    written: Path, change: str
) -> None:
    rewritten(written, CHANGES[change])
    with pytest.raises(FormatError):
        penstock.open(written)


EVEN: dict[str, tuple[str, int]] = {
    "base below 0": ("t0.base", -8),
    "base outside": ("t0.base", 2**62),
    "stride": ("t0.stride", 2**62),
    "stride below 0": ("t0.stride", -8),
    "width": ("t0.width", 2**62),
}


@pytest.mark.parametrize("change", EVEN)
def test_rows_that_leave_their_array_are_refused(rows: Path, change: str) -> None:
    name, value = EVEN[change]
    rewritten(rows, lambda a, m: a[name].__setitem__(0, value))
    with pytest.raises(FormatError, match="outside"):
        penstock.open(rows)


@pytest.mark.parametrize(
    ("name", "value"), [("object", 5), ("offset", 2**62), ("length", 2**62), ("length", 10**6)]
)
def test_blocks_that_leave_their_object_are_refused(tmp_path: Path, name: str, value: int) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "set").mkdir()
    pq.write_table(pa.table({"x": list(range(50))}), tmp_path / "set" / "a.parquet")
    write_index(look_up(tmp_path / "set"))

    def change(arrays: dict[str, Any], meta: dict[str, Any]) -> None:
        column = arrays[f"t0.block.{name}"].astype(np.uint64)
        column[0] = value
        arrays[f"t0.block.{name}"] = column

    rewritten(tmp_path / "set", change)
    with pytest.raises(FormatError, match="outside"):
        penstock.open(tmp_path / "set")


def test_bounds_are_looked_at_over_many_chunks(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.dataset.part_files._CHUNK", 5)
    part = open_part(part_of(written))
    check_bounds(part, "here")
    offsets = np.array(part.columns["t0.offset"])
    for i in range(12):
        part.columns._arrays["t0.offset"] = np.where(np.arange(12) == i, 10**5, offsets)
        with pytest.raises(FormatError, match="outside"):
            check_bounds(part, "here")


# -- names from outside ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../../../../escaped", "/tmp/escaped", "a" * 31, "A" * 32, ""])
def test_a_part_is_named_by_32_hex_digits_and_leads_nowhere_else(
    s3: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "deep" / "er" / "cache"))
    with penstock.Writer(s3.uri, store=s3.options) as writer:
        writer.write({"txt": "a"})
    store = open_store(s3.uri, s3.options)
    key = ".penstock/all/v000001.json"
    said = json.loads(bytes(store.read(key)))
    said["parts"][0]["name"] = name
    store.write(key, json.dumps(said).encode())
    with pytest.raises(FormatError, match="32 hex digits"):
        penstock.open(s3.uri, store=s3.options)
    assert not list(tmp_path.rglob("*escaped*"))
    with pytest.raises(OptionError, match="32 hex digits"):
        PartRef(name=name, fingerprint="", num_samples=1, size_bytes=1)


def test_an_object_key_that_leaves_the_folder_is_refused(rows: Path) -> None:
    (rows.parent / "secret.npy").write_bytes((rows / "x.npy").read_bytes())

    def change(arrays: dict[str, Any], meta: dict[str, Any]) -> None:
        key = b"../secret.npy"
        arrays["t0.object.key.bytes"] = np.frombuffer(key, np.uint8)
        arrays["t0.object.key.ends"] = np.array([len(key)], np.uint64)

    rewritten(rows, change)
    with pytest.raises(PenstockError):
        penstock.open(rows)
    with pytest.raises(PenstockError, match="not a key"):
        penstock.open(rows, check=False)[0]


def test_an_index_of_mds_names_nothing_outside_of_the_listing(tmp_path: Path) -> None:
    (tmp_path / "secret.mds").write_bytes(bytes(100))
    (tmp_path / "set").mkdir()
    shard = {
        "column_names": ["x"],
        "column_encodings": ["int"],
        "column_sizes": [8],
        "samples": 1,
        "raw_data": {"basename": "../secret.mds", "bytes": 100},
    }
    (tmp_path / "set" / "index.json").write_text(json.dumps({"shards": [shard]}))
    with pytest.raises(FormatError, match=r"secret\.mds is not there"):
        penstock.open(tmp_path / "set", format="mds")


# -- anything at all -------------------------------------------------------------------------------

MANIFESTS = [
    b"",
    b"null",
    b"[]",
    b"{}",
    b"\xff\xfe\x00",
    b'{"layout": 1}',
    b'{"layout": "1"}',
    b"[" * 100_000,
    b'{"layout": 1, "version": 1, "format": "\xff", "options": {}, "parts": []}',
]


@pytest.mark.parametrize("data", MANIFESTS, ids=range(len(MANIFESTS)))
def test_a_manifest_that_is_none_is_an_error_with_the_way_out(written: Path, data: bytes) -> None:
    (written / ".penstock" / "all" / "v000001.json").write_bytes(data)
    with pytest.raises(FormatError, match="rebuild=True"):
        penstock.open(written)
    assert [s["cls"] for s in penstock.open(written, rebuild=True)] == list(range(12))
    assert [s["cls"] for s in penstock.open(written)] == list(range(12))


def test_files_of_an_index_that_are_gone_or_folders_are_errors_of_ours(written: Path) -> None:
    path = part_of(written)
    path.unlink()
    with pytest.raises(PenstockError, match=path.name):
        penstock.open(written)
    path.mkdir()
    with pytest.raises(PenstockError, match=path.name):
        penstock.open(written)
    with pytest.raises(PenstockError, match=r"nothing\.idx"):
        penstock.open(written / "nothing.idx")
    with pytest.raises(OptionError, match="not a version"):
        penstock.open(written / ".penstock" / "all" / "vnone.json")
    with pytest.raises(OptionError, match="from a folder"):
        penstock.open("s3://bucket/set/.penstock/all/parts/x.idx")
    with pytest.raises(OptionError, match="an index itself"):
        penstock.open(written / ".penstock/all/v000001.json", format="npy")


def mutated(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    match rng.randrange(4):
        case 0:
            for _ in range(rng.randint(1, 4)):
                out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
        case 1:
            del out[rng.randrange(len(out)) :]
        case 2:
            at = rng.randrange(len(out))
            out[at : at + rng.randint(1, 8)] = rng.randbytes(rng.randint(0, 8))
        case _:
            head = min(len(out), 600)
            out[rng.randrange(head)] = rng.randrange(256)
    return bytes(out)


def test_no_mutated_file_of_an_index_ends_in_a_foreign_error_or_wrong_samples(
    written: Path,
) -> None:
    expected = [(s["txt"], s["cls"]) for s in penstock.open(written)]
    manifest, part = written / ".penstock/all/v000001.json", part_of(written)
    rng = random.Random(7)
    for path in (manifest, part):
        whole = path.read_bytes()
        for _ in range(150):
            path.write_bytes(mutated(whole, rng))
            try:
                dataset = penstock.open(written)
                assert [(s["txt"], s["cls"]) for s in dataset] == expected
            except PenstockError:
                pass
        path.write_bytes(whole)


def test_no_mutated_part_by_another_name_ends_in_a_foreign_error(written: Path) -> None:
    whole = part_of(written).read_bytes()
    rng, path = random.Random(11), written / "other.idx"
    for _ in range(200):
        path.write_bytes(mutated(whole, rng))
        try:
            for sample in penstock.open(path):
                assert set(sample)
        except PenstockError:
            pass


def test_damaged_notes_in_the_cache_are_made_anew(written: Path) -> None:
    copy = written.parent / "copy"
    shutil.copytree(written, copy, copy_function=shutil.copyfile)
    for path in copy.glob("*.tar"):
        path.touch()
    expected = [s["cls"] for s in penstock.open(copy)]
    (note,) = (cache_folder() / "moved").glob("*.json")
    for data in (b"", b"\xff", b"{}", note.read_bytes().replace(b'"name":"', b'"name":"../')):
        note.write_bytes(data)
        assert [s["cls"] for s in penstock.open(copy)] == expected
    ref = msgspec.json.decode(note.read_bytes(), type=PartRef)
    (cache_folder() / "parts" / f"{ref.name}.idx").write_bytes(b"damaged")
    assert [s["cls"] for s in penstock.open(copy)] == expected


# -- what a file is that is not what its name says -------------------------------------------------

TAR = io.BytesIO()
with tarfile.open(fileobj=TAR, mode="w:gz") as _archive:
    _archive.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())


@pytest.mark.parametrize(
    ("name", "data", "said"),
    ids=["gzip", "zstd", "html", "xml", "lfs", "zip", "parquet", "npy"],
    argvalues=[
        ("a.tar", TAR.getvalue(), "compressed with gzip.*gunzip"),
        ("a.tar", b"\x28\xb5\x2f\xfd" + bytes(2000), "compressed with zstd.*unzstd"),
        ("a.tar", b"<!DOCTYPE html><html>Sign in</html>" * 40, "HTML or XML.*download it again"),
        ("a.tar", b'\n<?xml version="1.0"?><Error>AccessDenied</Error>' * 20, "HTML or XML"),
        ("a.tar", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        ("a.tar", b"PK\x03\x04" + bytes(2000), "a zip archive"),
        ("a.parquet", b"<html>" * 300, "is not a Parquet file|HTML"),
        ("a.npy", b"<html>" * 300, ""),
    ],
)
def test_a_file_that_is_something_else_is_said_to_be(
    tmp_path: Path, name: str, data: bytes, said: str
) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / name).write_bytes(data)
    with pytest.raises(DatasetError, match=f"(?s){name}.*{said}"):
        penstock.open(tmp_path / "set")


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, 3, b"set", [None], []])
def test_what_is_no_name_is_said_to_be_none(name: Any) -> None:
    with pytest.raises(OptionError, match="path or uri"):
        penstock.open(name)


@pytest.mark.parametrize("version", ["1", 1.0, True, [1]])
def test_a_version_is_a_number(written: Path, version: Any) -> None:
    with pytest.raises(OptionError, match="version must be a whole number"):
        penstock.open(written, version=version)
    assert penstock.open(written, version=np.int64(1)).version == 1  # type: ignore[arg-type]


def test_a_decoder_for_no_field_is_refused_with_those_there_are(written: Path) -> None:
    for make in (penstock.open, lambda path, **more: penstock.open(path).with_decoders(**more)):
        with pytest.raises(OptionError, match=r"'typo'.*txt \(txt\), cls \(cls\)"):
            make(written, decoders={"typo": len})
        with pytest.raises(OptionError, match=r"'jpg'.*is for no field"):
            make(written, decoders={"jpg": len})
        with pytest.raises(OptionError, match="'typo'"):
            make(written, decoders={"txt": len, "typo": len})
    some = {"txt": len, "jpg": len}
    assert penstock.open(written, decoders=some)[3]["txt"] == 8, "one of them is for a field"


def test_an_empty_folder_is_said_to_be_empty(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    with pytest.raises(FileNotFoundError, match="set is an empty folder"):
        penstock.open(tmp_path / "set")
