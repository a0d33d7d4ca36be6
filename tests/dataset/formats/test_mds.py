from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.dataset.fields import decoder_of
from penstock.dataset.formats.mds import MdsFormat
from penstock.errors import FormatError

FORMAT = MdsFormat()
EXPECTED = Path(__file__).parent / "fixtures" / "mds" / "all.expected.json"


def small(i: int) -> dict[str, Any]:
    fixed = np.arange(6, dtype=np.int16).reshape(2, 3) + np.int16(i)
    return {"fixed": fixed.tolist(), "label": -i, "text": "ä" * i}


def as_small(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**s, "fixed": s["fixed"].tolist()} for s in samples]


def test_every_encoding_reads_as_the_real_library_reads_it(shelf: Any, plain: Any) -> None:
    shelf.put_fixture("mds/all")
    part = shelf.index(FORMAT)
    assert part.tables[0].addressing == "extents"
    assert part.tables[0].num_objects > 1
    for found, expected in zip(
        shelf.samples(FORMAT), json.loads(EXPECTED.read_text()), strict=True
    ):
        # The library hands out Python numbers for `int` and pickled values for `pkl`.
        assert found.pop("label") == expected.pop("label")
        assert list(pickle.loads(found.pop("pkl"))) == expected.pop("pkl")
        assert found.pop("jpeg").shape == (3, 4, 3)
        np.testing.assert_allclose(
            found.pop("jpegs"), [a["array"] for a in expected.pop("jpegs")], atol=4
        )
        assert {name: plain(value) for name, value in found.items()} == expected


def test_columns_of_one_size_are_fixed_fields(shelf: Any) -> None:
    shelf.put_fixture("mds/all")
    fields = {f.name: f for f in shelf.index(FORMAT).fields}
    assert (fields["label"].dtype, fields["label"].shape) == ("<i8", ())
    assert (fields["fixed"].dtype, fields["fixed"].shape) == ("<i2", (2, 3))
    assert {n for n, f in fields.items() if f.is_fixed} == {
        *("label", "u8", "u64", "i16"),
        *("f16", "f64", "fixed"),
    }


def test_pickled_columns_stay_bytes_unless_the_user_decides(shelf: Any) -> None:
    shelf.put_fixture("mds/all")
    part = shelf.index(FORMAT)
    field = next(f for f in part.fields if f.name == "pkl")
    data = shelf.encoded(FORMAT, part)[2]["pkl"]
    assert decoder_of(field, {})(data) is data
    assert decoder_of(field, {"pkl": pickle.loads})(data) == (2, "tuple")


def test_of_raw_shards_only_the_tables_are_read(shelf: Any) -> None:
    shelf.put_fixture("mds/all")
    shelf.index(FORMAT)
    assert shelf.store.num_bytes == shelf.store.info("index.json").size_bytes + 4 * (2 + 2) + 4 * (
        1 + 2
    )


def test_zstd_shards_are_blocks(shelf: Any) -> None:
    shelf.put_fixture("mds/zstd")
    part = shelf.index(FORMAT)
    assert part.tables[0].addressing == "blocks"
    assert part.tables[0].num_blocks == 8
    assert shelf.store.num_bytes == shelf.store.info("index.json").size_bytes
    assert as_small(shelf.samples(FORMAT)) == [small(i) for i in range(30)]


def test_a_raw_shard_is_preferred_and_may_lie_beside_compressed_ones(shelf: Any) -> None:
    import zstandard

    shelf.put_fixture("mds/zstd")
    for number in (2, 5):
        zipped = bytes(shelf.store.read(f"shard.0000{number}.mds.zstd"))
        shelf.put(f"shard.0000{number}.mds", zstandard.decompress(zipped))
    part = shelf.index(FORMAT)
    keys = [part.tables[0].key(i) for i in range(8)]
    assert [k.removesuffix(".zstd") == k for k in keys] == [i in (2, 5) for i in range(8)]
    assert as_small(shelf.samples(FORMAT)) == [small(i) for i in range(30)]


def test_streams_are_one_data_set_in_the_order_of_their_names(shelf: Any) -> None:
    shelf.put_fixture("mds/streams")
    assert as_small(shelf.samples(FORMAT)) == [small(i) for i in range(9)]


def test_a_merged_index_does_not_double_the_shards_below_it(shelf: Any) -> None:
    shelf.put_fixture("mds/streams")
    shards = []
    for folder in ("b", "a"):
        (shard,) = json.loads(bytes(shelf.store.read(f"{folder}/index.json")))["shards"]
        shard["raw_data"]["basename"] = f"{folder}/{shard['raw_data']['basename']}"
        shards.append(shard)
    shelf.put("index.json", json.dumps({"version": 2, "shards": shards}).encode())
    order = [*range(5, 9), *range(5)]
    assert as_small(shelf.samples(FORMAT)) == [small(i) for i in order]


def test_streams_with_other_columns_are_refused_by_name(shelf: Any) -> None:
    shelf.put_fixture("mds/streams")
    shelf.put_fixture("mds/all", "c/")
    with pytest.raises(FormatError, match=r"c/shard.00000.mds has .*jpeg.* a/shard.00000.mds has"):
        shelf.index(FORMAT)


def test_other_compressions_are_refused_with_a_way_out(shelf: Any) -> None:
    shelf.put_fixture("mds/gz")
    with pytest.raises(FormatError, match=r"compressed with gz, only zstd .* decompress"):
        shelf.index(FORMAT)


def test_a_missing_shard_is_named(shelf: Any) -> None:
    shelf.put_fixture("mds/all")
    shelf.store.delete("shard.00001.mds")
    with pytest.raises(FormatError, match=r"shard.00001.mds is not there"):
        shelf.index(FORMAT)


def test_a_shard_that_is_cut_off_is_refused_with_both_lengths(shelf: Any) -> None:
    shelf.put_fixture("mds/all")
    data = bytes(shelf.store.read("shard.00000.mds"))
    shelf.put("shard.00000.mds", data[:-1])
    with pytest.raises(
        FormatError, match=f"has {len(data) - 1} bytes, index.json says {len(data)}"
    ):
        shelf.index(FORMAT)


def test_a_shard_with_another_number_of_samples_is_refused(shelf: Any) -> None:
    shelf.put_fixture("mds/all")
    data = bytes(shelf.store.read("shard.00000.mds"))
    shelf.put("shard.00000.mds", b"\x07" + data[1:])
    with pytest.raises(FormatError, match=r"holds 7 samples, index.json says 2"):
        shelf.index(FORMAT)


@pytest.mark.parametrize("damage", ["short", "garbage", "offsets"])
def test_damaged_zstd_is_an_error_and_not_a_wrong_sample(shelf: Any, damage: str) -> None:
    import zstandard

    shelf.put_fixture("mds/zstd")
    part = shelf.index(FORMAT)
    raw = bytes(shelf.store.read("shard.00000.mds.zstd"))
    if damage == "short":
        raw = raw[:-9]
    elif damage == "garbage":
        raw = raw[:4] + b"\xff" * (len(raw) - 4)
    else:
        whole = bytearray(zstandard.decompress(raw))
        whole[8:12] = b"\xff\xff\xff\x0f"
        raw = zstandard.compress(bytes(whole))
    with pytest.raises(FormatError):
        FORMAT.unpack(part, 0, 0, memoryview(raw))


def test_an_inflated_shard_is_bounded_by_what_the_index_says(shelf: Any) -> None:
    import zstandard

    shelf.put_fixture("mds/zstd")
    part = shelf.index(FORMAT)
    bomb = zstandard.compress(bytes(1 << 20))
    with pytest.raises(FormatError, match="1048576 bytes, the index says at most 473"):
        FORMAT.unpack(part, 0, 0, memoryview(bomb))


def test_no_index_is_an_error_that_says_so(shelf: Any) -> None:
    shelf.put("shard.00000.mds", b"")
    with pytest.raises(FormatError, match=r"1 objects, but no index.json"):
        shelf.index(FORMAT)


@pytest.mark.parametrize("text", [b"{", b"{}", b'{"shards": [{}]}', b"\xff\xfe", b"[" * 9999])
def test_a_foreign_index_is_an_error(shelf: Any, text: bytes) -> None:
    shelf.put("index.json", text)
    with pytest.raises(FormatError, match=r"index.json is not the index of an MDS set"):
        shelf.index(FORMAT)
