"""How values of samples travel from a parser process: as msgpack, arrays as their raw bytes.

A value comes back as what it was: numbers of NumPy with their type, times with their offset, whole
numbers of any size, texts that are not UTF-8. A value of a class that is not listed here cannot
travel.
"""

from __future__ import annotations

import ast
import datetime
import decimal
import pickle
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from penstock.dataset.npy_header import dtype_text, plain_dtype
from penstock.storage.base import ObjectInfo

_TUPLE, _ARRAY, _SCALAR, _ODD, _PAIRS = 1, 2, 3, 4, 5
_PLAIN = (str, int, float, bool, bytes, type(None), memoryview)

_TEXTS: dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    int: (str, int),
    str: (
        lambda text: text.encode("utf-8", "surrogatepass").hex(),
        lambda digits: bytes.fromhex(digits).decode("utf-8", "surrogatepass"),
    ),
    decimal.Decimal: (str, decimal.Decimal),
    uuid.UUID: (str, uuid.UUID),
    datetime.datetime: (datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: (datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: (datetime.time.isoformat, datetime.time.fromisoformat),
    datetime.timedelta: (
        lambda span: f"{span.days} {span.seconds} {span.microseconds}",
        lambda text: datetime.timedelta(*map(int, text.split())),
    ),
}
"""Classes whose values travel as texts."""
_NAMED = {kind.__name__: kind for kind in _TEXTS}


class UnsendableError(TypeError):
    """A value is of a class that does not travel, or that the other process does not know."""


def unpickled(data: bytes | memoryview) -> Any:
    """Return what the caller has pickled, in a parser process; bytes of strangers never are."""
    try:
        return pickle.loads(data)
    except Exception as error:  # A module of the caller's may raise anything when it is imported.
        raise UnsendableError(f"{type(error).__name__}: {error}") from error


def pack_value(value: Any) -> bytes:
    """Return a value as bytes.

    >>> unpack_value(pack_value({"x": (1, np.float32(2)), "y": 10**30}))
    {'x': (1, np.float32(2.0)), 'y': 1000000000000000000000000000000}
    """
    return msgspec.msgpack.encode(_sendable(value))


def unpack_value(data: bytes | memoryview) -> Any:
    """Return the value that `pack_value` was given; its arrays are read-only."""
    return msgspec.msgpack.decode(data, ext_hook=_received)


def _sendable(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value if _is_msgpack(kind, value) else _odd(kind, value)
    if kind is dict:
        if all(type(key) in _PLAIN and _is_msgpack(type(key), key) for key in value):
            return {key: _sendable(inner) for key, inner in value.items()}
        # What msgpack has no place for cannot be a key of its maps either.
        pairs = [[_sendable(key), _sendable(inner)] for key, inner in value.items()]
        return msgspec.msgpack.Ext(_PAIRS, msgspec.msgpack.encode(pairs))
    if kind is list:
        return [_sendable(inner) for inner in value]
    if isinstance(value, tuple):
        inner = msgspec.msgpack.encode([_sendable(each) for each in value])
        return msgspec.msgpack.Ext(_TUPLE, inner)
    if isinstance(value, np.ndarray | np.generic):
        return msgspec.msgpack.Ext(_ARRAY if kind is np.ndarray else _SCALAR, _array_bytes(value))
    for known in _TEXTS:
        if isinstance(value, known) and not isinstance(value, int | str):
            return _odd(known, value)
    raise UnsendableError(f"{kind.__module__}.{kind.__qualname__}")


def _is_msgpack(kind: type, value: Any) -> bool:
    """Return whether msgpack has a place for a value: it has none for some numbers and texts."""
    if kind is int:
        return bool(-(2**63) <= value < 2**64)
    if kind is str and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
    return True


def _odd(kind: type, value: Any) -> msgspec.msgpack.Ext:
    named = msgspec.msgpack.encode([kind.__name__, _TEXTS[kind][0](value)])
    return msgspec.msgpack.Ext(_ODD, named)


def _array_bytes(value: Any) -> bytes:
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise UnsendableError(f"an array of {array.dtype}")
    text = array.dtype.str if array.dtype.names is None else dtype_text(array.dtype)
    head = msgspec.msgpack.encode([text, list(array.shape)])
    return len(head).to_bytes(4, "little") + head + array.tobytes()


def _received(code: int, data: memoryview) -> Any:
    if code == _TUPLE:
        return tuple(unpack_value(data))
    if code == _PAIRS:
        return dict(unpack_value(data))
    if code == _ODD:
        name, text = msgspec.msgpack.decode(data)
        return _TEXTS[_NAMED[name]][1](text)
    start = 4 + int.from_bytes(data[:4], "little")
    text, shape = msgspec.msgpack.decode(data[4:start])
    descr = ast.literal_eval(text) if text.startswith("[") else text  # of records, and of others
    dtype = plain_dtype(descr, "a value from a parser process")
    array = np.frombuffer(bytes(data[start:]), dtype).reshape(shape)
    return array if code == _ARRAY else array[()]


def info_values(info: ObjectInfo) -> list[Any]:
    """Return what `info_of` makes an object's description of."""
    return [info.key, info.size_bytes, info.etag, info.mtime_ns]


def info_of(values: list[Any]) -> ObjectInfo:
    """Return the description of an object from plain values."""
    key, size_bytes, etag, mtime_ns = values
    return ObjectInfo(key=key, size_bytes=size_bytes, etag=etag, mtime_ns=mtime_ns)
