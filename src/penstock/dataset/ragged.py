"""Columns: the values of one field for many samples, before they are a batch.

A column is one of three things: an array with a row for each sample, a `Ragged`, or a list with an
entry for each sample. Formats and blocks return columns where they can; a sample at a time is the
way for everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
NewArray = Callable[[tuple[int, ...], npt.DTypeLike], npt.NDArray[Any]]
"""Returns an uninitialised array of a shape and type."""
_LOOP_BYTES = 4096
"""From this width on, copying a row takes longer than the call that starts the copy. So rows are
copied one by one, directly into the memory that the caller provides."""


class Ragged(NamedTuple):
    """Values of different lengths that lie in one array."""

    data: npt.NDArray[Any]
    starts: Ints
    lengths: Ints
    """-1 where a sample lacks the field."""
    is_bytes: bool = True
    """Whether values are encoded bytes; else each is an array."""

    def views(self) -> list[Any]:
        """Return the values, None where a sample has none; bytes as views of memory."""
        data = self.data.data if self.is_bytes else self.data
        return [
            data[start : start + length] if length >= 0 else None
            for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True)
        ]

    def joined(self, separator: bytes) -> bytes:
        """Return all bytes with a separator between two values."""
        return separator.join(self.views())

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return int(np.maximum(self.lengths, 0).sum()) * self.data.itemsize

    def rows(self, new: NewArray) -> npt.NDArray[Any]:
        """Return values of one length as the rows of one array."""
        return rows_at(self.data, self.starts, int(self.lengths[0]), new)


class TakenRows(NamedTuple):
    """Some rows of an array that others use as well."""

    source: npt.NDArray[Any]
    chosen: Ints

    def array(self) -> npt.NDArray[Any]:
        """Return the rows as an array of their own."""
        taken: npt.NDArray[Any] = self.source[self.chosen]
        return taken


Column = npt.NDArray[Any] | Ragged | TakenRows | list[Any]
FieldColumns = dict[str, Column]


def rows_at(
    data: npt.NDArray[Any], starts: Ints, width: int, new: NewArray = np.empty
) -> npt.NDArray[Any]:
    """Return the `width` elements behind each start as the rows of one array.

    >>> rows_at(np.arange(9), np.array([6, 1]), 2)
    array([[6, 7],
           [1, 2]])
    """
    if width * data.itemsize < _LOOP_BYTES:
        # All windows of the array, overlapping: indexing copies the chosen ones in one call.
        shape = (max(0, len(data) - width + 1), width)
        strides = (data.itemsize, data.itemsize)
        chosen: npt.NDArray[Any] = np.ndarray(shape, data.dtype, data.data, 0, strides)[starts]
        return chosen
    out = new((len(starts), width), data.dtype)
    for row, start in zip(out, starts.tolist(), strict=True):
        row[:] = data[start : start + width]
    return out
