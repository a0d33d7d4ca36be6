"""Columns that are decoded by one call: the values of single calls, or None."""

from typing import Any

import numpy as np
import pytest

from penstock.dataset.decode_columns import decode_ints, decode_jsons, decode_texts
from penstock.dataset.ragged import Ragged, rows_at


def column(values: list[bytes]) -> Ragged:
    lengths = np.array([len(v) for v in values], np.int64)
    return Ragged(np.frombuffer(b"".join(values), np.uint8), np.cumsum(lengths) - lengths, lengths)


@pytest.mark.parametrize(
    "texts",
    [
        [b"[1", b"2]", b"3,4"],
        [b"1,2", b""],
        [b"1 2", b"3"],
        [b'"a', b'b"', b'1,"x",2'],
        [b"1]", b"[2"],
        [b"", b"1"],
        [b"NaN", b"1"],
        [b'{"a":1', b'"b":2}'],
    ],
)
def test_texts_that_are_json_only_together_are_not_json(texts: list[bytes]) -> None:
    assert decode_jsons(column(texts), np.empty) is None


@pytest.mark.parametrize(
    ("decode", "values", "expected"),
    [
        (decode_jsons, [b' {"a": 1}\n', b"null", b"[1,\n2]"], [{"a": 1}, None, [1, 2]]),
        (decode_jsons, [b"7"], [7]),
        (decode_ints, [b" 7\n", b"-3", b"1_0", b"9" * 30], [7, -3, 10, int("9" * 30)]),
        (decode_ints, [b"1\x002", b""], None),
        (decode_ints, [b"1", b""], None),
        (decode_texts, [b"", "é".encode(), b"a"], ["", "é", "a"]),
        (decode_texts, [b"\xc3", b"\xa9"], None),
        (decode_texts, [b"a\0b", b"c"], None),
    ],
)
def test_a_column_has_the_values_of_its_texts(decode: Any, values: Any, expected: Any) -> None:
    assert decode(column(values), np.empty) == expected


@pytest.mark.parametrize("width", [0, 1, 7, 5000])
def test_ranges_of_one_width_become_rows(width: int) -> None:
    data = np.arange(20_000, dtype=np.uint16)
    starts = np.array([9, 0, 20_000 - width, 9])
    rows = rows_at(data, starts, width)
    assert rows.shape == (4, width)
    assert all((row == data[s : s + width]).all() for row, s in zip(rows, starts, strict=True))
    with pytest.raises((IndexError, ValueError)):
        rows_at(data, starts + 1 + (width == 0), width)
