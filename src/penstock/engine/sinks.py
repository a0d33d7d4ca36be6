"""The fields of a batch while the values of its samples arrive.

Arrays, tensors and images of one type and shape are copied side by side into one leased buffer, by
the thread that made them. Numbers become one array. Bytes become pieces of one buffer. Everything
else is a list with one entry a sample.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.engine.buffers import BufferPool
from penstock.engine.convert import Special, array_of, special_of
from penstock.engine.cuts import Cuts
from penstock.errors import DatasetError, OptionError

_NUMBERS = (bool, int, float, complex, np.generic)
_BYTES = (bytes, bytearray, memoryview)


Layout = dict[str, tuple[tuple[int, ...], np.dtype[Any], Special | None]]
"""Shape and type of the values of fields; the third is a type of torch's that NumPy lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldPiece:
    """The values that one field has in some samples, as another process sends them."""

    in_place: bytes = b""
    """One byte a sample: 1 if its value was written into the batch's array."""
    stacked: npt.NDArray[Any] | None = None
    """All values, if they have one type and shape and the batch had no array for them."""
    special: Special | None = None
    values: Mapping[int, Any] = field(default_factory=dict)
    """All other values, by the number of the sample in the piece."""


Pieces = dict[str, FieldPiece]
"""The values that a worker has made of some samples, by field."""


class Sinks:
    """The fields of one batch while its samples arrive, from several threads and in any order."""

    def __init__(self, num_samples: int, pool: BufferPool) -> None:
        self._num_samples = num_samples
        self._pool = pool
        self._lock = threading.Lock()
        """Held while a sink or its array is made: several threads may bring its first value."""
        self._sinks: dict[str, FieldSink] = {}

    def put(self, i: int, sample: Mapping[str, Any]) -> None:
        """Take sample i of the batch."""
        for name, value in sample.items():
            self._sink(name).put(i, value)

    def expect(self, layout: Layout) -> None:
        """Prepare arrays for fields that will probably have these shapes and types."""
        for name, (shape, kind, special) in layout.items():
            self._sink(name).prepare(shape, kind, special)

    def take(self, places: list[int], pieces: Mapping[str, FieldPiece]) -> None:
        """Take some samples that another process has made."""
        for name, piece in pieces.items():
            self._sink(name).take(places, piece)

    def arrays(self) -> dict[str, tuple[npt.NDArray[Any], Special | None]]:
        """Return the arrays that samples can be written into, by field."""
        return {n: found for n, s in list(self._sinks.items()) if (found := s.array) is not None}

    def layout(self) -> Layout:
        """Return shape and type of the fields whose values all lie in one array."""
        return {n: found for n, s in self._sinks.items() if (found := s.layout) is not None}

    def _sink(self, name: str) -> FieldSink:
        sink = self._sinks.get(name)
        if sink is None:
            with self._lock:
                new = FieldSink(name, self._num_samples, self._pool, self._lock)
                sink = self._sinks.setdefault(name, new)
        return sink

    def fields(self, padding: Mapping[str, Any]) -> dict[str, Any]:
        """Return all fields; those named in `padding` as one array with short samples filled up."""
        names = [name for name, sink in self._sinks.items() if sink.has_values]
        for name in padding.keys() - set(names):
            raise DatasetError(f"pad= names a field {name!r}, samples have: {', '.join(names)}")
        return {
            name: sink.padded(padding[name]) if name in padding else sink.result()
            for name, sink in self._sinks.items()
            if sink.has_values
        }


class FieldSink:
    """One field of one batch."""

    def __init__(self, name: str, num_samples: int, pool: BufferPool, lock: threading.Lock) -> None:
        self._name = name
        self._num_samples = num_samples
        self._pool = pool
        self._lock = lock
        self._array: npt.NDArray[Any] | None = None
        self._special: Special | None = None
        """Type of the array's elements, where that is one of torch's that NumPy lacks."""
        self._others: dict[int, Any] = {}
        """Values that do not fit the array, by place."""
        self._in_array = bytearray(num_samples)
        """1 where the array holds a sample's value."""

    def put(self, i: int, value: Any) -> None:
        """Take the value of sample i."""
        found = array_of(value, self._name)
        if found is None:
            self._others[i] = value
            return
        array, special = found
        target = self._array
        if target is None:
            target = self.prepare(array.shape, array.dtype, special)
        fits = target.shape[1:] == array.shape and target.dtype == array.dtype
        if fits and special is self._special:
            target[i] = array
            self._in_array[i] = 1
        else:
            self._others[i] = array if special is None else special_of(array, special)

    def prepare(
        self, shape: tuple[int, ...], kind: np.dtype[Any], special: Special | None
    ) -> npt.NDArray[Any]:
        """Return the array of the values; made for this shape and type if there is none."""
        with self._lock:
            if self._array is None:
                self._special = special
                # The array is set last: a thread that sees it without the lock sees its type.
                self._array = self._pool.array((self._num_samples, *shape), kind)
            return self._array

    @property
    def array(self) -> tuple[npt.NDArray[Any], Special | None] | None:
        """The array that values are written into, once there is one."""
        return None if self._array is None else (self._array, self._special)

    @property
    def layout(self) -> tuple[tuple[int, ...], np.dtype[Any], Special | None] | None:
        """Shape and type of the values, where all of them lie in the array."""
        if self._array is None or not all(self._in_array):
            return None
        return self._array.shape[1:], self._array.dtype, self._special

    @property
    def has_values(self) -> bool:
        """Whether any sample had this field."""
        return bool(self._others) or any(self._in_array)

    def take(self, places: list[int], piece: FieldPiece) -> None:
        """Take the values of some samples."""
        if piece.stacked is not None:
            self._take_stacked(places, piece.stacked, piece.special)
        for i, is_here in zip(places, piece.in_place, strict=False):
            if is_here:
                self._in_array[i] = 1
        for j, value in piece.values.items():
            self.put(places[j], value)

    def _take_stacked(
        self, places: list[int], stacked: npt.NDArray[Any], special: Special | None
    ) -> None:
        target = self.prepare(stacked.shape[1:], stacked.dtype, special)
        fits = target.shape[1:] == stacked.shape[1:] and target.dtype == stacked.dtype
        if fits and special is self._special:
            target[places] = stacked
            for i in places:
                self._in_array[i] = 1
            return
        for j, i in enumerate(places):
            value = stacked[j, ...]
            self._others[i] = value if special is None else special_of(value, special)

    def values(self) -> list[Any]:
        """Return the values one by one, None where a sample had none.

        An array without axes stays an array, whether or not it came first in its batch.
        """
        rows = None if self._array is None else self._restored(self._array)
        in_array = self._in_array
        return [
            rows[i, ...] if rows is not None and in_array[i] else self._others.get(i)
            for i in range(self._num_samples)
        ]

    def _restored(self, array: npt.NDArray[Any]) -> Any:
        """Return the array, or the same memory as a tensor where NumPy lacks its type."""
        return array if self._special is None else special_of(array, self._special)

    def result(self) -> Any:
        """Return one array if all values have one type and shape, else a list."""
        if self._array is not None and all(self._in_array):
            return self._restored(self._array)
        values = self.values()
        if all(isinstance(v, _NUMBERS) for v in values):
            return _numbers(values)
        if all(v is None or isinstance(v, _BYTES) for v in values):
            return self._pieces(values)
        # A memoryview looks into memory that the batch does not own.
        return [bytes(v) if isinstance(v, memoryview) else v for v in values]

    def _pieces(self, values: list[Any]) -> Any:
        """Return bytes as pieces of one buffer, as `ColumnMaker` does."""
        if all(v is None for v in values):
            return values
        arrays = [np.frombuffer(b"" if v is None else v, np.uint8) for v in values]
        ends = np.cumsum([len(a) for a in arrays], dtype=np.int64)
        buffer = self._pool.array((int(ends[-1]),), np.uint8)
        if len(buffer):
            np.concatenate(arrays, out=buffer)
        lengths = [-1 if v is None else len(a) for v, a in zip(values, arrays, strict=True)]
        starts = ends - np.array([len(a) for a in arrays], np.int64)
        return Cuts(buffer, starts, np.array(lengths, np.int64))

    def padded(self, fill: Any) -> Any:
        """Return one array; each axis is as long as the longest sample needs."""
        found = [self._to_pad(v) for v in self.values()]
        arrays, specials = [array for array, _ in found], {special for _, special in found}
        ranks, kinds = {a.ndim for a in arrays}, {a.dtype for a in arrays}
        if len(ranks) != 1 or len(specials) != 1 or (len(kinds) > 1 and specials != {None}):
            names = sorted({str(special or a.dtype) for a, special in found})
            raise DatasetError(
                f"field {self._name!r} cannot be padded: samples have {sorted(ranks)} axes and "
                f"types {names}; a transform can bring them to one"
            )
        shape = tuple(int(max(n)) for n in zip(*(a.shape for a in arrays), strict=True))
        special = specials.pop()
        kind = np.result_type(*kinds)
        if special is None:
            _check_fill(self._name, fill, kind)
        out = self._pool.array((self._num_samples, *shape), kind)
        result = out if special is None else special_of(out, special)
        result[...] = fill
        for row, array in zip(out, arrays, strict=True):
            row[tuple(slice(0, n) for n in array.shape)] = array
        return result

    def _to_pad(self, value: Any) -> tuple[npt.NDArray[Any], Special | None]:
        """Return the value of one sample as an array of numbers."""
        found = array_of(value, self._name)
        if found is None and isinstance(value, _BYTES):
            found = np.frombuffer(value, np.uint8), None
        if found is None and isinstance(value, (*_NUMBERS, list, tuple)):
            with suppress(ValueError):  # A list of lists of different lengths.
                found = np.asarray(value), None
        if found is None or found[0].dtype.kind not in "biufc":
            what = "no value in one sample" if value is None else f"values of {type(value)}"
            raise DatasetError(
                f"field {self._name!r} cannot be padded: it has {what}; pad= fills up arrays and "
                "lists of numbers"
            )
        return found


def _numbers(values: list[Any]) -> Any:
    """Return numbers as an array, or unchanged if no type of NumPy holds them all."""
    array = np.array(values)
    if array.dtype.kind == "f" and all(isinstance(v, int | np.integer) for v in values):
        return values  # NumPy turns -1 and 2**63 into floats, which lose digits.
    return values if array.dtype == object else array


def _check_fill(name: str, fill: Any, kind: np.dtype[Any]) -> None:
    """Refuse a value that an array of some type cannot hold, and would round or wrap."""
    if kind.kind == "f" and not isinstance(fill, complex):
        return
    if kind.kind == "c" or (kind.kind == "b" and fill in (0, 1)):
        return
    if kind.kind in "iu" and not isinstance(fill, complex) and float(fill).is_integer():
        limits = np.iinfo(kind)
        if limits.min <= fill <= limits.max:
            return
    raise OptionError(
        f"pad={{{name!r}: {fill!r}}}: the field holds {kind} numbers, and {fill!r} is none; give a "
        "value of that type, or make the field another one in a transform"
    )
