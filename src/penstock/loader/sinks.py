"""Where decoded samples go: straight into the batch's array while shapes agree, into a list when
not."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import DatasetError
from penstock.loader.buffers import BufferPool

_NUMBERS = (bool, int, float, complex, np.generic)


class Sinks:
    """The fields of one batch while its samples arrive, from several threads and in any order."""

    def __init__(self, num_samples: int, pool: BufferPool) -> None:
        self._num_samples = num_samples
        self._pool = pool
        self._lock = threading.Lock()
        self._sinks: dict[str, FieldSink] = {}

    def put(self, i: int, sample: Mapping[str, Any]) -> None:
        """Take sample i of the batch."""
        for name, value in sample.items():
            sink = self._sinks.get(name)
            if sink is None:
                with self._lock:
                    sink = self._sinks.setdefault(
                        name, FieldSink(self._num_samples, self._pool, self._lock)
                    )
            sink.put(i, value)

    def fields(self, padding: Mapping[str, Any]) -> dict[str, Any]:
        """Return all fields; those named in `padding` as one array with short samples filled up."""
        for name in padding.keys() - self._sinks.keys():
            raise DatasetError(
                f"pad= names a field {name!r}, samples have: {', '.join(self._sinks)}"
            )
        return {
            name: sink.padded(name, padding[name]) if name in padding else sink.result()
            for name, sink in self._sinks.items()
        }


class FieldSink:
    """One field of one batch."""

    def __init__(self, num_samples: int, pool: BufferPool, lock: threading.Lock) -> None:
        self._num_samples = num_samples
        self._pool = pool
        self._lock = lock
        self._array: npt.NDArray[Any] | None = None
        self._others: dict[int, Any] = {}
        """Values that do not fit the array, by place."""
        self._in_array = bytearray(num_samples)
        """1 where the array holds a sample's value."""

    def put(self, i: int, value: Any) -> None:
        """Take the value of sample i."""
        if isinstance(value, np.ndarray) and value.dtype != object:
            array = self._array
            if array is None:
                with self._lock:
                    if self._array is None:
                        shape = (self._num_samples, *value.shape)
                        self._array = self._pool.array(shape, value.dtype)
                    array = self._array
            if array.shape[1:] == value.shape and array.dtype == value.dtype:
                array[i] = value
                self._in_array[i] = 1
                return
        self._others[i] = value

    def values(self) -> list[Any]:
        """Return the values one by one, None where a sample had none."""
        array, in_array = self._array, self._in_array
        return [
            array[i] if array is not None and in_array[i] else self._others.get(i)
            for i in range(self._num_samples)
        ]

    def result(self) -> Any:
        """Return one array if all values have one type and shape, else a list."""
        if all(self._in_array):
            return self._array
        values = self.values()
        if all(isinstance(v, _NUMBERS) for v in values):
            return np.array(values)
        return values

    def padded(self, name: str, fill: Any) -> npt.NDArray[Any]:
        """Return one array; each axis is as long as the longest sample needs."""
        values = [np.asarray(v) for v in self.values() if v is not None]
        if len(values) < self._num_samples:
            raise DatasetError(
                f"field {name!r} cannot be padded: {self._num_samples - len(values)} of "
                f"{self._num_samples} samples of the batch do not have it"
            )
        ranks = {v.ndim for v in values}
        kinds = {v.dtype for v in values}
        if len(ranks) != 1 or object in kinds:
            raise DatasetError(
                f"field {name!r} cannot be padded: samples have {sorted(ranks)} axes and types "
                f"{sorted(map(str, kinds))}"
            )
        shape = tuple(int(max(n)) for n in zip(*(v.shape for v in values), strict=True))
        kind = np.result_type(*kinds)
        out = self._pool.array((self._num_samples, *shape), kind)
        out.fill(fill)
        for row, value in zip(out, values, strict=True):
            row[tuple(slice(0, n) for n in value.shape)] = value
        return out
