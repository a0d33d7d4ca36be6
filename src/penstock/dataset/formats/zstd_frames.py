"""Decompressing zstd without believing what it claims.

Four bytes of zstd can stand for 128 KiB, so a small file can fill any memory. What a frame, an
index or a header says of its size is compared with bounds before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator

import zstandard

from penstock.errors import FormatError
from penstock.units import show_bytes

MAGIC = b"\x28\xb5\x2f\xfd"
BLOCK_BYTES_MAX = 512 << 20
"""Bytes that one block may unpack to, however small it is: loaders keep several at once."""
RATIO_MAX = 1024
"""A block beyond that size may be this many times as large as its file. Text and arrays are packed
100-fold at best, a run of zeros 30,000-fold."""
_FEED_BYTES = 4 << 10
"""What one feed of compressed bytes becomes is bounded by feeding little: 128 MiB at worst."""


def unpacked_bytes_max(packed_bytes: int) -> int:
    """Return what some compressed bytes may unpack to.

    >>> unpacked_bytes_max(100) == BLOCK_BYTES_MAX
    True
    """
    return max(BLOCK_BYTES_MAX, RATIO_MAX * packed_bytes)


def check_claim(claimed_bytes: int, packed_bytes: int, where: str) -> None:
    """Raise when an index claims that a compressed object unpacks to more than it may."""
    allowed = unpacked_bytes_max(packed_bytes)
    if not 0 <= claimed_bytes <= allowed:
        raise FormatError(
            f"{where}: {show_bytes(packed_bytes)} of zstd are said to hold {claimed_bytes} bytes, "
            f"at most {show_bytes(allowed)} are unpacked at once; write smaller shards"
        )


def inflated(
    raw: memoryview, size_bytes_max: int, codec: zstandard.ZstdDecompressor | None = None
) -> memoryview:
    """Return the content of a zstd frame that must not be longer than `size_bytes_max`."""
    codec = codec or zstandard.ZstdDecompressor()
    allowed = min(size_bytes_max, unpacked_bytes_max(len(raw)))
    try:
        stated = zstandard.frame_content_size(raw)
        if stated > allowed:
            raise FormatError(
                f"a zstd frame says that it holds {stated} bytes, the index says at most "
                f"{size_bytes_max}, and {allowed} are unpacked at once; the shard is damaged or "
                "not of this data set"
            )
        if stated >= 0:
            return memoryview(codec.decompress(raw))
    except zstandard.ZstdError as error:
        raise _damaged(raw, error) from error
    return _gathered(raw, allowed, codec, across=False)


def inflated_frames(raw: memoryview, size_bytes_max: int) -> memoryview:
    """Return the content of all frames of some bytes, one after the other."""
    return _gathered(raw, size_bytes_max, zstandard.ZstdDecompressor(), across=True)


def _gathered(
    raw: memoryview, allowed: int, codec: zstandard.ZstdDecompressor, *, across: bool
) -> memoryview:
    out = bytearray()
    frames = Frames(codec)
    try:
        for text in frames.fed(raw):
            out += text
            if len(out) > allowed:
                raise FormatError(
                    f"{len(raw)} bytes of zstd unpack to more than {allowed} bytes; they are "
                    "damaged or not of this data set"
                )
            if frames.num_ended and not across:
                break
    except zstandard.ZstdError as error:
        raise _damaged(raw, error) from error
    if frames.is_open:
        raise FormatError(f"{len(raw)} bytes of zstd are cut off: their frame does not end")
    # Nobody may write into a block that is kept for others.
    return memoryview(out).toreadonly()


def _damaged(raw: memoryview, error: Exception) -> FormatError:
    return FormatError(
        f"{len(raw)} bytes cannot be decompressed ({error}); the shard is damaged: copy it anew"
    )


class Frames:
    """A walk over zstd frames that lie one after the other."""

    def __init__(self, codec: zstandard.ZstdDecompressor | None = None) -> None:
        self._codec = codec or zstandard.ZstdDecompressor()
        self._frame = self._codec.decompressobj()
        self.is_open = False
        """Whether a frame has begun that has not ended yet."""
        self.num_ended = 0
        self.used = 0
        """Bytes of the piece that is fed, up to the text that was yielded last."""

    def fed(self, piece: memoryview) -> Iterator[bytes]:
        """Yield what more compressed bytes become, with the end of a frame at the end of a text."""
        self.used = 0
        while self.used < len(piece):
            feed = piece[self.used : self.used + _FEED_BYTES]
            text = self._frame.decompress(feed)
            self.used += len(feed) - len(self._frame.unused_data)
            self.is_open = not self._frame.eof
            if self._frame.eof:
                self.num_ended += 1
                self._frame = self._codec.decompressobj()
            yield text
