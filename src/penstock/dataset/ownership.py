"""Memory that a user may write to.

Samples are cut out of memory that others read as well: a decompressed block that later batches use
again, bytes of a store, a file that is mapped. A transform may change what it gets in place, so
whatever leaves Penstock is a copy unless nobody else has its memory.

Two rules ensure this for every format. Shared bytes are handed out read-only, so an array that can
be written to is the user's own. And everything that a block hands out counts as shared, because
blocks are kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np

CHANGEABLE = (np.ndarray, np.void, dict, list, tuple, memoryview)
"""Kinds of values that can be changed in place, or hold such values."""


def owned(value: Any) -> Any:
    """Return a value that shares no memory with the block it came from."""
    if isinstance(value, np.ndarray | np.void):
        return value.copy()
    if isinstance(value, memoryview):
        return memoryview(bytearray(value))
    kind = type(value)
    if kind is dict:
        return {name: owned(inner) for name, inner in value.items()}
    if kind is list or kind is tuple:
        return kind(map(owned, value))
    return value


def writable(value: Any) -> Any:
    """Return what a format or decoder made of some bytes, copied where these are shared."""
    if isinstance(value, np.ndarray):
        return value if value.flags.writeable else value.copy()
    if isinstance(value, memoryview):
        return memoryview(bytearray(value)) if value.readonly else value
    # Decoders return lists of images; other lists and dictionaries, such as JSON, are fresh.
    if type(value) is list and value and isinstance(value[0], np.ndarray):
        return [writable(inner) for inner in value]
    return value
