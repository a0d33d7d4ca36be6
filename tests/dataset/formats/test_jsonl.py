from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from testkit.parts import merge_parts

from penstock.dataset.formats import jsonl, zstd_frames
from penstock.dataset.formats.base import Sample
from penstock.dataset.formats.jsonl import JsonlFormat
from penstock.dataset.part import Part
from penstock.errors import DecodeError, FormatError, OptionError
from penstock.storage.memory import MemoryStore

FORMAT = JsonlFormat()


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Any:
    store = MemoryStore(request.node.name)
    yield store
    store.clear()


def zst(*frames: bytes) -> bytes:
    return b"".join(zstandard.compress(frame) for frame in frames)


def lines_of(values: list[Any], end: str = "\n") -> bytes:
    return "".join(json.dumps(v, ensure_ascii=False) + end for v in values).encode()


def indexed(store: MemoryStore, **options: Any) -> Part:
    objects = [o for o in store.list() if FORMAT.claims(o.key)]
    return merge_parts(
        [FORMAT.scan(u, store, options) for u in FORMAT.units(objects, store, options)]
    )


def raws_of(part: Part, store: MemoryStore) -> list[list[memoryview]]:
    (table,) = part.tables
    found = table.extents(np.arange(part.num_samples))
    return [
        [store.read_range(table.info(number), int(offset), int(length))]
        for number, offset, length in zip(found.object, found.offset, found.length, strict=True)
    ]


def samples_of(part: Part, store: MemoryStore) -> list[Sample]:
    ids = np.arange(part.num_samples)
    raws = raws_of(part, store)
    if part.tables[0].addressing == "extents":
        return FORMAT.split(part, ids, raws)
    found = part.tables[0].extents(ids)
    return [
        FORMAT.unpack(part, int(found.object[i]), int(found.offset[i]), raws[i][0]).sample(
            int(found.row[i])
        )
        for i in ids
    ]


ROWS = [{"id": i, "text": f"é{i}\n", "tags": ["a"] * (i % 3)} for i in range(50)]


def test_a_line_is_a_sample(store: MemoryStore) -> None:
    store.write("a.jsonl", lines_of(ROWS))
    store.write("b.ndjson", lines_of(ROWS))
    part = indexed(store)
    assert [f.name for f in part.fields] == ["id", "text", "tags"]
    assert all(f.optional and f.encoding == "value" and f.dtype is None for f in part.fields)
    assert samples_of(part, store) == ROWS + ROWS


def test_an_extent_is_the_line_without_its_end(store: MemoryStore) -> None:
    store.write("a.jsonl", b'{"a":1}\r\n\n \t\r\n{"a":2}\n\r\n{"a":3}')
    part = indexed(store)
    assert [bytes(raw[0]) for raw in raws_of(part, store)] == [b'{"a":1}', b'{"a":2}', b'{"a":3}']
    assert samples_of(part, store) == [{"a": 1}, {"a": 2}, {"a": 3}]


@given(
    st.lists(st.sampled_from([b'{"a":1}', b'  {"a":22}', b"", b" ", b"\r", '{"a":"é"}'.encode()])),
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
    st.integers(1, 40),
    st.data(),
)
def test_lines_are_those_of_a_plain_reader(
    lines: list[bytes], end: bytes, ends_open: bool, read_bytes: int, data: st.DataObject
) -> None:
    text = end.join(lines) + (b"" if ends_open else end)
    expected = [json.loads(line) for line in text.split(b"\n") if line.strip()]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    frames = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    store = MemoryStore("lines")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_READ_BYTES", read_bytes)
        patch.setattr(jsonl, "_SEARCH_BYTES", read_bytes)
        patch.setattr(zstd_frames, "_FEED_BYTES", 5)
        for key, content in (("a.jsonl", text), ("a.jsonl.zst", zst(*frames))):
            store.clear()
            store.write(key, content)
            assert samples_of(indexed(store), store) == expected


def test_an_empty_object_has_no_samples(store: MemoryStore) -> None:
    for key, data in (("a.jsonl", b""), ("b.jsonl", b"\n\r\n")):
        store.write(key, data)
    assert (indexed(store).num_samples, indexed(store).fields) == (0, ())
    store.write("c.jsonl", b'{"a":1}')
    assert samples_of(indexed(store), store) == [{"a": 1}]


def test_an_empty_compressed_object_has_no_samples(store: MemoryStore) -> None:
    for key, data in (("a.jsonl.zst", b""), ("b.jsonl.zst", zst(b"")), ("c.jsonl.zst", zst(b"\n"))):
        store.write(key, data)
    assert indexed(store).num_samples == 0


def test_a_byte_order_mark_is_skipped(store: MemoryStore) -> None:
    store.write("a.jsonl", b'\xef\xbb\xbf{"a":1}\n{"a":2}\n')
    assert samples_of(indexed(store), store) == [{"a": 1}, {"a": 2}]


def test_fields_are_the_keys_of_the_first_line_or_those_asked_for(store: MemoryStore) -> None:
    store.write("a.jsonl", b'{"a":1,"b":2}\n{"a":3,"c":4}\n{}\n')
    assert samples_of(indexed(store), store) == [{"a": 1, "b": 2}, {"a": 3}, {}]
    chosen = samples_of(indexed(store, fields=["c"]), store)
    assert chosen == [{}, {"c": 4}, {}]
    with pytest.raises(OptionError, match="a list of names, got 'c'"):
        indexed(store, fields="c")


def test_lines_that_are_no_objects_have_one_field(store: MemoryStore) -> None:
    store.write("a.jsonl", b'[1,2]\n"x"\n{"value":3}\n')
    part = indexed(store)
    assert [f.name for f in part.fields] == ["value"]
    assert [s["value"] for s in samples_of(part, store)] == [[1, 2], "x", {"value": 3}]


def test_a_line_of_another_kind_is_named(store: MemoryStore) -> None:
    store.write("a.jsonl", b'{"a":1}\n[2]\n')
    with pytest.raises(DecodeError, match=r"the line at byte 8 of a.jsonl is a list, the first"):
        samples_of(indexed(store), store)


@pytest.mark.parametrize("bad", [b'{"a":', b"\xff\xfe", b'{"a":"\xff"}'])
def test_a_bad_line_is_named_when_it_is_used(store: MemoryStore, bad: bytes) -> None:
    store.write("a.jsonl", b'{"a":1}\n' + bad + b"\n")
    part = indexed(store)
    assert part.num_samples == 2
    with pytest.raises(
        DecodeError, match=r"the line at byte 8 of a.jsonl \(\d+ bytes\) is not JSON"
    ):
        samples_of(part, store)


@pytest.mark.parametrize("bad", [b"[\n1,\n2]", b"\x00\x01", b'{"a":"\xff"}'])
def test_a_bad_first_line_is_refused(store: MemoryStore, bad: bytes) -> None:
    store.write("a.jsonl", bad)
    with pytest.raises(FormatError, match=r"a.jsonl: the first line .* is not JSON.*jq"):
        indexed(store)


def test_a_line_without_bound_is_refused(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "_READ_BYTES", 10)
    monkeypatch.setattr(jsonl, "_LINE_BYTES_MAX", 100)
    store.write("a.jsonl", b'{"a":1}\n' + b"x" * 1000)
    with pytest.raises(FormatError, match="the line at byte 8 has more than 100 bytes"):
        indexed(store)


def test_a_frame_that_ends_with_a_line_is_a_block(store: MemoryStore) -> None:
    frames = [lines_of(ROWS[i : i + 10]) for i in range(0, 50, 10)]
    store.write("a.jsonl.zst", zst(*frames))
    part = indexed(store)
    assert np.diff(part.tables[0].block_starts()).tolist() == [10] * 5
    assert samples_of(part, store) == ROWS


def test_frames_are_merged_until_a_line_ends(store: MemoryStore) -> None:
    text = lines_of(ROWS)
    first = text.index(b"\n") + 1
    store.write("a.jsonl.zstd", zst(text[:first], text[first:100], text[100:200], text[200:]))
    part = indexed(store)
    assert np.diff(part.tables[0].block_starts()).tolist() == [1, 49]
    assert samples_of(part, store) == ROWS


def test_skippable_frames_are_skipped(store: MemoryStore) -> None:
    skipped = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"size"
    text = lines_of(ROWS)
    store.write("a.jsonl.zst", skipped + zst(text) + skipped + zst(text) + skipped)
    part = indexed(store)
    assert part.tables[0].num_blocks == 2
    assert samples_of(part, store) == ROWS + ROWS


def test_a_block_says_what_memory_it_takes(store: MemoryStore) -> None:
    text = lines_of(ROWS)
    store.write("a.jsonl.zst", zst(text))
    part = indexed(store)
    block = FORMAT.unpack(part, 0, 0, store.read("a.jsonl.zst"))
    assert block.size_bytes >= len(text)


def test_a_block_without_bound_is_refused(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "BLOCK_BYTES_MAX", 1000)
    store.write("a.jsonl.zst", zst(lines_of(ROWS)))
    with pytest.raises(FormatError, match=r"unpacks to more than 1000 bytes.*split -l"):
        indexed(store)


def test_a_cut_off_or_damaged_frame_is_refused(store: MemoryStore) -> None:
    whole = zst(lines_of(ROWS))
    for data, message in (
        (whole[:-5], "is cut off"),
        (whole + b"garbage!", "is not zstd, or is damaged"),
        (b"garbage!" * 9, "is not zstd, or is damaged"),
    ):
        store.write("a.jsonl.zst", data)
        with pytest.raises(FormatError, match=message):
            indexed(store)


def test_a_block_that_is_not_what_was_indexed_is_named(store: MemoryStore) -> None:
    store.write("a.jsonl.zst", zst(lines_of(ROWS)))
    part = indexed(store)
    with pytest.raises(FormatError, match="72 bytes cannot be decompressed"):
        FORMAT.unpack(part, 0, 0, memoryview(b"garbage!" * 9))
    block = FORMAT.unpack(part, 0, 0, memoryview(zst(b"{}\n")))
    with pytest.raises(FormatError, match=r"line 7 of the block at byte 0 of a\.jsonl\.zst is not"):
        block.sample(7)


def test_plain_and_compressed_are_not_mixed(store: MemoryStore) -> None:
    store.write("a.jsonl", lines_of(ROWS))
    store.write("b.jsonl.zst", zst(lines_of(ROWS)))
    with pytest.raises(FormatError, match=r"1 plain and 1 compressed.*pattern"):
        indexed(store)


def test_gzip_is_claimed_to_be_refused(store: MemoryStore) -> None:
    store.write("a.jsonl.gz", b"")
    assert FORMAT.claims("a.jsonl.gz")
    assert not FORMAT.claims("a.json")
    with pytest.raises(FormatError, match=r"a.jsonl.gz is compressed.*zstd"):
        indexed(store)
