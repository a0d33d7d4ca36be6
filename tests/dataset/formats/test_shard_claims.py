"""What index.json and shards of MDS and LitData claim is checked before it is believed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import penstock
from penstock.dataset.fields import Field
from penstock.errors import DatasetError, FormatError

FIXTURES = Path(__file__).parent / "fixtures"
Edit = Callable[[dict[str, Any]], None]


def copy_of(name: str, folder: Path) -> Path:
    shutil.copytree(FIXTURES / name, folder / "set")
    return folder / "set"


def edited(place: Path, edit: Edit) -> Path:
    index = json.loads((place / "index.json").read_text())
    edit(index)
    (place / "index.json").write_text(json.dumps(index))
    return place


def column(number: int, **values: Any) -> Edit:
    """Return an edit of one column of all shards."""

    def edit(index: dict[str, Any]) -> None:
        for shard in index["shards"]:
            for name, value in values.items():
                shard[name][number] = value

    return edit


def shards(**values: Any) -> Edit:
    def edit(index: dict[str, Any]) -> None:
        for shard in index["shards"]:
            shard.update(values)

    return edit


FIXED, LABEL = 0, 1  # Columns of the set "zstd": fixed, label and text.
MDS = [
    (column(FIXED, column_encodings="ndarray:O:2", column_sizes=16), "which is not ndarray:TYPE"),
    (column(FIXED, column_encodings="ndarray:object:2"), "which is not ndarray:TYPE"),
    (column(FIXED, column_encodings="ndarray:i4,O:2"), "which is not ndarray:TYPE"),
    (column(FIXED, column_encodings="ndarray:int16:2,x"), "which is not ndarray:TYPE"),
    (column(FIXED, column_encodings="ndarray:int16:-2,-3"), "which is not ndarray:TYPE"),
    (column(FIXED, column_encodings="ndarray:int16:" + ",".join("1" * 99)), "not ndarray:TYPE"),
    (column(FIXED, column_encodings="ndarray:int16:2,4"), "takes 16 bytes, and its size is 12"),
    (column(LABEL, column_sizes=4), "takes 8 bytes, and its size is 4"),
    (column(LABEL, column_sizes=None), "takes 8 bytes, and its size is None"),
    (column(LABEL, column_sizes=-8), "`int` >= 0"),
    (column(LABEL, column_encodings="inx"), "has the encoding 'inx'; there are bytes"),
    (shards(column_sizes=[None]), "3 column_names .fixed, label, text., 3 column_encodings and 1"),
    (shards(column_names=[]), "has 0 column_names"),
    (shards(column_names=[], column_encodings=[], column_sizes=[]), "has 0 column_names"),
    (shards(column_names=["a", "a", "b"]), "has 3 column_names .a, a, b"),
    (shards(samples=-1), "`int` >= 0"),
    (shards(samples=2**40), "to hold 1099511627776 samples in 4"),
    (shards(samples=2**70), "to hold 1180591620717411303424 samples in 4"),
    (shards(raw_data={"basename": "x", "bytes": "9"}), "Expected `int`, got `str`"),
    (shards(format="json"), r"named \.jsonl"),
    (shards(format="csv", columns={}), "format 'csv', version 2"),
    (shards(version=3), "version 3"),
    (lambda index: index.update(shards=[1]), "shard 0: Expected `object`, got `int`"),
]


@pytest.mark.parametrize(("edit", "words"), MDS)
def test_an_mds_index_that_contradicts_itself_is_refused(
    tmp_path: Path, edit: Edit, words: str
) -> None:
    with pytest.raises(FormatError, match=r"index\.json.*" + words):
        penstock.open(edited(copy_of("mds/zstd", tmp_path), edit))


def test_a_small_shard_that_claims_gigabytes_is_refused(tmp_path: Path) -> None:
    place = copy_of("mds/zstd", tmp_path)

    def claim(index: dict[str, Any]) -> None:
        for shard in index["shards"]:
            shard["raw_data"]["bytes"] = 3 << 30

    with pytest.raises(FormatError, match=r"zstd: .* to hold 3221225472 bytes, at most 537 MB"):
        penstock.open(edited(place, claim))


def bomb(size_bytes: int, *, states_size: bool) -> bytes:
    packer = zstandard.ZstdCompressor(write_content_size=states_size)
    if states_size:
        return packer.compress(bytes(size_bytes))
    stream = packer.compressobj()
    return stream.compress(bytes(size_bytes)) + stream.flush()


@pytest.mark.parametrize("states_size", [True, False])
@pytest.mark.parametrize("size", [1 << 20, 10])
def test_a_shard_of_another_size_than_its_index_says_is_refused(
    tmp_path: Path, states_size: bool, size: int
) -> None:
    place = copy_of("mds/zstd", tmp_path)
    packed = bomb(size, states_size=states_size)
    (place / "shard.00000.mds.zstd").write_bytes(packed)

    def fit(index: dict[str, Any]) -> None:
        index["shards"][0]["zip_data"]["bytes"] = len(packed)

    dataset = penstock.open(edited(place, fit))
    with pytest.raises(FormatError, match=r"shard\.00000\.mds\.zstd at byte 0: .* 473"):
        dataset[0]


def config(**values: Any) -> Edit:
    return lambda index: index["config"].update(values)


def chunks(**values: Any) -> Edit:
    def edit(index: dict[str, Any]) -> None:
        for chunk in index["chunks"]:
            chunk.update(values)

    return edit


LEAF = {"type": None, "context": None, "children_spec": []}
LITDATA = [
    (config(data_spec="[1, {}]"), "data_spec is not the tree of an item"),
    (config(data_spec="[1]"), "data_spec is not the tree of an item"),
    (config(data_spec="{"), "data_spec is not the tree of an item"),
    (config(data_spec='[1, {"type": "list", "children_spec": [3]}]'), "data_spec is not the tree"),
    (
        config(data_spec='[1, {"type": "dict", "context": "[]", "children_spec": []}]'),
        "an item has 0 leaves",
    ),
    (
        config(
            data_spec='[1, {"type": null}]', data_format=["no_header_numpy:x"], compression=None
        ),
        "'no_header_numpy:x', a number of a type is expected",
    ),
    (config(data_spec='[1, {"type": null}]', data_format=["no_header_tensor:-1"]), "a number of a"),
    (config(data_spec='[1, {"type": null}]', data_format=["no_header_numpy:"]), "a number of a"),
    (config(data_format=[1]), "Expected `str`, got `int`"),
    (chunks(chunk_size=-1), "`int` >= 0"),
    (chunks(chunk_bytes=2**80), "not the index of a LitData set"),
    (chunks(chunk_size=2**47), "at most 537 MB"),
    (chunks(chunk_bytes=3 << 30), "at most 537 MB"),
    (lambda index: index["chunks"].append(index["chunks"][0]), "twice"),
]


@pytest.mark.parametrize(("edit", "words"), LITDATA)
def test_a_litdata_index_that_contradicts_itself_is_refused(
    tmp_path: Path, edit: Edit, words: str
) -> None:
    with pytest.raises(FormatError, match=words):
        penstock.open(edited(copy_of("litdata/chunk_zstd", tmp_path), edit))


def test_a_data_spec_nested_too_deep_is_refused(tmp_path: Path) -> None:
    for depth, words in ((80, "deeper than 64"), (5000, "nested too deep")):
        tree = '{"type":"list","children_spec":['
        spec = f"[1, {tree * depth}{json.dumps(LEAF)}{']}' * depth}]"
        place = edited(copy_of("litdata/tuple", tmp_path / str(depth)), config(data_spec=spec))
        with pytest.raises(FormatError, match=words):
            penstock.open(place)


@pytest.mark.parametrize("name", ["mds/zstd", "litdata/tuple"])
@pytest.mark.parametrize("text", [b"\xff\xfe\x00", b'{"shards": "\xff"}', b"[" * 5000, b""])
def test_an_index_that_is_not_json_is_refused(tmp_path: Path, name: str, text: bytes) -> None:
    place = copy_of(name, tmp_path)
    (place / "index.json").write_bytes(text)
    with pytest.raises(FormatError, match=r"index\.json is not the index of"):
        penstock.open(place)


@pytest.mark.parametrize(
    "name", ["mds/all", "mds/zstd", *(f"litdata/{n}" for n in ("dict", "tuple", "single", "arrow"))]
)
def test_every_byte_of_a_shard_may_be_wrong(tmp_path: Path, name: str) -> None:
    """Damage is an error of ours or other values, never a foreign error or a death."""
    place = copy_of(name, tmp_path)
    dataset = penstock.open(place, check=False)
    path = sorted(p for p in place.iterdir() if p.suffix in (".mds", ".zstd", ".bin"))[0]
    whole = path.read_bytes()
    rng = np.random.default_rng(7)
    places: list[str] = []
    for at in rng.integers(0, len(whole), 60).tolist():
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        for sample in range(min(len(dataset), 3)):
            try:
                penstock.open(place, check=False)[sample]
            except DatasetError as error:
                places.append(str(error))
    assert places
    assert all(path.name in words for words in places)


@pytest.mark.parametrize("dtype", ["|O8", "O", "object", "<i4,O", "nonsense", "(2,)i4"])
def test_a_field_never_has_a_type_of_objects(dtype: str) -> None:
    with pytest.raises(FormatError, match="field 'x'"):
        Field(name="x", encoding="value", dtype=dtype, shape=())
    with pytest.raises(FormatError, match="has the shape"):
        Field(name="x", encoding="value", dtype="<i4", shape=(-5,))


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("{'descr': '<i4', 'fortran_order': False, 'shape': (-5,)}", r"\(-5,\) is not the shape"),
        ("{'descr': '<i4', 'fortran_order': False, 'shape': (True,)}", "is not the shape"),
        ("{'descr': '<i4', 'fortran_order': False, 'shape': (2**3,)}", "cannot be understood"),
        ("{'descr': '<i4', 'fortran_order': False, 'shape': 5}", "5 is not the shape"),
        ("{'descr': '<i4', 'fortran_order': False, 'shape': (1,) }" * 2, "cannot be understood"),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", "holds Python objects"),
        ("{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (1,)}", "holds Python objects"),
        ("{'descr': ('<i4', (2,)), 'fortran_order': False, 'shape': (1,)}", "axes of its own"),
        ("{'descr': 'zz', 'fortran_order': False, 'shape': (1,)}", "'zz' is not a NumPy type"),
        ("{'descr': 'S99999999999', 'fortran_order': False, 'shape': (1,)}", "is not a NumPy type"),
        ("{'descr': '|V0', 'fortran_order': False, 'shape': (10**9,)}", "cannot be understood"),
        ("{'descr': '<i4', 'fortran_order': False, 'shape': (9000000000, 0)}", "take no bytes"),
        ("{'descr': '<i4', 'shape': (1,)}", "does not give descr, shape and fortran_order"),
        ("[1]", "does not give descr"),
        ("(" * 9000, "cannot be understood"),
    ],
)
def test_a_npy_header_that_makes_no_sense_is_refused(
    tmp_path: Path, header: str, words: str
) -> None:
    text = header.encode()
    data = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(64)
    (tmp_path / "a.npy").write_bytes(data)
    with pytest.raises(FormatError, match=r"a\.npy.*" + words):
        penstock.open(tmp_path / "a.npy")
