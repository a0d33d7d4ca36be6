from __future__ import annotations

import io
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.dataset.catalog import FOLDER
from penstock.dataset.writer import Writer
from penstock.dataset.writer_encode import encode_field
from penstock.errors import DatasetError, OptionError
from penstock.storage import FolderStore, MemoryStore, Store


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def memory() -> Iterator[MemoryStore]:
    store = MemoryStore(uuid.uuid4().hex)
    yield store
    store.clear()


def objects(store: Store) -> dict[str, bytes]:
    return {o.key: bytes(store.read(o.key)) for o in store.list() if not o.key.startswith(".")}


def write(uri: str | Path, samples: list[dict[str, Any]], **options: Any) -> Writer:
    with Writer(uri, **options) as writer:
        for sample in samples:
            writer.write(sample)
    return writer


def copy_without_index(store: Store, path: Path) -> Path:
    for key, data in objects(store).items():
        FolderStore(path).write(key, data)
    return path


PAIRS = [{"jpg": bytes([i]) * (300 + 40 * i), "cls": i} for i in range(20)]


def test_any_tar_tool_reads_the_shards(tmp_path: Path) -> None:
    write(tmp_path / "d", PAIRS, shard_size="8KB")
    members = []
    for path in sorted((tmp_path / "d").glob("*.tar")):
        with tarfile.open(path) as archive:
            for info in archive.getmembers():
                file = archive.extractfile(info)
                assert file is not None
                members.append((info.name, file.read()))
                assert (info.mtime, info.uid, info.gid, info.mode) == (0, 0, 0, 0o644)
    assert members[:2] == [("000000000.jpg", PAIRS[0]["jpg"]), ("000000000.cls", b"0")]
    assert members[-1] == ("000000019.cls", b"19")
    assert len(members) == 40


def test_a_shard_is_no_larger_than_asked_unless_one_sample_is(memory: MemoryStore) -> None:
    samples = [{"bin": bytes(size)} for size in (100, 5000, 100, 20_000, 100)]
    write(memory.uri, samples, shard_size=8000)
    sizes = [len(data) - 1024 for data in objects(memory).values()]
    assert sizes == [512 * 2 + 512 * 11 + 512 * 2 - 1024 + 1024, 512 + 20_480, 1024]


@pytest.mark.parametrize("format", ["tar", "npy"])
def test_the_same_samples_give_the_same_bytes(tmp_path: Path, format: Any) -> None:
    samples = [{"x.npy": np.arange(50) + i, "cls": i} for i in range(30)]
    write(tmp_path / "a", samples, format=format, shard_size=3000, workers=1)
    write(tmp_path / "b", samples, format=format, shard_size=3000, workers=4)
    found = objects(FolderStore(tmp_path / "a"))
    assert len(found) > 3
    assert found == objects(FolderStore(tmp_path / "b"))


FIELDS = st.dictionaries(
    st.sampled_from(["jpg", "cls", "seg.png", "caption", "bin", "meta.json"]),
    st.integers(0, 1500),
    min_size=1,
)
KEYS = st.text(st.characters(codec="utf-8", exclude_characters="\0./"), min_size=1, max_size=90)


def value_of(name: str, number: int) -> Any:
    match name:
        case "cls":
            return number
        case "caption":
            return "ä" * number
        case "meta.json":
            return {"n": number}
    return bytes(number)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(KEYS, min_size=1, max_size=3), FIELDS), min_size=1, max_size=6))
def test_what_is_indexed_while_writing_is_what_a_scan_finds(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[list[str], dict[str, int]]]
) -> None:
    tmp_path = tmp_path_factory.mktemp("scan")
    with Writer(tmp_path / "d", shard_size=4000) as writer:
        for number, (parts, fields) in enumerate(drawn):
            sample = {name: value_of(name, size) for name, size in fields.items()}
            writer.write(sample, key="/".join([*parts, str(number)]))
    written = penstock.open(tmp_path / "d")
    copied = penstock.open(copy_without_index(FolderStore(tmp_path / "d"), tmp_path / "copy"))
    assert (written.version, copied.version) == (1, 1)
    assert written.fingerprint == copied.fingerprint
    assert written.parts[0].fields == copied.parts[0].fields
    raw = dict.fromkeys({"jpg", "seg.png"} & written.fields.keys())
    for sample, (_, fields) in zip(written.with_decoders(raw), drawn, strict=True):
        found = {name: value for name, value in sample.items() if value is not None}
        wanted = {n + ".txt" * (n == "caption"): value_of(n, size) for n, size in fields.items()}
        assert found == wanted


@pytest.mark.parametrize(
    "key", ["a" * 94, "a" * 96, "a" * 97, "f/" * 70 + "x" * 30, "f" * 160 + "/x", "grüße/日本"]
)
def test_names_come_back_at_every_length_and_in_every_script(memory: MemoryStore, key: str) -> None:
    with Writer(memory.uri) as writer:
        writer.write({"cls": 1, "txt": "one"}, key=key)
        writer.write({"cls": 2, "txt": "two"})
    (data,) = objects(memory).values()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert archive.getnames()[:2] == [f"{key}.cls", f"{key}.txt"]
    dataset = penstock.open(memory.uri)
    assert [dataset.key(0), dataset.key(1)] == [key, "000000001"]
    assert dataset[0] == {"cls": 1, "txt": "one"}


def test_a_single_field_is_a_plain_array(tmp_path: Path) -> None:
    rows = np.arange(70, dtype=np.int32).reshape(10, 7)
    write(tmp_path / "d", [{"tokens": row} for row in rows], format="npy", shard_size=4 * 28)
    shards = [np.load(path) for path in sorted((tmp_path / "d").glob("*.npy"))]
    assert [len(shard) for shard in shards] == [4, 4, 2]
    assert np.array_equal(np.concatenate(shards), rows)
    dataset = penstock.open(tmp_path / "d")
    assert np.array_equal(dataset[9]["tokens"], rows[9])
    copy = copy_without_index(FolderStore(tmp_path / "d"), tmp_path / "copy")
    assert penstock.open(copy, field="tokens").fingerprint == dataset.fingerprint


def test_several_fields_are_records_that_numpy_reads(tmp_path: Path) -> None:
    samples = [
        {"image": np.full((4, 3), i, np.uint8), "label": i, "weight": np.float32(i / 2)}
        for i in range(25)
    ]
    write(tmp_path / "d", samples, format="npy", shard_size=250)
    first = np.load(tmp_path / "d" / "shard-000000.npy")
    assert first.dtype == np.dtype([("image", "u1", (4, 3)), ("label", "i8"), ("weight", "f4")])
    assert first["label"].tolist() == list(range(10))
    dataset = penstock.open(tmp_path / "d")
    assert np.array_equal(dataset[24]["image"], samples[24]["image"])
    assert (dataset[24]["label"], dataset[24]["weight"]) == (24, 12.0)
    copy = copy_without_index(FolderStore(tmp_path / "d"), tmp_path / "copy")
    assert penstock.open(copy).fingerprint == dataset.fingerprint


@pytest.mark.parametrize("format", ["tar", "npy"])
def test_the_index_has_the_checksum_of_every_sample(memory: MemoryStore, format: Any) -> None:
    write(memory.uri, [{"x.npy": np.arange(40) + i} for i in range(12)], format=format)
    part = penstock.open(memory.uri).parts[0]
    extents = part.tables[0].extents(np.arange(12))
    (data,) = objects(memory).values()
    for i, (at, length) in enumerate(zip(extents.offset, extents.length, strict=True)):
        assert part.columns["checksum"][i] == xxhash.xxh3_64_intdigest(data[at : at + length])


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("cls", 7, "cls"),
        ("label", np.int32(7), "label.cls"),
        ("txt", "ä", "txt"),
        ("caption", "ä", "caption.txt"),
        ("json", "text", "json"),
        ("boxes", [[1, 2], [3, 4]], "boxes.json"),
        ("meta", {"a": [1.5, None]}, "meta.json"),
        ("score", 0.1, "score.json"),
        ("flag", True, "flag.json"),
        ("image", b"raw", "image"),
        ("unknown", b"raw", "unknown"),
    ],
)
def test_a_value_comes_back_as_it_was(
    memory: MemoryStore, name: str, value: Any, field: str
) -> None:
    write(memory.uri, [{name: value}])
    sample = penstock.open(memory.uri, decoders={"image": None} if name == "image" else None)[0]
    assert sample == {field: value}


@pytest.mark.parametrize(
    ("name", "value"),
    [("image", np.ones((2, 3), np.uint8)), ("x.npy", np.arange(3)), ("score", np.float32(np.nan))],
)
def test_arrays_come_back_with_their_type(memory: MemoryStore, name: str, value: Any) -> None:
    write(memory.uri, [{name: value}])
    ((field, found),) = penstock.open(memory.uri)[0].items()
    assert field == name.removesuffix(".npy") + ".npy"
    assert found.dtype == value.dtype
    assert np.array_equal(found, value, equal_nan=value.dtype.kind == "f")


@pytest.mark.parametrize("shape", [(8, 6, 3), (8, 6), (8, 6, 1)])
def test_pixels_are_compressed(memory: MemoryStore, shape: tuple[int, ...]) -> None:
    # Smooth, as JPEG wants it: noise in colours would be lost however well it is written.
    pixels = np.add.outer(np.arange(8) * 9, np.arange(6) * 7).astype(np.uint8)
    pixels = np.ascontiguousarray(np.broadcast_to(pixels.reshape(8, 6, 1), (8, 6, 3)))
    pixels = pixels if shape == (8, 6, 3) else pixels[:, :, 0].reshape(shape)
    write(memory.uri, [{"png": pixels, "jpg": pixels}])
    sample = penstock.open(memory.uri)[0]
    wanted = np.broadcast_to(pixels.reshape(8, 6, -1), (8, 6, 3))
    assert np.array_equal(sample["png"], wanted)
    assert np.abs(sample["jpg"].astype(int) - wanted).max() <= 3


@pytest.mark.parametrize("name", ["JPG", "a/b", ".jpg", "jpg.", "", "a..b"])
def test_a_name_that_would_not_come_back_is_refused(memory: MemoryStore, name: str) -> None:
    with pytest.raises(OptionError, match="is not a field's name"):
        write(memory.uri, [{name: b""}])


@pytest.mark.parametrize("key", ["a.b", "/a", "a/", "a//b", "../a", "./a", "a/..", "x\0"])
def test_a_key_that_would_not_come_back_is_refused(memory: MemoryStore, key: str) -> None:
    with pytest.raises(OptionError, match="is not a sample's key"), Writer(memory.uri) as writer:
        writer.write({"cls": 1}, key=key)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cls", 1.5),
        ("txt", 3),
        ("png", np.ones((2, 2))),
        ("jpg", "x"),
        ("a", object()),
        ("x.npy", np.array([object()])),
    ],
)
def test_a_value_that_does_not_fit_its_name_is_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match="cannot hold a"):
        encode_field(name, value)


def test_neighbours_of_one_key_are_refused(memory: MemoryStore) -> None:
    samples: list[dict[str, Any]] = [{"__key__": "k", "cls": 1}, {"__key__": "k", "txt": "a"}]
    with pytest.raises(OptionError, match="have the key 'k'"):
        write(memory.uri, samples)


def test_rows_that_differ_are_refused(memory: MemoryStore) -> None:
    with Writer(memory.uri, format="npy") as writer:
        writer.write({"x": np.zeros(3, np.float32), "y": 1})
        with pytest.raises(OptionError, match=r"float32 \(4,\), the first sample had float32 \(3,"):
            writer.write({"x": np.zeros(4, np.float32), "y": 1})
        with pytest.raises(OptionError, match="float64"):
            writer.write({"x": np.zeros(3), "y": 1})
        with pytest.raises(OptionError, match="has the fields"):
            writer.write({"x": np.zeros(3, np.float32)})
    assert len(penstock.open(memory.uri)) == 1
    with pytest.raises(OptionError, match="format='tar'"):
        write("memory://never/", [{"text": "a"}], format="npy")


def test_a_key_of_webdataset_names_the_sample(memory: MemoryStore) -> None:
    write(memory.uri, [{"__key__": "a/1", "__url__": "x", "cls": 1}])
    dataset = penstock.open(memory.uri)
    assert (dataset.key(0), dataset[0]) == ("a/1", {"cls": 1})


def test_a_buffer_may_be_used_again(memory: MemoryStore) -> None:
    buffer = bytearray(b"one")
    with Writer(memory.uri) as writer:
        writer.write({"bin": buffer})
        buffer[:] = b"two"
        writer.write({"bin": memoryview(buffer)})
    assert [s["bin"] for s in penstock.open(memory.uri)] == [b"one", b"two"]


def test_appending_makes_a_version_and_disturbs_nobody(tmp_path: Path) -> None:
    write(tmp_path / "d", PAIRS, shard_size="4KB")
    decoders = {"jpg": None}
    reader = penstock.open(tmp_path / "d", decoders=decoders)
    before = objects(FolderStore(tmp_path / "d"))
    assert write(tmp_path / "d", [{"jpg": b"new", "cls": 99}], append=True).version == 2
    after = objects(FolderStore(tmp_path / "d"))
    assert after.items() > before.items()
    assert (len(reader), reader.version, list(reader)) == (20, 1, PAIRS)
    latest = penstock.open(tmp_path / "d", decoders=decoders)
    assert (len(latest), latest.version) == (21, 2)
    assert (latest[20], latest.key(20)) == ({"jpg": b"new", "cls": 99}, "000000020")
    assert list(latest[:20]) == PAIRS
    old = penstock.open(tmp_path / "d", version=1, decoders=decoders)
    assert (old.fingerprint, list(old)) == (reader.fingerprint, PAIRS)


def test_many_appends_are_one_data_set(memory: MemoryStore) -> None:
    for number in range(20):
        write(memory.uri, [{"cls": number}], append=True)
    dataset = penstock.open(memory.uri)
    assert dataset.version == 20
    assert len(dataset.parts) <= 17
    assert [s["cls"] for s in dataset] == list(range(20))


def test_what_does_not_fit_is_not_appended(memory: MemoryStore) -> None:
    write(memory.uri, [{"x": np.zeros(3)}], format="npy")
    with pytest.raises(OptionError, match="is npy, format='tar' cannot be appended"):
        write(memory.uri, [{"cls": 1}], append=True)
    with pytest.raises(OptionError, match="rows of one data set are all alike"):
        write(memory.uri, [{"x": np.zeros(4)}], format="npy", append=True)
    write(memory.uri, [{"x": np.ones(3)}], format="npy", append=True)
    assert penstock.open(memory.uri)[1]["x"].tolist() == [1, 1, 1]


def test_what_is_there_is_not_written_over(memory: MemoryStore) -> None:
    memory.write("notes.txt", b"mine")
    with pytest.raises(DatasetError, match=r"is not empty: 1 objects, the first is 'notes.txt'"):
        write(memory.uri, PAIRS)
    memory.delete("notes.txt")
    write(memory.uri, PAIRS)
    with pytest.raises(DatasetError, match="already has version 1 with 20 samples; pass append"):
        write(memory.uri, PAIRS)
    assert len(penstock.open(memory.uri)) == 20


def test_a_writer_left_by_an_exception_commits_nothing_and_says_so(memory: MemoryStore) -> None:
    with pytest.raises(OptionError) as caught:
        write(memory.uri, [*PAIRS, {"cls": "none"}], shard_size=2000)
    assert "No version" in caught.value.__notes__[0]
    assert "shard-000000.tar" in caught.value.__notes__[0]
    assert list(memory.list(f"{FOLDER}/all/")) == []
    with pytest.raises(DatasetError, match="unfinished"):
        write(memory.uri, PAIRS)
    with pytest.raises(DatasetError, match="is being written"):
        penstock.open(memory.uri)


def test_a_failed_append_leaves_the_version_as_it_is(memory: MemoryStore) -> None:
    write(memory.uri, [{"cls": 1}])
    with pytest.raises(OptionError, match="whole number"):
        write(memory.uri, [{"cls": 2}, {"cls": 3}, {"cls": "4"}], append=True, shard_size=1)
    assert [s["cls"] for s in penstock.open(memory.uri)] == [1]


def test_an_error_while_a_shard_is_written_reaches_the_caller(memory: MemoryStore) -> None:
    writer = Writer(memory.uri, shard_size=1)
    writer.write(PAIRS[0])
    memory.write("shard-000001.tar", b"somebody else's")
    writer.write(PAIRS[1])
    with pytest.raises(DatasetError, match=r"shard-000001\.tar exists already: another writer"):
        writer.close()
    assert bytes(memory.read("shard-000001.tar")) == b"somebody else's"


def test_nothing_written_is_no_data_set(memory: MemoryStore) -> None:
    with pytest.raises(DatasetError, match="nothing was written"):
        write(memory.uri, [])
    write(memory.uri, PAIRS)
    assert len(penstock.open(memory.uri)) == 20


def test_nothing_is_touched_before_the_first_sample(tmp_path: Path) -> None:
    Writer(tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_a_real_object_store_is_written_too(s3: Any) -> None:
    uri = f"{s3.uri.rstrip('/')}/d/"
    write(uri, PAIRS, shard_size="4KB", store=s3.options)
    write(uri, PAIRS, append=True, store=s3.options)
    dataset = penstock.open(uri, store=s3.options, decoders={"jpg": None})
    assert (dataset.version, list(dataset)) == (2, PAIRS + PAIRS)
