from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.dataset.formats.litdata import LitDataFormat
from penstock.dataset.leaves import decode_litdata_json
from penstock.errors import FormatError, OptionError

FORMAT = LitDataFormat()
EXPECTED = json.loads(
    (Path(__file__).parent / "fixtures" / "litdata" / "expected.json").read_text()
)
LAYOUTS = {
    "tuple": "extents",
    "single": "extents",
    "chunk_zstd": "blocks",
    "batch_zstd": "blocks",
    "sample_zstd": "extents",
    "arrow": "blocks",
    "tokens": "even",
}


def flat(item: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the leaves of an expected item by their paths."""
    if isinstance(item, dict) and "dict" in item:
        item = item["dict"]
    elif isinstance(item, list):
        item = {str(i): child for i, child in enumerate(item)}
    else:
        return {".".join(path) or "data": item}
    return {n: v for key, child in item.items() for n, v in flat(child, (*path, key)).items()}


def untyped(value: Any) -> Any:
    return value["scalar"] if isinstance(value, dict) and "scalar" in value else value


@pytest.mark.parametrize("name", LAYOUTS)
def test_items_read_as_the_real_library_reads_them(name: str, shelf: Any, plain: Any) -> None:
    shelf.put_fixture(f"litdata/{name}")
    options = {"block_size": 4} if name == "tokens" else {}
    assert shelf.index(FORMAT, **options).tables[0].addressing == LAYOUTS[name]
    found = [
        {n: untyped(plain(v)) for n, v in sample.items()}
        for sample in shelf.samples(FORMAT, **options)
    ]
    if name == "arrow":
        assert found == [item["dict"] for item in EXPECTED[name]]
    else:
        assert found == [flat(item) for item in EXPECTED[name]]


def test_every_kind_of_leaf_reads_as_the_real_library_reads_it(shelf: Any, plain: Any) -> None:
    shelf.put_fixture("litdata/dict")
    for found, item in zip(shelf.samples(FORMAT), EXPECTED["dict"], strict=True):
        expected = item["dict"]
        nested, records = expected.pop("nested")["dict"], expected.pop("records")
        assert found.pop("nested.a") == nested["a"]
        assert plain(found.pop("nested.b")) == nested["b"]
        assert plain(found.pop("records")) == records
        assert str(pickle.loads(found.pop("pickle"))) == expected.pop("pickle")
        np.testing.assert_allclose(found.pop("jpeg"), expected.pop("jpeg")["array"], atol=4)
        jpegs = [image["array"] for image in expected.pop("jpegs")]
        np.testing.assert_allclose(found.pop("jpegs"), jpegs, atol=4)
        assert {n: untyped(plain(v)) for n, v in found.items()} == expected


def test_numbers_are_fixed_fields(shelf: Any) -> None:
    shelf.put_fixture("litdata/dict")
    fixed = {f.name: (f.dtype, f.shape) for f in shelf.index(FORMAT).fields if f.is_fixed}
    assert fixed == {
        "flag": ("|b1", ()),
        "label": ("<i8", ()),
        "real": ("<f8", ()),
        "nested.a": ("<i8", ()),
    }


def test_numbers_of_an_arrow_table_are_fixed_fields_too(shelf: Any) -> None:
    shelf.put_fixture("litdata/arrow")
    fields = {f.name: f for f in shelf.index(FORMAT).fields}
    assert list(fields) == ["text", "label", "tags"]
    assert fields["label"].is_fixed
    assert shelf.samples(FORMAT)[3]["label"].dtype == np.int64


def test_frames_are_addressed_one_by_one(shelf: Any) -> None:
    shelf.put_fixture("litdata/batch_zstd")
    table = shelf.index(FORMAT).tables[0]
    assert np.diff(table.block_starts()).tolist() == [2, 2, 1, 2]


def test_tokens_need_a_block_size(shelf: Any) -> None:
    shelf.put_fixture("litdata/tokens")
    with pytest.raises(OptionError, match="block_size="):
        shelf.index(FORMAT)
    assert shelf.index(FORMAT, block_size=7).num_samples == 6
    assert shelf.index(FORMAT, block_size=15).num_samples == 0


def test_a_block_size_is_refused_where_there_are_no_tokens(shelf: Any) -> None:
    shelf.put_fixture("litdata/tuple")
    with pytest.raises(FormatError, match="leave out block_size="):
        shelf.index(FORMAT, block_size=4)


def changed(shelf: Any, **config: Any) -> None:
    index = json.loads(bytes(shelf.store.read("index.json")))
    index["config"] |= config
    shelf.put("index.json", json.dumps(index).encode())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"encryption": {"algorithm": "fernet"}}, "is encrypted.* anew without"),
        ({"item_loader": "ParquetLoader"}, "format='parquet'"),
        ({"item_loader": "Mine"}, "item loader Mine"),
        ({"compression": "lz4"}, "only zstd can be read"),
        ({"compression": "zstd", "compression_level": "row"}, "compression_level 'row'"),
        ({"data_format": ["int"]}, "2 leaves .* but 1 kinds"),
        ({"data_format": None}, "not the index of a LitData set"),
    ],
)
def test_what_cannot_be_read_is_refused(shelf: Any, config: dict[str, Any], words: str) -> None:
    shelf.put_fixture("litdata/tuple")
    changed(shelf, **config)
    with pytest.raises(FormatError, match=words):
        shelf.index(FORMAT)


def test_folders_of_other_fields_are_refused(shelf: Any) -> None:
    shelf.put_fixture("litdata/tuple", "a/")
    shelf.put_fixture("litdata/tuple", "b/")
    assert len(shelf.samples(FORMAT)) == 14
    shelf.put_fixture("litdata/single", "c/")
    with pytest.raises(FormatError, match=r"c/chunk-0-0.bin and a/chunk-0-0.bin differ"):
        shelf.index(FORMAT)


def test_a_missing_chunk_is_named(shelf: Any) -> None:
    shelf.put_fixture("litdata/tuple")
    shelf.store.delete("chunk-0-1.bin")
    with pytest.raises(FormatError, match=r"chunk-0-1.bin is not there"):
        shelf.index(FORMAT)


@pytest.mark.parametrize("name", ["tuple", "batch_zstd", "arrow", "tokens"])
def test_a_chunk_that_is_cut_off_is_refused(name: str, shelf: Any) -> None:
    shelf.put_fixture(f"litdata/{name}")
    data = bytes(shelf.store.read("chunk-0-1.bin"))
    # Frames are found from the front: only a cut through their table can be seen when indexing.
    shelf.put("chunk-0-1.bin", data[:40] if name == "batch_zstd" else data[:-1])
    with pytest.raises(FormatError, match="cut off"):
        shelf.index(FORMAT, **({"block_size": 4} if name == "tokens" else {}))


def test_a_damaged_item_is_an_error(shelf: Any) -> None:
    shelf.put_fixture("litdata/tuple")
    part = shelf.index(FORMAT)
    raw = bytes(shelf.store.read_range(shelf.store.info("chunk-0-0.bin"), 24, 48))
    assert FORMAT.split(part, np.array([0]), [[memoryview(raw)]])[0]["0"] == 0
    with pytest.raises(FormatError, match="its columns take 48 bytes, it has 47"):
        FORMAT.split(part, np.array([0]), [[memoryview(raw[:-1])]])
    with pytest.raises(FormatError, match="its sizes take 8 bytes, it has 3"):
        FORMAT.split(part, np.array([0]), [[memoryview(raw[:3])]])


@pytest.mark.parametrize(
    "data", [b"\x0c", b"\x01\xff\0\0\0", b"\x07\x05\0\0\0ab", b"\x02\x09\0\0\0"]
)
def test_a_damaged_nested_value_is_an_error(data: bytes) -> None:
    with pytest.raises(Exception, match=r"kind|bytes|requires"):
        decode_litdata_json(memoryview(data))


def test_older_files_hold_plain_json() -> None:
    assert decode_litdata_json(memoryview(b'{"a": [1, null]}')) == {"a": [1, None]}
