from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dataset.formats.npy import NpyFormat
from penstock.errors import FormatError, OptionError

FORMAT = NpyFormat()


def npy(array: npt.NDArray[Any], version: tuple[int, int] | None = None) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, array, version=version)
    return out.getvalue()


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize(
    "dtype", ["|u1", "<i4", ">i4", "<f2", "|b1", "<c8", "<U3", "|S4", "<M8[ns]"]
)
@pytest.mark.parametrize("row_shape", [(), (3,), (2, 2)])
def test_rows_are_samples(
    shelf: Any, version: tuple[int, int], dtype: str, row_shape: tuple[int, ...]
) -> None:
    array = (
        np.arange(5 * int(np.prod(row_shape))).astype("<i8").astype(dtype).reshape(5, *row_shape)
    )
    shelf.put("a.npy", npy(array, version))
    part = shelf.index(FORMAT)
    (field,) = part.fields
    assert (field.name, field.dtype, field.shape) == ("data", dtype, row_shape)
    found = [s["data"] for s in shelf.samples(FORMAT)]
    assert all(row.shape == row_shape for row in found)
    if row_shape:  # NumPy scalars have no byte order, and texts no padding.
        assert {row.dtype for row in found} == {np.dtype(dtype)}
    np.testing.assert_array_equal(np.stack(found), array)


def test_several_files_follow_each_other_by_name(shelf: Any) -> None:
    for i in range(3):
        shelf.put(f"tokens.{i:04}.npy", npy(np.full(i + 1, i)))
    assert [int(s["t"]) for s in shelf.samples(FORMAT, field="t")] == [0, 1, 1, 2, 2, 2]
    assert [int(s["data"]) for s in shelf.samples(FORMAT)] == [0, 1, 1, 2, 2, 2]


def test_only_headers_are_read(shelf: Any) -> None:
    for name in "ab":
        shelf.put(f"{name}.npy", npy(np.zeros((1000, 1000))))
    shelf.index(FORMAT)
    assert shelf.store.num_bytes <= 3 * 4096


def test_a_record_gives_a_field_for_each_member(shelf: Any) -> None:
    inner = np.dtype([("u", "<u2"), ("v", ">f4")])
    dtype = np.dtype([("x", "<f4", (2,)), ("label", "<i8"), ("in", inner)], align=True)
    array = np.zeros(3, dtype)
    array["x"] = np.arange(6).reshape(3, 2)
    array["label"] = [7, 8, 9]
    array["in"]["v"] = [0.5, 1.5, 2.5]
    shelf.put("a.npy", npy(array))
    fields = {f.name: (f.dtype, f.shape) for f in shelf.index(FORMAT).fields}
    assert fields == {
        "x": ("<f4", (2,)),
        "label": ("<i8", ()),
        "in.u": ("<u2", ()),
        "in.v": (">f4", ()),
    }
    last = shelf.samples(FORMAT)[-1]
    assert last["x"].tolist() == [4, 5]
    assert (last["label"], last["in.v"]) == (9, 2.5)


def test_arrays_side_by_side_are_fields(shelf: Any) -> None:
    for stem, number in (("d/shard-0000", 2), ("d/shard-0001", 3)):
        shelf.put(f"{stem}.image.npy", npy(np.full((number, 2, 2), number, np.uint8)))
        shelf.put(f"{stem}.label.npy", npy(np.arange(number)))
    samples = shelf.samples(FORMAT)
    assert [int(s["label"]) for s in samples] == [0, 1, 0, 1, 2]
    assert [int(s["image"][0, 0]) for s in samples] == [2, 2, 3, 3, 3]
    assert len(shelf.index(FORMAT).tables) == 2


def test_arrays_of_any_names_are_fields_on_request(shelf: Any) -> None:
    shelf.put("x.npy", npy(np.arange(3.0)))
    shelf.put("y.npy", npy(np.arange(3)))
    with pytest.raises(FormatError, match=r'y.npy has rows of int64 .*fields=\{"x": "x.npy"'):
        shelf.index(FORMAT)
    last = shelf.samples(FORMAT, fields={"a": "y.npy", "b": "x.npy"})[-1]
    assert (last["a"], last["b"]) == (2, 2.0)
    assert (last["a"].dtype, last["b"].dtype) == (np.int64, np.float64)
    with pytest.raises(OptionError, match=r"'z.npy', which is not among the 2 arrays"):
        shelf.index(FORMAT, fields={"a": "z.npy"})


def test_lengths_that_differ_are_named(shelf: Any) -> None:
    shelf.put("a.x.npy", npy(np.arange(3)))
    shelf.put("a.y.npy", npy(np.arange(4)))
    with pytest.raises(FormatError, match=r"a.y.npy has 4 rows, a.x.npy beside it has 3"):
        shelf.index(FORMAT)


def test_a_missing_field_is_named(shelf: Any) -> None:
    for name in ("a.x", "a.y", "b.x"):
        shelf.put(f"{name}.npy", npy(np.arange(3)))
    with pytest.raises(FormatError, match=r"b.y.npy is not there.*1 of 2 fields"):
        shelf.index(FORMAT)
    assert shelf.index(FORMAT, field="x").num_samples == 9


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    length=st.integers(1, 9),
    stride=st.one_of(st.none(), st.integers(1, 12)),
)
def test_windows_are_slices_that_never_cross_files(
    sizes: list[int], length: int, stride: int | None
) -> None:
    from penstock.storage.memory import MemoryStore

    store = MemoryStore("windows")
    arrays = [np.arange(size, dtype=np.uint16) + 100 * i for i, size in enumerate(sizes)]
    for i, array in enumerate(arrays):
        store.write(f"{i}.npy", npy(array))
    options = {"sequence_length": length} | ({"sequence_stride": stride} if stride else {})
    expected = [
        array[start : start + length].tolist()
        for array in arrays
        for start in range(0, len(array) - length + 1, stride or length)
    ]
    found = []
    for unit in FORMAT.units(list(store.list()), store, options):
        part = FORMAT.scan(unit, store, options)
        assert part.fields[0].shape == (length,)
        ids = np.arange(part.num_samples)
        e = part.tables[0].extents(ids)
        raws = [
            [store.read_range(unit.objects[0], int(at), int(n))]
            for at, n in zip(e.offset, e.length, strict=True)
        ]
        found += [s["data"].tolist() for s in FORMAT.split(part, ids, raws)]
    store.clear()
    assert found == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sequence_length": 0}, "sequence_length must be .* got 0"),
        ({"sequence_stride": 4}, "sequence_length must be .* got None"),
        ({"sequence_length": 4, "sequence_stride": -1}, "sequence_stride must be .* got -1"),
    ],
)
def test_senseless_windows_are_refused(shelf: Any, options: dict[str, int], words: str) -> None:
    shelf.put("a.npy", npy(np.arange(9)))
    with pytest.raises(OptionError, match=words):
        shelf.index(FORMAT, **options)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (npy(np.array([{}], object)), "holds Python objects.* fixed type"),
        (npy(np.zeros((2, 3), order="F")), "Fortran order.*ascontiguousarray"),
        (npy(np.float32(3)), "not rows"),
        (npy(np.zeros((4, 4)))[:-1], "ends at byte 256, the file at 255"),
        (npy(np.zeros(4))[:60], "header is to end at byte 128"),
        (b"\x93NUMPY\x01\x00\x10\x00" + b"{'descr': [('a'," + b" " * 50, "cannot be understood"),
        (b"\x93NUMPY\x09\x00" + bytes(50), "not a .npy file"),
        (b"", "not a .npy file"),
        (b"PK\x03\x04" + bytes(60), "not a .npy file"),
        (npy(np.zeros(2, [("a", [("b", "<i4")], (2,))])), "member 'a' is an array of records"),
        (npy(np.zeros((2, 2), [("a", "<i4")])), "records in rows of shape"),
    ],
)
def test_what_cannot_be_read_in_place_is_refused(shelf: Any, data: bytes, words: str) -> None:
    shelf.put("a.npy", data)
    with pytest.raises(FormatError, match=words):
        shelf.index(FORMAT)


def test_one_dimensional_fortran_order_is_no_order(shelf: Any) -> None:
    shelf.put(
        "a.npy", npy(np.arange(3)).replace(b"'fortran_order': False", b"'fortran_order': True ")
    )
    assert len(shelf.samples(FORMAT)) == 3


def test_windows_need_one_axis(shelf: Any) -> None:
    shelf.put("a.npy", npy(np.zeros((4, 2))))
    with pytest.raises(FormatError, match="has 2 axes"):
        shelf.index(FORMAT, sequence_length=2)


def test_a_long_header_is_read_whole(shelf: Any) -> None:
    dtype = np.dtype([(f"field_{i:04}", "<i4") for i in range(400)])
    shelf.put("a.npy", npy(np.zeros(2, dtype)))
    assert len(shelf.index(FORMAT).fields) == 400
