"""Fields of a sample and how their bytes become values.

A field has a name and an *encoding*: `jpg`, `json`, `cls`, … Decoders are plain functions from
bytes to a value, found by the field's name first (the user's), then by its encoding. An encoding
that nobody knows stays bytes: nothing is guessed and nothing is lost.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from penstock.dataset.leaves import leaf_decoders
from penstock.errors import DecodeError, MissingPackageError

Decoder = Callable[[memoryview], Any]

_JPEG_PIXELS_MAX = 1 << 27

VALUE = "value"
"""Encoding of fields that a format hands over as values already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One named thing in every sample."""

    name: str
    """Name in the sample, as the format has it."""
    encoding: str
    """What its bytes are; `value` when the format itself makes the value."""
    dtype: str | None = None
    """NumPy type of each element, where it is the same for all samples."""
    shape: tuple[int, ...] | None = None
    """Shape, where it is the same for all samples."""
    optional: bool = False
    """Whether some samples may lack it."""

    @property
    def is_fixed(self) -> bool:
        """Whether every sample has the same type and shape."""
        return self.dtype is not None and self.shape is not None and not self.optional


def _decode_jpeg(data: memoryview) -> Any:
    try:
        import simplejpeg
    except ImportError:
        return _decode_image(data)
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
        if height * width <= _JPEG_PIXELS_MAX:
            return simplejpeg.decode_jpeg(data, "RGB")
        # A head of 600 bytes can claim 13 GB of pixels: Pillow has a bound that users can raise.
        return _decode_image(data)
    except ValueError:
        # Rare kinds (CMYK, lossless) that libjpeg-turbo does not turn into RGB.
        return _decode_image(data)


def _decode_image(data: memoryview) -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise MissingPackageError("decoding images", "pillow", "jpeg") from None
    with Image.open(io.BytesIO(data)) as image:
        # convert() costs as much as decoding, even when there is nothing to do.
        return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _decode_by_content(data: memoryview) -> Any:
    return _decode_jpeg(data) if bytes(data[:2]) == b"\xff\xd8" else _decode_image(data)


def _decode_npy(data: memoryview) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


def _decode_npz(data: memoryview) -> Any:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return dict(arrays)


def _decode_text(data: memoryview) -> str:
    return str(data, "utf-8")


def _decode_int(data: memoryview) -> int:
    return int(bytes(data))


def _decode_json(data: memoryview) -> Any:
    return msgspec.json.decode(data)


def _keep(data: memoryview) -> memoryview:
    return data


DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(("jpg", "jpeg"), _decode_jpeg),
    **dict.fromkeys(("png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm"), _decode_image),
    **dict.fromkeys(("txt", "text", "str"), _decode_text),
    **dict.fromkeys(("cls", "cls2", "id", "index", "count"), _decode_int),
    "image": _decode_by_content,
    "json": _decode_json,
    "npy": _decode_npy,
    "npz": _decode_npz,
    "bytes": _keep,
    "bin": _keep,
    **leaf_decoders(_decode_by_content),
}
"""Built-in decoders by encoding."""


def decoder_of(field: Field, chosen: Mapping[str, Decoder | None]) -> Decoder:
    """Return the function that decodes a field.

    `chosen` are the user's, by field name or by extension; None there means: leave it as bytes.
    """
    for name in (field.name, field.encoding):
        if name in chosen:
            return chosen[name] or _keep
    if field.encoding in DECODERS:
        return DECODERS[field.encoding]
    # A field "seg.png" is a png: the last part of its name decides.
    return DECODERS.get(field.encoding.rsplit(".", 1)[-1], _keep)


def is_raw(decoder: Decoder) -> bool:
    """Return whether a decoder leaves bytes as they are."""
    return decoder is _keep


def decode(field: Field, decoder: Decoder, data: memoryview, where: object) -> Any:
    """Return a field's value, or say which sample's field could not be decoded."""
    try:
        return decoder(data)
    except MissingPackageError:
        raise
    except Exception as error:
        raise DecodeError(
            f"field {field.name!r} ({field.encoding}) of {where} "
            f"could not be decoded: {type(error).__name__}: {error}; "
            f"give your own with decoders={{{field.name!r}: function}}"
        ) from error
