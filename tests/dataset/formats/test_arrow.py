from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.parts import merge_parts

from penstock.dataset.formats.arrow import ArrowFormat
from penstock.dataset.formats.base import Sample
from penstock.dataset.part import Part
from penstock.errors import FormatError, NotFoundError, OptionError
from penstock.storage.base import ObjectInfo
from penstock.storage.memory import MemoryStore

FIXTURE = Path(__file__).parent / "fixtures" / "hf_arrow"
FORMAT = ArrowFormat()


class CountingStore(MemoryStore):
    num_bytes = 0

    def read_range(self, info: ObjectInfo, offset: int, length: int) -> memoryview:
        self.num_bytes += length
        return super().read_range(info, offset, length)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Any:
    store = CountingStore(request.node.name)
    yield store
    store.clear()


def stream_of(table: pa.Table, rows: int = 1000, *, as_file: bool = False, **options: Any) -> bytes:
    file = io.BytesIO()
    new = pa.ipc.new_file if as_file else pa.ipc.new_stream
    with new(file, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return file.getvalue()


def put_folder(store: MemoryStore, folder: Path) -> None:
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
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


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_every_row_of_every_batch_comes_back(
    store: CountingStore, as_file: bool, compression: str | None
) -> None:
    table = pa.table({"id": range(1000), "t": [f"é{i}" for i in range(1000)]})
    store.write("a.arrow", stream_of(table, 7, as_file=as_file, compression=compression))
    part = indexed(store)
    assert (part.num_samples, part.tables[0].num_blocks) == (1000, 143)
    samples = samples_of(part, store)
    assert [s["id"] for s in samples] == list(range(1000))
    assert [s["t"] for s in samples] == [f"é{i}" for i in range(1000)]


def test_feather_files_are_read(store: CountingStore) -> None:
    file = io.BytesIO()
    pyarrow.feather.write_feather(pa.table({"a": range(100)}), file, chunksize=30)
    store.write("a.arrow", file.getvalue())
    assert [s["a"] for s in samples_of(indexed(store), store)] == list(range(100))


def test_a_scan_reads_heads_only(store: CountingStore) -> None:
    table = pa.table({"a": np.zeros(1 << 20), "b": np.zeros(1 << 20)})
    data = stream_of(table, 1 << 17)
    store.write("a.arrow", data)
    store.num_bytes = 0
    assert indexed(store).tables[0].num_blocks == 8
    assert store.num_bytes < 64 << 10 < len(data) // 100


def test_nulls_are_known_from_the_heads(store: CountingStore) -> None:
    kind = pa.struct({"x": pa.int64(), "y": pa.list_(pa.int64())})
    nested = pa.array([{"x": 1, "y": [1]}, {"x": 2, "y": []}, {"x": 3, "y": [2]}], kind)
    table = pa.table({"s": nested, "full": [1, 2, 3], "some": [1, 2, None], "last": [1, 2, 3]})
    store.write("a.arrow", stream_of(table, 2))
    part = indexed(store)
    assert [(f.name, f.optional) for f in part.fields] == [
        ("s", False),
        ("full", False),
        ("some", True),
        ("last", False),
    ]
    assert [s["some"] for s in samples_of(part, store)] == [1, 2, None]


def test_a_batch_reads_the_same_at_any_alignment(store: CountingStore) -> None:
    store.write("a.arrow", stream_of(pa.table({"a": np.arange(50.0), "b": [b"xy"] * 50})))
    part = indexed(store)
    found = part.tables[0].extents(np.array([0]))
    raw = store.read_range(store.info("a.arrow"), int(found.offset[0]), int(found.length[0]))
    for shift in range(1, 9):
        block = FORMAT.unpack(
            part, 0, int(found.offset[0]), memoryview(bytes(shift) + bytes(raw))[shift:]
        )
        assert [block.sample(i)["a"] for i in range(50)] == list(range(50))
        assert bytes(block.sample(49)["b"]) == b"xy"


def test_an_empty_stream_has_fields_and_no_samples(store: CountingStore) -> None:
    store.write("a.arrow", stream_of(pa.table({"a": pa.array([], pa.int64())})))
    part = indexed(store)
    assert (part.num_samples, [f.name for f in part.fields]) == (0, ["a"])


def test_a_stream_may_end_without_its_mark(store: CountingStore) -> None:
    data = stream_of(pa.table({"a": [1, 2]}))
    assert data.endswith(b"\xff\xff\xff\xff\0\0\0\0")
    store.write("a.arrow", data[:-8])
    assert indexed(store).num_samples == 2


def test_dictionaries_are_refused_with_a_way_out(store: CountingStore) -> None:
    store.write("a.arrow", stream_of(pa.table({"a": pa.array(["x"]).dictionary_encode()})))
    with pytest.raises(FormatError, match=r"dictionary at byte .*dictionary_decode"):
        indexed(store)


def num_samples_or_refused(store: MemoryStore) -> int | str:
    try:
        return indexed(store).num_samples
    except FormatError:
        return "refused"


@pytest.mark.parametrize("as_file", [False, True])
def test_a_stream_cut_inside_a_message_is_refused(store: CountingStore, as_file: bool) -> None:
    data = stream_of(pa.table({"a": range(10)}), 5, as_file=as_file)
    outcomes: list[int | str] = []
    for end in range(len(data)):
        store.write("a.arrow", data[:end])
        outcomes.append(num_samples_or_refused(store))
    # A stream may end after any message; everywhere else the cut shows.
    assert set(outcomes) == {"refused", 0, 5, 10}
    assert (outcomes.count(0), outcomes.count(5)) == (1, 1)


@given(st.binary(max_size=200))
def test_garbage_never_ends_in_a_foreign_error(data: bytes) -> None:
    store = MemoryStore("garbage")
    for head in (b"", b"\xff\xff\xff\xff" + len(data).to_bytes(4, "little")):
        store.write("a.arrow", head + data)
        with pytest.raises(FormatError):
            indexed(store)


def test_a_damaged_batch_is_named(store: CountingStore) -> None:
    store.write("a.arrow", stream_of(pa.table({"a": [1, 2]})))
    part = indexed(store)
    found = part.tables[0].extents(np.array([0]))
    with pytest.raises(FormatError, match=r"batch at byte \d+ of a.arrow cannot be decoded"):
        FORMAT.unpack(part, 0, int(found.offset[0]), memoryview(b"\xff" * int(found.length[0])))


def test_a_saved_data_set_is_read_with_its_features(store: CountingStore) -> None:
    put_folder(store, FIXTURE / "train")
    part = indexed(store)
    assert part.options == {"classes": {"label": ["cat", "dog"]}}
    kinds = {f.name: (f.encoding, f.dtype, f.shape, f.optional) for f in part.fields}
    assert kinds == {
        "image": ("image", None, None, False),
        "label": ("value", "<i8", (), False),
        "caption": ("value", None, None, False),
        "box": ("value", "<f4", (4,), False),
        "grid": ("value", "<i4", (2, 3), False),
        "tokens": ("value", None, None, False),
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
    assert samples_of(indexed(store, columns=["label"]), store)[1] == {"label": 1}
    with pytest.raises(OptionError, match="no column 'z'"):
        indexed(store, columns=["z"])


def test_a_dict_of_data_sets_is_refused_with_the_folder_to_open(store: CountingStore) -> None:
    put_folder(store, FIXTURE)
    with pytest.raises(FormatError, match=r"2 data sets \(test, train\); open one.*/train"):
        indexed(store)


def test_left_overs_of_map_are_not_part_of_the_data_set(store: CountingStore) -> None:
    put_folder(store, FIXTURE / "train")
    store.write("cache-0123456789abcdef.arrow", stream_of(pa.table({"a": range(99)})))
    assert indexed(store).num_samples == 6


def test_a_missing_shard_is_noticed_but_a_pattern_may_leave_one_out(store: CountingStore) -> None:
    put_folder(store, FIXTURE / "train")
    one = [store.info("data-00001-of-00002.arrow")]
    assert [u.objects for u in FORMAT.units(one, store, {})] == [tuple(one)]
    store.delete("data-00000-of-00002.arrow")
    with pytest.raises(NotFoundError, match="data-00000-of-00002"):
        indexed(store)


def test_a_damaged_state_is_named(store: CountingStore) -> None:
    put_folder(store, FIXTURE / "train")
    store.write("state.json", b"[]")
    with pytest.raises(FormatError, match=r"state.json is damaged"):
        indexed(store)


def test_splits_side_by_side_are_not_mixed_unasked(store: CountingStore) -> None:
    for name, rows in (("train", 3), ("test", 2)):
        store.write(f"words-{name}.arrow", stream_of(pa.table({"a": range(rows)})))
    with pytest.raises(FormatError, match="2 splits"):
        indexed(store)
    assert indexed(store, split="train").num_samples == 3
