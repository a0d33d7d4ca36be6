"""The fields of a batch from the columns of its parts: decoded, in the order of the batch.

The result of a field equals what `Sinks` makes of single values: one array where all have one type
and shape, numbers as one array, bytes as cuts of one buffer, all else as a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.dataset.bound import BoundPart
from penstock.dataset.decode_columns import number_column
from penstock.dataset.fields import COLUMN_DECODERS, Decoder, is_raw
from penstock.dataset.ownership import owned, writable
from penstock.dataset.part import Ints
from penstock.dataset.ragged import Column, FieldColumns, Ragged, TakenRows
from penstock.engine.buffers import BufferPool, Bytes
from penstock.engine.cuts import Cuts
from penstock.engine.reads import copy_rows
from penstock.engine.runner import size_of
from penstock.engine.sinks import Sinks

_ENTRY_BYTES = 64
"""Memory of an entry of a list beside its own bytes."""
_NUM_MEASURED = 16
"""Entries of a list that are measured, to estimate its memory."""
_NUMBERS = frozenset({bool, int, float})
_UNCHANGEABLE = frozenset({str, type(None)}) | _NUMBERS
_PLAIN = frozenset({dict, list}) | _UNCHANGEABLE
"""Types of values that are neither arrays nor bytes, which a batch joins."""

_Parts = Sequence[tuple[Ints, Column]]


class ColumnPart(NamedTuple):
    """The columns of some samples of a batch."""

    bound: BoundPart
    where: Ints
    """Their places in the batch."""
    ids: Ints
    """Their numbers in the part."""
    columns: FieldColumns


class SizedFields(dict[str, Any]):
    """Fields of a batch that know their size, so that nobody has to walk through lists."""

    nbytes: int = 0


class BatchFields:
    """Makes the fields of one batch.

    Columns that lie in `buffer` belong to this batch; all others are shared with other batches, and
    copied.
    """

    def __init__(
        self,
        parts: Sequence[ColumnPart],
        num_samples: int,
        pool: BufferPool,
        buffer: Bytes | None,
    ) -> None:
        self._parts = parts
        self._num_samples = num_samples
        self._pool = pool
        self._buffer = buffer

    def made(self) -> SizedFields:
        """Return all fields, decoded."""
        out = SizedFields()
        for bound in {id(p.bound): p.bound for p in self._parts}.values():
            for f in bound.part.fields:
                if f.name not in out:
                    step = bound.steps.get(f.name)
                    value, size_bytes = self._field(f.name, step[1] if step else None)
                    out[f.name] = value
                    out.nbytes += size_bytes
        return out

    def _field(self, name: str, decoder: Decoder | None) -> tuple[Any, int]:
        """Return the values of a field in the order of the batch, and their size."""
        parts = [(p.where, p.columns[name]) for p in self._parts if name in p.columns]
        columns = [column for _, column in parts]
        made: Any = None
        size_bytes = 0
        if all(isinstance(column, Ragged) for column in columns):
            ragged = self._joined(parts)
            if ragged is not None:
                made, size_bytes = self._of_ragged(ragged, decoder), ragged.nbytes
        elif all(isinstance(column, list) for column in columns):
            made = self._of_lists(parts) if decoder is None else None
        elif all(isinstance(column, np.ndarray | TakenRows) for column in columns):
            made = self._of_arrays(parts)
        if made is None:
            made = self._by_sample(name)
        return made, _size_of(made, size_bytes)

    # -- ragged columns ----------------------------------------------------------------------

    def _joined(self, parts: _Parts) -> Ragged | None:
        """Return all values in one array of the batch's own; None where their types differ."""
        columns = [column for _, column in parts if isinstance(column, Ragged)]
        if len({(c.data.dtype, c.is_bytes) for c in columns}) != 1:
            return None
        starts, lengths = np.zeros((2, self._num_samples), np.int64)
        lengths[:] = -1
        for (where, _), column in zip(parts, columns, strict=True):
            starts[where], lengths[where] = column.starts, column.lengths
        sizes = np.maximum(lengths, 0)
        if all(column.data is self._buffer for column in columns):
            # Starts of cuts must rise, so an absent value starts where the one before it ends.
            ends = np.maximum.accumulate(starts + sizes)
            return Ragged(columns[0].data, np.where(lengths < 0, ends, starts), lengths)
        ends = np.cumsum(sizes)
        target = self._pool.array((int(ends[-1]),), columns[0].data.dtype)
        for (where, _), column in zip(parts, columns, strict=True):
            _copy_ragged(column, target, (ends - sizes)[where])
        return Ragged(target, ends - sizes, lengths, columns[0].is_bytes)

    def _of_ragged(self, ragged: Ragged, decoder: Decoder | None) -> Any:
        if not ragged.is_bytes:
            return self._arrays(ragged)
        if decoder is None or is_raw(decoder):
            return Cuts(ragged.data, ragged.starts, ragged.lengths)
        present = np.flatnonzero(ragged.lengths >= 0)
        if not len(present):
            return [None] * self._num_samples
        is_whole = len(present) == self._num_samples
        chosen = Ragged(ragged.data, ragged.starts[present], ragged.lengths[present])
        values = COLUMN_DECODERS[decoder](chosen, self._pool.array)
        if isinstance(values, list):
            return _plain_column(values if is_whole else self._spread([(present, values)]))
        return values if is_whole else None

    def _arrays(self, ragged: Ragged) -> Any:
        """Return arrays of one axis; as one array if all have one length."""
        lengths = ragged.lengths
        if (lengths == lengths[0]).all() and lengths[0] >= 0:
            return ragged.data.reshape(len(lengths), int(lengths[0]))
        return ragged.views()

    # -- other columns -----------------------------------------------------------------------

    def _spread(self, parts: Sequence[tuple[Ints, list[Any]]]) -> list[Any]:
        """Return lists of values as one, in the order of the batch; None for absent values."""
        out: list[Any] = [None] * self._num_samples
        for where, values in parts:
            for i, value in zip(where.tolist(), values, strict=True):
                out[i] = value
        return out

    def _of_lists(self, parts: _Parts) -> Any:
        values = self._spread([(where, c) for where, c in parts if isinstance(c, list)])
        kinds = set(map(type, values))
        if not kinds <= _PLAIN:
            return None
        is_shared = self._buffer is None and not kinds <= _UNCHANGEABLE
        return _plain_column(owned(values) if is_shared else values)

    def _of_arrays(self, parts: _Parts) -> npt.NDArray[Any] | None:
        """Return rows as one array; None if types or shapes differ or a sample has no row."""
        if sum(len(where) for where, _ in parts) != self._num_samples:
            return None
        if len(parts) == 1 and isinstance(parts[0][1], np.ndarray) and _is_order(parts[0][0]):
            return parts[0][1]  # Made for this batch alone.
        whole = [
            TakenRows(column, np.arange(len(where))) if isinstance(column, np.ndarray) else column
            for where, column in parts
            if isinstance(column, np.ndarray | TakenRows)
        ]
        shapes = {(rows.source.dtype, rows.source.shape[1:]) for rows in whole}
        dtype, shape = next(iter(shapes))
        if len(shapes) != 1 or not dtype.isnative:
            return None
        out = self._pool.array((self._num_samples, *shape), dtype)
        if len(whole) == 1:
            copy_rows(whole[0].source, whole[0].chosen, out, parts[0][0])
            return out
        # Rows are collected block by block first and then permuted with one call: scattering the
        # few rows of each block takes a slow call for each block.
        taken, at = np.empty_like(out), 0
        for rows in whole:
            end = at + len(rows.chosen)
            copy_rows(rows.source, rows.chosen, taken, np.arange(at, end))
            at = end
        order = np.argsort(np.concatenate([where for where, _ in parts]))
        taken.take(order, axis=0, out=out, mode="clip")
        return out

    # -- one by one --------------------------------------------------------------------------

    def _by_sample(self, name: str) -> Any:
        """Return a field, with its values decoded and joined one by one."""
        sinks = Sinks(self._num_samples, self._pool)
        own = writable
        for part in self._parts:
            f = next((f for f in part.bound.part.fields if f.name == name), None)
            if f is None:
                continue
            if part.bound.by_block and name not in part.bound.steps:
                own = owned
            for i, local_id, value in zip(
                part.where.tolist(), part.ids.tolist(), _values(part.columns[name]), strict=True
            ):
                sinks.put(i, {name: part.bound.decoded_field(f, value, local_id)})
        made = sinks.fields({})[name]
        return [own(value) for value in made] if isinstance(made, list) else made


def _copy_ragged(column: Ragged, target: npt.NDArray[Any], starts: Ints) -> None:
    data = column.data
    for at, start, length in zip(
        starts.tolist(), column.starts.tolist(), column.lengths.tolist(), strict=True
    ):
        if length > 0:
            target[at : at + length] = data[start : start + length]


def _is_order(where: Ints) -> bool:
    """Return whether places are 0, 1, 2, …"""
    return bool((where == np.arange(len(where))).all())


def _values(column: Column) -> list[Any]:
    if isinstance(column, Ragged):
        return column.views()
    return list(column.array() if isinstance(column, TakenRows) else column)


def _plain_column(values: list[Any]) -> Any:
    """Return values that are neither arrays nor bytes; numbers become an array."""
    return number_column(values) if set(map(type, values)) <= _NUMBERS else values


def _size_of(value: Any, size_bytes: int) -> int:
    """Return the memory of a field.

    For values that were decoded to a list it is `size_bytes`, the size of their bytes; if that is
    0, it is estimated from some of the values.
    """
    if not isinstance(value, list):
        return size_of(value)
    if not size_bytes:
        some = value[:: max(1, len(value) // _NUM_MEASURED)]
        size_bytes = size_of(some) * len(value) // len(some)
    return size_bytes + _ENTRY_BYTES * len(value)
