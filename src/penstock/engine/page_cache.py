"""Prefetch of files into the page cache, while they are not in it.

Local files are mapped, tiers are read with `preadv`. Either way ranges are touched one by one, and
each waits for the disk. If the kernel is asked in advance, it reads all ranges of a piece at once.
The kernel counts the blocks that a thread has caused to be read: as long as there are any, files
are not in memory, and asking pays.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

_LOOK_EVERY = 16
"""While files are in memory, one in this many pieces looks whether they still are."""


class OpenDescriptor(Protocol):
    """A file that is open as long as this object lives."""

    @property
    def descriptor(self) -> int:
        """The open file."""
        ...


class PageCacheState:
    """Whether the latest reads of some files came from the disk; shared by all threads."""

    def __init__(self) -> None:
        self._is_cold = True
        self._num_looks = 0

    @contextmanager
    def asked(
        self, ranges: Callable[[], Iterable[tuple[OpenDescriptor, int, int]]]
    ) -> Iterator[None]:
        """Prefetch ranges if the latest reads came from the disk; see whether the next ones do.

        Ranges are file, offset and length; they are computed only if they are needed.
        """
        self._num_looks += 1
        if not self._is_cold and self._num_looks % _LOOK_EVERY:
            yield
            return
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_inblock
        if self._is_cold:
            for file, offset, length in ranges():
                os.posix_fadvise(file.descriptor, offset, length, os.POSIX_FADV_WILLNEED)
        yield
        self._is_cold = resource.getrusage(resource.RUSAGE_THREAD).ru_inblock > before
