"""A scratch file to measure a folder with. It has no name, so it never has to be removed.

The kernel frees its bytes with the last descriptor, however the process ends: an exception, Ctrl-C
or `kill -9`. Where a file system has no files without a name, the name is removed as soon as the
file is open.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from penstock.errors import OptionError
from penstock.storage.folder_errors import store_error
from penstock.storage.keys import TEMPORARY_PREFIX
from penstock.units import show_bytes

PIECE_BYTES = 32 << 20
"""Bytes written between two waits for the disk."""
FREE_SHARE = 10
"""A probe takes at most the free bytes divided by this."""
SIZE_BYTES_MIN = 1 << 20
"""A smaller file shows nothing."""
ALIGN_BYTES = 4096
"""Direct reads have to begin and end at multiples of this."""
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)
"""Errors of file systems that have no files without a name (NFS, FUSE)."""


class ScratchFile:
    """A file without a name in a folder; it exists inside the `with` block."""

    def __init__(self, folder: Path, size_bytes_max: int) -> None:
        self.folder = folder
        self.size_bytes = 0
        """Bytes written so far."""
        self.is_direct = False
        """Whether reads go around the page cache."""
        self._size_bytes_max = size_bytes_max
        self._descriptor = -1

    def __enter__(self) -> Self:
        try:
            self._descriptor = _open_nameless(self.folder)
        except OSError as error:
            raise OptionError(
                f"{self.folder} cannot be measured, no file can be written there "
                f"({error.strerror}); name a folder that user {os.geteuid()} may write to"
            ) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)
        self._descriptor = -1

    @property
    def descriptor(self) -> int:
        """The open file."""
        return self._descriptor

    def fill(self, seconds: float) -> float:
        """Write one piece after the other for some time and return the median bytes a second.

        Each piece is on the disk before the next one begins: the speed of the page cache tells
        nothing about the time after it is full.
        """
        room_bytes = min(self._size_bytes_max, free_bytes(self.folder) // FREE_SHARE)
        room_bytes = max(room_bytes, SIZE_BYTES_MIN)  # Less was refused by `check_folder`.
        # Random bytes: disks and file systems may compress others.
        piece = np.random.default_rng(7).bytes(min(PIECE_BYTES, _aligned(room_bytes)))
        rates: list[float] = []
        until_s = time.perf_counter() + seconds
        while self.size_bytes + len(piece) <= room_bytes:
            begin_s = time.perf_counter()
            with store_error(str(self.folder), needed_bytes=len(piece)):
                self._write(memoryview(piece))
            rates.append(len(piece) / (time.perf_counter() - begin_s))
            if time.perf_counter() >= until_s:
                break
        return statistics.median(rates)

    def _write(self, rest: memoryview) -> None:
        while rest.nbytes:
            written = os.pwrite(self._descriptor, rest, self.size_bytes)
            self.size_bytes += written
            rest = rest[written:]
        os.fdatasync(self._descriptor)

    def go_direct(self) -> bool:
        """Make reads bypass the page cache if the file system can; return whether it can."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            # Some file systems take the flag and fail at the first read, so one read is tried.
            with mmap.mmap(-1, ALIGN_BYTES) as trial:
                os.preadv(self._descriptor, [trial], 0)
            self.is_direct = True
        except OSError:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
            # Read-ahead of the kernel would bring bytes that nobody asked for.
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return self.is_direct

    def forget(self) -> None:
        """Drop the file from the page cache."""
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def places(self, length: int, seed: int) -> Iterator[int]:
        """Yield all places where a read of `length` may begin, in random order.

        Direct reads repeat the places for ever. Other reads end after one pass, because a second
        pass would hit the page cache.
        """
        count = self.size_bytes // length
        assert count > 0, (self.size_bytes, length)
        order = (np.random.default_rng(seed).permutation(count) * length).tolist()
        yield from order
        while self.is_direct:
            yield from order

    def reads(self, places: Iterator[int], length: int) -> Iterator[int]:
        """Read at places from an iterator, which threads may share, into memory of this thread."""
        with mmap.mmap(-1, length) as target:  # at the start of a page, as direct reads need it
            for offset in places:
                yield os.preadv(self._descriptor, [target], offset)


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be measured, before time is spent on other folders."""
    free = free_bytes(folder)
    with ScratchFile(folder, SIZE_BYTES_MIN):
        pass
    if free // FREE_SHARE < SIZE_BYTES_MIN:
        raise OptionError(
            f"{folder} has {show_bytes(free)} free; a probe takes a {FREE_SHARE}th of that and "
            f"needs {show_bytes(SIZE_BYTES_MIN)}: free some or name another folder"
        )


def _open_nameless(folder: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _NO_NAMELESS:
            raise
    path = folder / f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def free_bytes(folder: Path) -> int:
    """Return how many bytes an ordinary user may still write to a folder's file system."""
    with store_error(str(folder)):
        found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _aligned(size_bytes: int) -> int:
    return size_bytes // SIZE_BYTES_MIN * SIZE_BYTES_MIN
