"""How samples become the bytes of a shard: plain tar, or rows of a `.npy` array.

A layout is a value without state, so that threads share it. The same samples give the same bytes: a
tar member has time 0, owner 0 and mode 0644, and nothing records where or when it was made.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, ClassVar

import numpy as np

from penstock.dataset.writer_encode import check_name, encode_sample
from penstock.errors import OptionError
from penstock.storage.base import Buffer

TAR_BLOCK = 512
_TAR_END = bytes(2 * TAR_BLOCK)
_MEMBER_BYTES_MAX = 2**32 - 2**20
_HEADER = struct.Struct("100s8s8s8s12s12s8s1s100s8s32s32s8s8s155s12x")
_NUMBERS = "biufcmM"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedSample:
    """One sample, encoded."""

    key: str
    pieces: tuple[Buffer, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TarLayout:
    """WebDataset tar: a member for each field, named by key and field."""

    format: ClassVar[str] = "tar"

    @property
    def options(self) -> dict[str, Any]:
        """Options that the format needs to read it the same way: none, since names say it all."""
        return {}

    def encode(self, key: str, sample: Mapping[str, Any]) -> EncodedSample:
        """Return headers and data of a sample's members."""
        check_key(key)
        pieces: list[Buffer] = []
        for name, data in encode_sample(sample).items():
            length = memoryview(data).nbytes
            if length > _MEMBER_BYTES_MAX:
                raise OptionError(
                    f"field {name!r} of sample {key!r} has {length} bytes; a sample has less than "
                    "4 GiB: cut it into several"
                )
            pieces += (member_header(f"{key}.{name}", length), data, bytes(-length % TAR_BLOCK))
        size_bytes = sum(memoryview(p).nbytes for p in pieces)
        return EncodedSample(key=key, pieces=tuple(pieces), size_bytes=size_bytes)

    def join(self, records: Sequence[EncodedSample]) -> bytes:
        """Return an archive."""
        for one, two in pairwise(records):
            if one.key == two.key:
                raise OptionError(
                    f"two samples that follow each other have the key {one.key!r}, readers would "
                    "take them for one; give each its own, or none to have them numbered"
                )
        return b"".join([*(p for r in records for p in r.pieces), _TAR_END])


def check_key(key: str) -> None:
    """Raise unless a key, as the name of files without extension, comes back the same."""
    parts = key.split("/")
    bad = any(part in ("", "..") for part in parts) or "." in parts[-1] or "\0" in key
    if bad or "." in parts or len(key.encode(errors="replace")) > 900 or not _is_text(key):
        raise OptionError(
            f"{key[:80]!r} is not a sample's key: it becomes the name of files, and what follows "
            "its first dot would be taken for a field; write for example 'cats/000123', or none "
            "to have samples numbered"
        )


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def member_header(name: str, size_bytes: int) -> bytes:
    """Return the header of a member: USTAR, preceded by a PAX one only where a name needs it."""
    encoded = name.encode()
    prefix, base = b"", encoded
    if len(encoded) > 100:
        cut = encoded.find(b"/", max(0, len(encoded) - 101))
        prefix, base = (encoded[:cut], encoded[cut + 1 :]) if 0 < cut <= 155 else (b"", encoded)
    if name.isascii() and len(base) <= 100:
        return _ustar(base, size_bytes, b"0", prefix)
    record = _pax_record(b" path=" + encoded + b"\n")
    padded = record + bytes(-len(record) % TAR_BLOCK)
    short = name.encode("ascii", "replace")[-100:]
    return _ustar(b"././@PaxHeader", len(record), b"x") + padded + _ustar(short, size_bytes, b"0")


def _ustar(name: bytes, size_bytes: int, kind: bytes, prefix: bytes = b"") -> bytes:
    zero = b"0000000\0"
    size = b"%011o\0" % size_bytes
    before = (name, b"0000644\0", zero, zero, size, b"00000000000\0")
    after = (kind, b"", b"ustar\x0000", b"", b"", zero, zero, prefix)
    total = sum(_HEADER.pack(*before, b" " * 8, *after))
    return _HEADER.pack(*before, b"%06o\0 " % total, *after)


def _pax_record(text: bytes) -> bytes:
    # The length counts its own digits.
    length = len(text) + 1
    while len(b"%d" % length) + len(text) > length:
        length += 1
    return b"%d" % length + text


@dataclass(frozen=True, slots=True, kw_only=True)
class NpyLayout:
    """Rows of one array: its elements for a single field, a record for several."""

    format: ClassVar[str] = "npy"
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def options(self) -> dict[str, Any]:
        """Return the name of a single field, which an array cannot say itself."""
        if len(self.names) > 1 or self.names == ("data",):
            return {}
        return {"field": self.names[0]}

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of one element of the array."""
        if len(self.names) == 1:
            return np.dtype(self.dtypes[0])
        return np.dtype(list(zip(self.names, self.dtypes, self.shapes, strict=True)))

    @property
    def row_bytes(self) -> int:
        """Length of one sample."""
        sizes = zip(self.dtypes, self.shapes, strict=True)
        return sum(np.dtype(t).itemsize * prod(s) for t, s in sizes)

    def encode(self, key: str, sample: Mapping[str, Any]) -> EncodedSample:
        """Return a row."""
        if set(sample) != set(self.names):
            raise OptionError(
                f"sample {key!r} has the fields {sorted(sample)}, the first one had "
                f"{sorted(self.names)}; rows of an array are all alike, format='tar' asks for less"
            )
        rows = zip(self.names, self.dtypes, self.shapes, strict=True)
        pieces = tuple(_row(f"{n!r} of sample {key!r}", sample[n], t, s) for n, t, s in rows)
        return EncodedSample(key=key, pieces=pieces, size_bytes=self.row_bytes)

    def join(self, records: Sequence[EncodedSample]) -> bytes:
        """Return a `.npy` file."""
        return b"".join([self._header(len(records)), *(p for r in records for p in r.pieces)])

    def _header(self, num_rows: int) -> bytes:
        inner = self.shapes[0] if len(self.names) == 1 else ()
        about = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": (num_rows, *inner),
        }
        out = io.BytesIO()
        try:
            np.lib.format.write_array_header_1_0(out, about)
        except ValueError:
            # More than 64 KiB of it: a record of very many fields.
            np.lib.format.write_array_header_2_0(out, about)
        return out.getvalue()


ShardLayout = TarLayout | NpyLayout


def _row(what: str, value: Any, dtype: str, shape: tuple[int, ...]) -> bytes:
    array = np.asarray(value)
    if array.shape != shape or not np.can_cast(array.dtype, dtype, "safe"):
        raise OptionError(
            f"field {what} is {array.dtype} {array.shape}, the first sample had {np.dtype(dtype)} "
            f"{shape}; rows of an array are all alike, format='tar' asks for less"
        )
    return array.astype(dtype, copy=False).tobytes()


def npy_layout(sample: Mapping[str, Any]) -> NpyLayout:
    """Return the layout of arrays whose rows are like a first sample."""
    if not sample:
        raise OptionError("a sample needs at least one field")
    for name, value in sample.items():
        check_name(name)
        array = np.asarray(value)
        if array.dtype.kind not in _NUMBERS or not name.isascii():
            raise OptionError(
                f"field {name!r} is {array.dtype} ({type(value).__name__}); .npy shards hold "
                "numbers of one shape, under plain names: write it with format='tar'"
            )
    arrays = [np.asarray(value) for value in sample.values()]
    return NpyLayout(
        names=tuple(sample),
        dtypes=tuple(a.dtype.str for a in arrays),
        shapes=tuple(a.shape for a in arrays),
    )
