"""Fields of a sample and how their bytes become values.

A field has a name and an *encoding*: `jpg`, `json`, `cls`, … Decoders are plain functions from
bytes to a value, found by the field's name first (the user's), then by its encoding. Fields of an
unknown encoding stay bytes: nothing is guessed and nothing is lost.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock.dataset.decode_columns import (
    ColumnDecoder,
    decode_arrays,
    decode_ints,
    decode_jsons,
    decode_texts,
    flat_decoder,
)
from penstock.dataset.images import decode_by_content, decode_image, decode_jpeg
from penstock.dataset.leaves import leaf_decoders
from penstock.dataset.npy_header import parse_header, plain_dtype
from penstock.dataset.plain_json import decode_json
from penstock.errors import DecodeError, FormatError, MissingPackageError

Decoder = Callable[[memoryview], Any]

VALUE = "value"
"""Encoding of fields that a format hands over as values already."""


IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm")
"""Encodings that Pillow reads."""
MEMBERS_MAX = 256
"""Fields of a set whose index has a place for each field of each sample (tar). Names with a dot in
the middle (`a_0.12345.jpg`) would make every sample a field of its own."""


_NPZ_BYTES_MAX = 4 << 30
"""Bytes of all arrays of one `.npz`, unpacked: the same limit as for the largest sample of a
tar."""


def too_many_members(where: str, name: str) -> FormatError:
    """Return the error for a set of archives whose members have too many different fields."""
    return FormatError(
        f"{where} has more than {MEMBERS_MAX} different fields, {name!r} is one too many. The name "
        "of a member is cut at the first dot after the last slash, as WebDataset cuts it, so "
        "a_0.12345.jpg has the field 12345.jpg: write the members anew with '_' for other dots"
    )


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

    def __post_init__(self) -> None:
        if self.dtype is not None:
            plain_dtype(self.dtype, f"field {self.name!r}")
        if self.shape is not None and any(not 0 <= n < 2**48 for n in self.shape):
            raise FormatError(f"field {self.name!r} has the shape {self.shape}; it is damaged")

    @property
    def is_fixed(self) -> bool:
        """Whether every sample has the same type and shape."""
        return self.dtype is not None and self.shape is not None and not self.optional


def _decode_npy(data: memoryview) -> Any:
    head = parse_header(data, len(data), "the array")
    order: Literal["C", "F"] = "F" if head.is_fortran else "C"
    return np.ndarray(head.shape, head.dtype, data, head.data_offset, order=order).copy(order="K")


def _decode_npz(data: memoryview) -> Any:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = archive.infolist()
        claimed = sum(info.file_size for info in infos)
        if claimed > _NPZ_BYTES_MAX:
            raise ValueError(f"its arrays take {claimed} bytes, at most {_NPZ_BYTES_MAX} are read")
        # zipfile reads no more than the sizes above, and compares each checksum.
        return {
            info.filename.removesuffix(".npy"): _decode_npy(memoryview(archive.read(info)))
            if info.filename.endswith(".npy")
            else archive.read(info)
            for info in infos
        }


def _decode_text(data: memoryview) -> str:
    return str(data, "utf-8")


def _decode_int(data: memoryview) -> int:
    return int(bytes(data))


def _keep(data: memoryview) -> memoryview:
    return data


DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(IMAGES, decode_image),
    **dict.fromkeys(("jpg", "jpeg"), decode_jpeg),
    **dict.fromkeys(("txt", "text", "str"), _decode_text),
    **dict.fromkeys(("cls", "cls2", "id", "index", "count"), _decode_int),
    "image": decode_by_content,
    "json": decode_json,
    "npy": _decode_npy,
    "npz": _decode_npz,
    "bytes": _keep,
    "bin": _keep,
    **leaf_decoders(decode_by_content),
}
"""Built-in decoders by encoding."""

COLUMN_DECODERS: dict[Decoder, ColumnDecoder] = {
    _decode_int: decode_ints,
    _decode_text: decode_texts,
    _decode_npy: decode_arrays,
    decode_json: decode_jsons,
    DECODERS["str_int"]: decode_ints,
    **{
        decoder: flat_decoder(encoding.removeprefix("flat:"))
        for encoding, decoder in DECODERS.items()
        if encoding.startswith("flat:")
    },
}
"""Those of the built-in decoders that can decode all values of a column at once."""


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


def decode(field: Field, decoder: Decoder, data: memoryview, where: Callable[[], str]) -> Any:
    """Return a field's value, or say which sample's field could not be decoded.

    `where` makes the words that name the sample; it is called only for an error.
    """
    try:
        return decoder(data)
    except MissingPackageError:
        raise
    except Exception as error:
        raise DecodeError(
            f"field {field.name!r} ({field.encoding}) of {where()} "
            f"could not be decoded: {type(error).__name__}: {error}; "
            f"give your own with decoders={{{field.name!r}: function}}"
        ) from error
