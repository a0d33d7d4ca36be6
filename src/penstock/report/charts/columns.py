"""Columns of numbers inside of a page: short ones as JSON, long ones packed.

A packed column has integers of `bits` bits, spread over the range of its values; a column on a
logarithmic axis is spread by its logarithms, so that small values keep their digits. A column that
never falls stores differences, which compress well, and may have more bits for that reason. Bytes
of one weight stand together, then all is deflated and written in base64. `web/charts.js` undoes
this with the browser's DecompressionStream.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = Sequence[float] | npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float64]

PLAIN_MAX = 1500
"""Values of a column that is written as JSON."""
_BITS = 16
_SORTED_BITS = 18
"""Differences of 18 bits take less room than values of 16, and a zoom sees four times as much."""


def floats_of(values: Numbers) -> Floats:
    """Return a column of floats.

    >>> floats_of([1, 2])
    array([1., 2.])
    """
    column = np.asarray(values, np.float64)
    if column.ndim != 1:
        raise ValueError(f"a column of a chart has one dimension, got {column.ndim}")
    return column


def check_lengths(where: str, **columns: Numbers | Sequence[str] | None) -> None:
    """Refuse columns that do not have the same length."""
    lengths = {name: len(column) for name, column in columns.items() if column is not None}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns of {where} have different lengths: {lengths}")


def column_spec(
    values: Numbers, *, log: bool = False, bits: int = 0
) -> list[float | None] | dict[str, Any]:
    """Return a column as the page's script reads it: a list, or a packed column.

    `bits` is 1 to 32, or 0 for as many as a screen and a zoom need.

    >>> column_spec([1.0, float("nan"), 1 / 3])
    [1.0, None, 0.33333333]
    """
    column = floats_of(values)
    if len(column) <= PLAIN_MAX:
        return [float(f"{v:.8g}") if math.isfinite(v) else None for v in column.tolist()]
    return _packed(column, log=log, bits=bits)


def _packed(column: Floats, *, log: bool, bits: int) -> dict[str, Any]:
    if log:
        with np.errstate(divide="ignore", invalid="ignore"):
            column = np.log(column)
    is_known = np.isfinite(column)
    known = column[is_known]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
    is_sorted = bool(is_known.all()) and bool((np.diff(column) >= 0).all())
    bits = bits or (_SORTED_BITS if is_sorted else _BITS)
    # The largest code means that there is no value.
    codes = np.full(len(column), 2**bits - 1, np.uint32)
    codes[is_known] = np.rint((known - low) * ((2**bits - 2) / ((high - low) or 1.0)))
    if is_sorted:
        codes = np.diff(codes, prepend=np.uint32(0))
    num_planes = -(-bits // 8)
    planes = codes.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :num_planes].T
    data = zlib.compress(np.ascontiguousarray(planes).tobytes(), 9)
    return {
        "packed": base64.b64encode(data).decode("ascii"),
        "length": len(column),
        "bits": bits,
        "is_delta": is_sorted,
        "is_log": log,
        "low": low,
        "high": high,
    }
