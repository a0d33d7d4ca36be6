"""Decoders of what MDS and LitData store inside a sample: arrays, lists of images, nested values.

Each is a function from bytes to a NumPy array or a plain value; none of them needs torch, and none
of them unpickles. `pkl` and `pickle` have no decoder on purpose: unpickling runs whatever code the
data names. Such fields stay bytes unless the user says `decoders={"field": pickle.loads}`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from math import prod
from typing import Any

import numpy as np

from penstock.dataset.images import pixels_of
from penstock.dataset.plain_json import decode_json
from penstock.errors import MissingPackageError

_Decoder = Callable[[memoryview], Any]

_MDS_TYPES = {
    8: "|u1",
    9: "|i1",
    16: "<u2",
    17: "<i2",
    18: "<f2",
    32: "<u4",
    33: "<i4",
    34: "<f4",
    64: "<u8",
    65: "<i8",
    66: "<f8",
}
NUMPY_TYPES = (
    *("|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8"),
    *("<f2", "<f4", "<f8", "<c8", "<c16", "|b1"),
)
"""LitData's numbers of NumPy types, but for objects, texts and records, which come last."""
TORCH_TYPES = (
    *("<f4", "<f4", "<f8", "<f8", "<c8", "<c8", "<c16", "<c16", "<f2", "<f2", "bfloat16"),
    *("|u1", "|i1", "<i2", "<i2", "<i4", "<i4", "<i8", "<i8", "|b1", "<u2"),
)
"""LitData's numbers of torch types."""


def leaf_decoders(image: _Decoder) -> dict[str, _Decoder]:
    """Return all decoders by encoding; `image` decodes one image of any kind."""
    flat = set(NUMPY_TYPES + TORCH_TYPES) - {"bfloat16"}
    return {
        "str_int": _decode_int,
        "str_float": _decode_float,
        "str_decimal": _decode_decimal,
        "pil": decode_pil,
        "jpeg_array": partial(_decode_images, image=image, start=0),
        "mds_list:pil": partial(_decode_images, image=decode_pil, start=4),
        "mds_list:image": partial(_decode_images, image=image, start=4),
        "mds_ndarray": decode_mds_array,
        **{f"mds_ndarray:{t}": partial(decode_mds_array, dtype=t) for t in _MDS_TYPES.values()},
        **{f"flat:{t}": partial(np.frombuffer, dtype=t) for t in flat},
        "litdata_numpy": partial(_decode_headed, order="<", types=NUMPY_TYPES),
        "litdata_tensor": partial(_decode_headed, order=">", types=TORCH_TYPES),
        "litdata_json": decode_litdata_json,
    }


def _decode_int(data: memoryview) -> int:
    return int(str(data, "ascii"))


def _decode_float(data: memoryview) -> float:
    return float(str(data, "ascii"))


def _decode_decimal(data: memoryview) -> Decimal:
    return Decimal(str(data, "ascii"))


def decode_pil(data: memoryview) -> Any:
    """Return an unpacked image: width, height, length of the mode's name, mode, pixels."""
    width, height, mode_bytes = struct.unpack_from("<3I", data)
    mode = str(data[12 : 12 + mode_bytes], "ascii")
    pixels = data[12 + mode_bytes :]
    if mode == "RGB":
        return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)
    try:
        from PIL import Image
    except ImportError:
        raise MissingPackageError(f"images of mode {mode}", "pillow", "jpeg") from None
    return pixels_of(Image.frombytes(mode, (width, height), bytes(pixels)))


def _decode_images(data: memoryview, image: _Decoder, start: int) -> list[Any]:
    """Return a list of images: their number, their sizes, their bytes."""
    (number,) = struct.unpack_from("<I", data, start)
    sizes = struct.unpack_from(f"<{number}I", data, start + 4)
    at = start + 4 + 4 * number
    out = []
    for size in sizes:
        out.append(image(data[at : at + size]))
        at += size
    return out


def decode_mds_array(data: memoryview, dtype: str | None = None) -> Any:
    """Return an array that says its own type (unless given) and shape.

    A byte for the type; a byte with the number of axes and the width of each; axes; values.
    """
    at = 0
    if dtype is None:
        dtype, at = _MDS_TYPES[data[0]], 1
    num_axes, width = data[at] >> 2, 1 << (data[at] & 3)
    end = at + 1 + num_axes * width
    shape = np.frombuffer(data[at + 1 : end], f"<u{width}").tolist()
    return np.frombuffer(data[end:], dtype).reshape(shape)


def _decode_headed(data: memoryview, order: str, types: tuple[str, ...]) -> Any:
    """Return an array behind its head: number of the type, number of axes, the axes."""
    number, num_axes = struct.unpack_from(order + "2I", data)
    shape = struct.unpack_from(f"{order}{num_axes}I", data, 8)
    if number >= len(types) or types[number] == "bfloat16":
        raise TypeError(f"elements of type {number} have no NumPy type")
    return np.ndarray(shape, types[number], data, 8 + 4 * num_axes if prod(shape) else 0)


def decode_litdata_json(data: memoryview) -> Any:
    """Return a nested value: plain JSON in older files, in newer ones each behind its kind."""
    if not len(data) or data[0] > 0x20:
        return decode_json(data)
    return _Nested(data).value()


class _Nested:
    """A walk over a nested value."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def _unpack(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return value

    def _take(self, length: int) -> memoryview:
        piece = self._data[self._at : self._at + length]
        if len(piece) != length:
            raise ValueError(f"{length} bytes expected at {self._at}, {len(piece)} found")
        self._at += length
        return piece

    def _text(self) -> str:
        return str(self._take(self._unpack("<I")), "utf-8")

    def value(self) -> Any:
        kind = self._unpack("<B")
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        number = self._unpack("<I")
        match kind:
            case 0:
                return decode_json(self._take(number))
            case 1:
                return [self._text() for _ in range(number)]
            case 2 | 3:
                return np.frombuffer(self._take(8 * number), "<i8" if kind == 2 else "<f8").tolist()
            case 4:
                return [bool(b) for b in self._take(number)]
            case 5:
                return {self._text(): self.value() for _ in range(number)}
            case 6:
                keys = [self._text() for _ in range(self._unpack("<I"))]
                if not keys and number > _EMPTY_MAX:  # These take no bytes, so bytes are no bound.
                    raise ValueError(f"a list of {number} empty records; it is damaged")
                return [{key: self.value() for key in keys} for _ in range(number)]
        raise ValueError(f"a nested value of unknown kind {kind} at {self._at}")

    def _scalar(self, layout: str) -> Any:
        if layout == "text":
            return self._text()
        return self._unpack(layout) if layout else None


_EMPTY_MAX = 1 << 16
"""Records without keys in one list."""
_SCALARS = {
    **{7: "text", 8: "<q", 9: "<d", 10: "<?", 11: ""},
    **{0x10: "", 0x11: "text", 0x12: "<q", 0x13: "<d", 0x14: "<?"},
}
