"""Checks that all formats share: errors are Penstock's own, and samples lie inside their objects.

Formats parse what others wrote. They check what they can name; whatever else a damaged file makes
them raise (a `struct.error`, a `RecursionError`, …) becomes a `FormatError` here, with the original
as its cause. An `AssertionError` passes: it is a mistake of ours, not of the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from penstock.dataset.formats.base import (
    Block,
    Bytes,
    ColumnBlock,
    ColumnFormat,
    Format,
    Options,
    Sample,
    Unit,
)
from penstock.dataset.part import Ints, Part, Table
from penstock.dataset.ragged import FieldColumns
from penstock.errors import DatasetError, FormatError, PenstockError
from penstock.storage.base import ObjectInfo, Store

_IDS_AT_ONCE = 1 << 20
"""Samples that are checked at once, so that the check of a large shard takes little memory."""


class CheckedFormat:
    """Another format, behind the checks that all formats share."""

    def __init__(self, inner: Format) -> None:
        self.inner = inner
        self._by_column = inner if isinstance(inner, ColumnFormat) else None
        self.name = inner.name
        self.options = inner.options

    def claims(self, key: str) -> bool:
        """Return whether an object of that name belongs to the format."""
        return self.inner.claims(key)

    def units(self, objects: Sequence[ObjectInfo], store: Store, options: Options) -> list[Unit]:
        """Return the units of a data set."""
        with own_errors(f"{store.uri} cannot be read as {self.name}"):
            return self.inner.units(objects, store, options)

    def scan(self, unit: Unit, store: Store, options: Options) -> Part:
        """Return where the samples of a unit lie: inside the objects of the unit."""
        where = f"{store.uri}{unit.objects[0].key}"
        with own_errors(f"{where} cannot be read as {self.name}"):
            part = self.inner.scan(unit, store, options)
            for table in part.tables:
                _refuse_outside(table, store)
        return part

    def split(self, part: Part, ids: Ints, raws: Sequence[Sequence[memoryview]]) -> list[Sample]:
        """Return the fields of samples that are addressed alone."""
        try:  # Not `own_errors`: a context manager takes as long as a small sample.
            return self.inner.split(part, ids, raws)
        except (PenstockError, AssertionError):
            raise
        except Exception as error:
            raise _own("its bytes cannot be cut into fields", error) from error

    def has_columns(self, part: Part) -> bool:
        """Return whether fields of many samples can be had at once."""
        return self._by_column is not None and self._by_column.has_columns(part)

    def columns(
        self, part: Part, ids: Ints, data: Bytes, starts: Ints, lengths: Ints
    ) -> FieldColumns | None:
        """Return the fields of samples that are addressed alone; None where `split` must."""
        assert self._by_column is not None
        try:
            return self._by_column.columns(part, ids, data, starts, lengths)
        except Exception:  # `split` says which sample it is, and what is wrong with it.
            return None

    def unpack(self, part: Part, number: int, offset: int, raw: memoryview) -> Block:
        """Return a block from its bytes."""
        with own_errors(f"a block of {len(raw)} bytes cannot be unpacked"):
            return self.inner.unpack(part, number, offset, raw)


class PlacedBlock:
    """A block whose errors name the object and the row."""

    def __init__(self, inner: Block, where: str) -> None:
        self._inner = inner
        self._by_column = inner if isinstance(inner, ColumnBlock) else None
        self._where = where

    @property
    def size_bytes(self) -> int:
        """Memory it takes while it is kept."""
        return self._inner.size_bytes

    def sample(self, row: int) -> Sample:
        """Return one sample of the block."""
        try:
            return self._inner.sample(row)
        except DatasetError as error:
            raise type(error)(f"{self._where}, row {row}: {error}") from error
        except (PenstockError, AssertionError):
            raise
        except Exception as error:
            raise _own(f"{self._where}, row {row}: the sample cannot be read", error) from error

    def columns(self, rows: Ints) -> FieldColumns | None:
        """Return the fields of some samples at once; None where `sample` must."""
        if self._by_column is None:
            return None
        try:
            return self._by_column.columns(rows)
        except Exception:  # `sample` says which row it is, and what is wrong with it.
            return None


@contextmanager
def own_errors(what: str) -> Iterator[None]:
    """Turn an error that is not one of `penstock.errors` into a `FormatError` that says `what`."""
    try:
        yield
    except (PenstockError, AssertionError):
        raise
    except Exception as error:
        raise _own(what, error) from error


def _own(what: str, error: Exception) -> FormatError:
    cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return FormatError(f"{what}: it is damaged, or of another kind ({cause}); copy it anew")


def _refuse_outside(table: Table, store: Store) -> None:
    """Raise when an extent does not lie inside its object, whatever a file claims."""
    ids = _telling_ids(table)
    for start in range(0, len(ids), _IDS_AT_ONCE):
        found = table.extents(ids[start : start + _IDS_AT_ONCE])
        sizes = table.sizes[found.object]
        # Not `offset + length > size`: numbers of a damaged file may overflow.
        bad = (found.offset < 0) | (found.length < 0) | (found.offset > sizes - found.length)
        if bad.any():
            first = int(bad.argmax())
            raise FormatError(
                f"{store.uri}{table.key(int(found.object[first]))} is cut off or damaged: "
                f"{found.length[first]} bytes are expected at {found.offset[first]}, the object "
                f"has {sizes[first]} bytes; copy it anew"
            )


def _telling_ids(table: Table) -> Ints:
    """Return samples that cover all extents: if these lie inside their objects, all do."""
    if table.addressing == "blocks":
        starts = table.block_starts()
        return starts[:-1][np.diff(starts) > 0]
    if table.addressing == "even":
        return table.first_sample[1:][np.diff(table.first_sample) > 0] - 1
    return np.arange(table.num_samples, dtype=np.int64)
