from __future__ import annotations

import datetime
import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.parts import merge_parts

from penstock.dataset.formats.base import Sample
from penstock.dataset.formats.parquet import ParquetFormat, split_of
from penstock.dataset.part import Part
from penstock.errors import FormatError, MissingPackageError, OptionError
from penstock.storage.base import ObjectInfo
from penstock.storage.memory import MemoryStore

FIXTURE = Path(__file__).parent / "fixtures" / "hf_parquet"
FORMAT = ParquetFormat()


class CountingStore(MemoryStore):
    num_bytes = 0

    def read_range(self, info: ObjectInfo, offset: int, length: int) -> memoryview:
        self.num_bytes += length
        return super().read_range(info, offset, length)

    def read(self, key: str) -> memoryview:
        raise AssertionError(f"{key} was read whole")


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Any:
    store = CountingStore(request.node.name)
    yield store
    store.clear()


def put(store: MemoryStore, table: pa.Table, key: str = "a.parquet", **options: Any) -> None:
    file = io.BytesIO()
    pq.write_table(table, file, **options)
    store.write(key, file.getvalue())


def put_folder(store: MemoryStore, folder: Path) -> None:
    for path in sorted(folder.rglob("*.parquet")):
        store.write(str(path.relative_to(folder)), path.read_bytes())


def indexed(store: MemoryStore, **options: Any) -> Part:
    objects = [o for o in store.list() if FORMAT.claims(o.key)]
    return merge_parts(
        [FORMAT.scan(u, store, options) for u in FORMAT.units(objects, store, options)]
    )


def samples_of(part: Part, store: MemoryStore) -> list[Sample]:
    (table,) = part.tables
    found = table.extents(np.arange(part.num_samples))
    out = []
    for number, offset, length, row in zip(
        found.object, found.offset, found.length, found.row, strict=True
    ):
        raw = MemoryStore.read_range(store, table.info(number), int(offset), int(length))
        out.append(FORMAT.unpack(part, int(number), int(offset), raw).sample(int(row)))
    return out


def field(part: Part, name: str) -> Any:
    return next(f for f in part.fields if f.name == name)


def test_every_row_of_every_row_group_comes_back(store: CountingStore) -> None:
    put(store, pa.table({"id": range(1000), "t": [f"é{i}" for i in range(1000)]}), row_group_size=7)
    part = indexed(store)
    assert (part.num_samples, part.tables[0].num_blocks) == (1000, 143)
    samples = samples_of(part, store)
    assert [s["id"] for s in samples] == list(range(1000))
    assert [s["t"] for s in samples] == [f"é{i}" for i in range(1000)]
    assert samples[0]["id"].dtype == np.int64


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip", "lz4"])
@pytest.mark.parametrize("use_dictionary", [True, False])
def test_a_block_needs_its_extent_and_nothing_else(
    store: CountingStore, compression: str, use_dictionary: bool
) -> None:
    table = pa.table({"a": ["x", "y"] * 50, "b": np.arange(100.0), "c": [b"q"] * 100})
    options = {"compression": compression, "use_dictionary": use_dictionary}
    put(store, table, row_group_size=30, data_page_version="2.0", **options)
    part = indexed(store)
    samples = samples_of(part, store)
    assert [s["a"] for s in samples] == ["x", "y"] * 50
    assert [s["b"] for s in samples] == list(range(100))
    assert {bytes(s["c"]) for s in samples} == {b"q"}


def test_extents_do_not_overlap_and_end_before_the_footer(store: CountingStore) -> None:
    put(store, pa.table({"a": ["x", "y"] * 50, "b": range(100)}), row_group_size=9)
    (table,) = indexed(store).tables
    found = table.extents(table.block_starts()[:-1])
    assert (found.offset[1:] >= (found.offset + found.length)[:-1]).all()
    assert found.offset[0] == 4
    assert found.offset[-1] + found.length[-1] == table.sizes[0] - len(table.blob(0))


def test_chunks_of_old_writers_may_be_asked_for_beyond_their_end(store: CountingStore) -> None:
    put(store, pa.table({"a": range(100), "b": range(100)}), row_group_size=50)
    whole = bytes(MemoryStore.read(store, "a.parquet"))
    writer = pq.read_metadata(io.BytesIO(whole)).created_by.encode()
    old = b"parquet-mr version 1.2.8".ljust(len(writer))
    store.write("a.parquet", whole.replace(writer, old))
    assert [s["b"] for s in samples_of(indexed(store), store)] == list(range(100))


def test_a_scan_reads_the_footer_only(store: CountingStore) -> None:
    noise = np.random.default_rng(7).bytes(4 << 20)
    put(store, pa.table({"a": [noise[i << 12 : (i + 1) << 12] for i in range(1024)]}))
    store.num_bytes = 0
    assert indexed(store).num_samples == 1024
    assert store.num_bytes <= 64 << 10


def test_a_footer_longer_than_the_first_read_is_read_whole(store: CountingStore) -> None:
    put(store, pa.table({f"c{i}": range(20) for i in range(200)}), row_group_size=2)
    part = indexed(store)
    assert len(part.tables[0].blob(0)) > 64 << 10
    assert samples_of(part, store)[19]["c199"] == 19


def test_nulls_make_a_field_optional_and_its_value_none(store: CountingStore) -> None:
    columns = {"a": [1, None, 3], "b": [1, 2, 3], "t": ["x", None, ""], "f": [True, None, False]}
    put(store, pa.table({**columns, "raw": [b"x", None, b""]}))
    part = indexed(store)
    assert {f.name for f in part.fields if f.optional} == {"a", "t", "f", "raw"}
    assert field(part, "b").is_fixed
    samples = samples_of(part, store)
    assert [[s[n] for s in samples] for n in columns] == list(columns.values())
    assert ["raw" in s for s in samples] == [True, False, True]


def test_without_statistics_a_field_may_hold_nulls(store: CountingStore) -> None:
    never_null = pa.field("never", pa.int64(), nullable=False)
    schema = pa.schema([never_null, pa.field("maybe", pa.int64())])
    put(store, pa.table([[1], [2]], schema=schema), write_statistics=False)
    part = indexed(store)
    assert [f.optional for f in part.fields] == [False, True]


def test_numbers_keep_their_type(store: CountingStore) -> None:
    names = ["int8", "uint16", "int32", "uint64", "float16", "float32", "float64", "bool"]
    put(store, pa.table({n: np.array([0, 1], n) for n in names}))
    part = indexed(store)
    for name in names:
        assert np.dtype(field(part, name).dtype) == np.dtype(name)
        assert field(part, name).is_fixed
        assert samples_of(part, store)[1][name].dtype == np.dtype(name)


def test_lists_of_numbers_are_arrays(store: CountingStore) -> None:
    ragged = pa.array([[1, 2, 3], [], None, [4, None]], pa.list_(pa.int32()))
    even = pa.array([[1, 2], [3, 4], [5, 6], [7, 8]], pa.list_(pa.float32(), 2))
    large = ragged.cast(pa.large_list(pa.int32()))
    put(store, pa.table({"ragged": ragged, "even": even, "large": large}))
    part = indexed(store)
    assert (field(part, "even").dtype, field(part, "even").shape) == ("<f4", (2,))
    assert (field(part, "ragged").dtype, field(part, "ragged").shape) == (None, None)
    samples = samples_of(part, store)
    for name in ("ragged", "large"):
        assert samples[0][name].dtype == np.int32
        assert samples[0][name].tolist() == [1, 2, 3]
        assert samples[1][name].tolist() == []
        assert samples[2][name] is None
        assert samples[3][name] == [4, None]
    assert samples[3]["even"].tolist() == [7.0, 8.0]


def test_nested_values_are_plain_python(store: CountingStore) -> None:
    boxes = [[{"x": 1, "t": "a"}], [], [{"x": 2, "t": None}, {"x": 3, "t": "c"}]]
    put(store, pa.table({"boxes": boxes, "meta": [{"k": {"v": [1.5]}}, None, {"k": None}]}))
    samples = samples_of(indexed(store), store)
    assert [s["boxes"] for s in samples] == boxes
    assert samples[0]["meta"]["k"]["v"].tolist() == [1.5]
    assert [s["meta"] for s in samples[1:]] == [None, {"k": None}]


def test_other_types_are_what_arrow_makes_of_them(store: CountingStore) -> None:
    day, time = datetime.date(2024, 2, 29), datetime.datetime(2024, 2, 29, 12, 30, 0, 5)
    nano = pa.array([1, None], pa.timestamp("ns"))
    words = pa.array(["x", "y"]).dictionary_encode()
    kept = pa.array([b"abc", b"def"], pa.binary(3))
    put(store, pa.table({"d": [day, None], "t": [time, time], "n": nano, "w": words, "k": kept}))
    part = indexed(store)
    first, second = samples_of(part, store)
    assert (first["d"], first["t"], second["d"]) == (day, time, None)
    assert first["n"] == np.datetime64(1, "ns")
    assert second["n"] is None
    assert (first["w"], second["w"]) == ("x", "y")
    assert (bytes(second["k"]), field(part, "k").encoding) == (b"def", "bytes")


def test_only_chosen_columns_are_delivered(store: CountingStore) -> None:
    put(store, pa.table({"a": [1], "a.b": [2], "c": [{"d": 3}], "e": [4]}))
    part = indexed(store, columns=["c", "a"])
    assert [f.name for f in part.fields] == ["c", "a"]
    assert samples_of(part, store) == [{"c": {"d": 3}, "a": 1}]
    with pytest.raises(OptionError, match=r"no column 'z'; it has: .*'e'"):
        indexed(store, columns=["z"])


def test_files_may_differ_in_their_columns(store: CountingStore) -> None:
    put(store, pa.table({"a": [1], "b": [2]}), "0.parquet")
    put(store, pa.table({"a": [3], "c": [4]}), "1.parquet")
    part = indexed(store)
    assert samples_of(part, store) == [{"a": 1, "b": 2}, {"a": 3, "c": 4}]
    assert [f.optional for f in part.fields] == [False, True, True]


def test_an_empty_table_has_fields_and_no_samples(store: CountingStore) -> None:
    put(store, pa.table({"a": pa.array([], pa.int64())}))
    part = indexed(store)
    assert (part.num_samples, [f.name for f in part.fields]) == (0, ["a"])


def test_many_threads_unpack_at_once(store: CountingStore) -> None:
    put(store, pa.table({"a": range(400)}), row_group_size=10)
    part = indexed(store)
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: samples_of(part, store), range(8)):
            assert [s["a"] for s in found] == list(range(400))


@pytest.mark.parametrize("cut", [0, 3, 11, 100, -1])
def test_a_cut_off_file_is_refused(store: CountingStore, cut: int) -> None:
    put(store, pa.table({"a": range(100)}))
    store.write("a.parquet", bytes(MemoryStore.read(store, "a.parquet"))[:cut])
    with pytest.raises(FormatError, match=r"a.parquet is not a Parquet file, or is cut off"):
        indexed(store)


def test_damage_is_named(store: CountingStore) -> None:
    put(store, pa.table({"a": range(100)}))
    whole = bytes(MemoryStore.read(store, "a.parquet"))
    damages = {
        whole[:-4] + b"PARE": "encrypted",
        whole[:-8] + b"\xff\xff\xff\x7fPAR1": "a footer of",
        whole[:-300] + bytes(292) + whole[-8:]: "footer of .*a.parquet cannot be read",
        whole[:4] + whole[-int.from_bytes(whole[-8:-4], "little") - 8 :]: "row group 0 takes",
    }
    for data, message in damages.items():
        store.write("a.parquet", data)
        with pytest.raises(FormatError, match=message):
            indexed(store)


def test_a_damaged_row_group_is_named(store: CountingStore) -> None:
    put(store, pa.table({"a": range(100)}), compression="zstd")
    part = indexed(store)
    found = part.tables[0].extents(np.array([0]))
    with pytest.raises(FormatError, match=r"row group 0 of a.parquet cannot be decoded"):
        FORMAT.unpack(part, 0, int(found.offset[0]), memoryview(bytes(int(found.length[0]))))


@given(st.binary(max_size=200))
def test_garbage_never_ends_in_a_foreign_error(data: bytes) -> None:
    store = MemoryStore("garbage")
    length = len(data).to_bytes(4, "little")
    store.write("a.parquet", b"PAR1" + data + length + b"PAR1")
    with pytest.raises(FormatError):
        indexed(store)


def test_a_folder_of_the_hub_is_read_with_its_features(store: CountingStore) -> None:
    put_folder(store, FIXTURE)
    part = indexed(store, split="train")
    assert part.options == {"classes": {"label": ["cat", "dog"]}}
    kinds = {f.name: (f.encoding, f.dtype, f.shape, f.optional) for f in part.fields}
    assert kinds == {
        "image": ("image", None, None, False),
        "label": ("value", "<i8", (), False),
        "caption": ("value", None, None, False),
        "box": ("value", "<f4", (4,), False),
        "grid": ("value", "<i4", (2, 3), False),
        "tokens": ("value", None, None, True),
        "score": ("value", "<f8", (), True),
    }
    samples = samples_of(part, store)
    assert bytes(samples[5]["image"][:4]) == b"\x89PNG"
    assert [s["label"] for s in samples] == [0, 1, 0, 1, 0, 1]
    assert samples[4]["caption"] == "caption 4 é"
    assert samples[4]["box"].tolist() == [4, 5, 6, 7]
    assert samples[4]["grid"].tolist() == [[4, 1, 2], [3, 4, 5]]
    assert samples[4]["tokens"].tolist() == [0, 1, 2, 3]
    assert [s["score"] for s in samples] == [0.0, 0.5, 1.0, None, 2.0, 2.5]


def test_several_splits_are_not_mixed_unasked(store: CountingStore) -> None:
    put_folder(store, FIXTURE)
    with pytest.raises(FormatError, match=r"2 splits \(test, train\).*split='train'"):
        indexed(store)
    assert indexed(store, split="test").num_samples == 2
    assert indexed(store, split="all").num_samples == 8
    with pytest.raises(OptionError, match=r"'dev'.*'test', 'train'"):
        indexed(store, split="dev")


@pytest.mark.parametrize(
    ("key", "split"),
    [
        ("data/train-00000-of-00002-a1b2c3.parquet", "train"),
        ("plain_text/validation-00000-of-00001.parquet", "validation"),
        ("default/partial-train/0000.parquet", "train"),
        ("my-test.parquet", "test"),
        ("part-00000-of-00009.parquet", "part"),
        ("latest/0.parquet", ""),
        ("trainer.parquet", ""),
        ("contest-2.parquet", ""),
    ],
)
def test_names_show_splits(key: str, split: str) -> None:
    assert split_of(key) == split


def test_an_image_that_is_only_a_path_is_refused(store: CountingStore) -> None:
    features = {"info": {"features": {"image": {"_type": "Image"}}}}
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    rows = [{"bytes": None, "path": "far/away.png"}, None, {"bytes": b"x", "path": None}]
    schema = pa.schema({"image": kind}, {"huggingface": json.dumps(features)})
    put(store, pa.table([pa.array(rows, kind)], schema=schema))
    part = indexed(store)
    found = part.tables[0].extents(np.array([0]))
    raw = store.read_range(store.info("a.parquet"), int(found.offset[0]), int(found.length[0]))
    block = FORMAT.unpack(part, 0, int(found.offset[0]), raw)
    with pytest.raises(FormatError, match=r"row 0 of 'image' .*'far/away.png'"):
        block.sample(0)
    assert block.sample(1) == {}
    assert bytes(block.sample(2)["image"]) == b"x"


def test_a_column_in_several_chunks_is_one_column() -> None:
    from penstock.dataset.fields import Field
    from penstock.dataset.formats.parquet import RowBlock

    table = pa.table({"a": pa.chunked_array([["x"], [], ["y", "z"]])})
    block = RowBlock(table, [Field(name="a", encoding="value")], "here", 0)
    assert [block.sample(i)["a"] for i in range(3)] == ["x", "y", "z"]


def test_without_pyarrow_the_way_out_is_named(
    store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, pa.table({"a": [1]}))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackageError, match=r"reading Parquet .*\[parquet\]"):
        indexed(store)
