"""How large a batch of a foreign loader is, whatever it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DEPTH_MAX = 4
_ITEMS_MAX = 256
_PLAIN = frozenset({int, float, bool, type(None)})
_TEXTS = frozenset({bytes, bytearray, str})


def batch_size_of(batch: Any) -> tuple[int, int]:
    """Return samples and bytes of a batch, as far as its tensors and arrays tell.

    >>> import numpy as np
    >>> batch_size_of({"image": np.zeros((4, 3), np.uint8), "label": np.zeros(4, np.int64)})
    (4, 44)
    >>> batch_size_of([b"ab", b"cde"])
    (2, 5)
    """
    count, size_bytes = _measured(batch, 0)
    if not count and isinstance(batch, list | tuple):
        count = len(batch)
    return count, size_bytes


def _measured(value: Any, depth: int) -> tuple[int, int]:
    kind = type(value)
    if kind in _PLAIN:
        return 0, 0
    if kind in _TEXTS:
        return 0, len(value)
    if isinstance(value, list | tuple):
        return _sum(value[:_ITEMS_MAX], depth) if depth < _DEPTH_MAX else (0, 0)
    size = getattr(value, "nbytes", None)
    if isinstance(size, int):
        shape: Any = getattr(value, "shape", ())
        return (int(shape[0]) if len(shape) else 1), size
    if depth < _DEPTH_MAX and isinstance(value, Mapping):
        return _sum(list(value.values())[:_ITEMS_MAX], depth)
    return 0, 0


def _sum(values: Any, depth: int) -> tuple[int, int]:
    count = size_bytes = 0
    for value in values:
        inner_count, inner_bytes = _measured(value, depth + 1)
        count = max(count, inner_count)
        size_bytes += inner_bytes
    return count, size_bytes
