"""The encodings of MDS columns: which there are, and what an index must say of each.

Types are looked up in a table and never made from the text of a file: a type of Python objects
would turn bytes of the file into pointers.
"""

from __future__ import annotations

from math import prod

import numpy as np

from penstock.dataset.fields import VALUE, Field
from penstock.errors import FormatError

_TYPES = {
    f"{kind}{bits}": np.dtype(f"{kind}{bits}").newbyteorder("<")
    for kind, widths in (
        ("int", (8, 16, 32, 64)),
        ("uint", (8, 16, 32, 64)),
        ("float", (16, 32, 64)),
    )
    for bits in widths
}
_SCALARS = {**_TYPES, "int": np.dtype("<i8")}
_VARYING = {
    **{
        name: name
        for name in (
            *("bytes", "str", "pkl", "json", "pil", "jpeg", "png"),
            *("str_int", "str_float", "str_decimal"),
        )
    },
    "list[pil]": "mds_list:pil",
    "list[jpeg]": "mds_list:image",
    "list[png]": "mds_list:image",
    "jpeg_array": "jpeg_array",
    "jpegarray": "jpeg_array",
}
"""Encodings of columns whose size varies, with the decoders of fields."""
_AXES_MAX = 32


def column_field(name: str, encoding: str, size: int | None, where: str) -> Field:
    """Return the field of a column.

    >>> column_field("x", "ndarray:int16:2,3", 12, "").shape, column_field("x", "int", 8, "").dtype
    ((2, 3), '<i8')
    """
    kind, _, rest = encoding.partition(":")
    if kind == "ndarray":
        return _array_field(name, rest, size, where)
    if encoding in _SCALARS:
        dtype = _SCALARS[encoding]
        _check_size(name, encoding, size, dtype.itemsize, where)
        return Field(name=name, encoding=VALUE, dtype=dtype.str, shape=())
    if encoding not in _VARYING:
        known = ", ".join([*_VARYING, *_SCALARS, "ndarray:TYPE:SHAPE"])
        raise FormatError(
            f"{where}: column {name!r} has the encoding {encoding!r}; there are {known}. Name an "
            "encoding of your own 'bytes' in the index, and decode it with decoders="
        )
    return Field(name=name, encoding=_VARYING[encoding])


def _array_field(name: str, rest: str, size: int | None, where: str) -> Field:
    type_name, _, axes = rest.partition(":")
    if not type_name:
        return Field(name=name, encoding="mds_ndarray")
    shape = tuple(int(n) for n in axes.split(",") if n.isdecimal() and len(n) < 10)
    is_whole = not axes or len(shape) == axes.count(",") + 1 <= _AXES_MAX
    if type_name not in _TYPES or not is_whole:
        raise FormatError(
            f"{where}: column {name!r} has the encoding 'ndarray:{rest}', which is not "
            f"ndarray:TYPE:SHAPE with a type of {', '.join(_TYPES)} and a shape such as 2,3; the "
            "index is damaged: copy it anew"
        )
    dtype = _TYPES[type_name]
    if not axes:
        return Field(name=name, encoding=f"mds_ndarray:{dtype.str}")
    _check_size(name, f"ndarray:{rest}", size, dtype.itemsize * prod(shape), where)
    return Field(name=name, encoding=VALUE, dtype=dtype.str, shape=shape)


def _check_size(name: str, encoding: str, size: int | None, expected: int, where: str) -> None:
    if (size or 0) != expected:
        raise FormatError(
            f"{where} is damaged: column {name!r} is {encoding}, which takes {expected} bytes, and "
            f"its size is {size}; copy it anew"
        )
