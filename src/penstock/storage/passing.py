"""Keeps the bytes that are read while a data set is indexed, until its tiers take them.

To index some formats means to read them: tar headers lie between members, and the ends of JSON
lines are not listed anywhere. The position of a unit in a tier depends on the finished index. So
until then, the bytes that were read are kept as they lie in their objects: in a sparse file without
a name, in the folder of the tier. The kernel removes this file at the end of the process, however
it ends. Filling the tiers takes bytes from here before it reads the store; bytes that were taken
are removed from the file.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from penstock.errors import OptionError
from penstock.storage.base import ObjectInfo, Store
from penstock.storage.tier_files import punch, write_all
from penstock.storage.tier_sizes import Wish, allowance_for, usable_bytes, wished_bytes
from penstock.storage.wrapped import WrappedStore

_log = logging.getLogger("penstock.storage")


Ranges = tuple[dict[str, int], dict[str, list[tuple[int, int]]]]
"""Where each object begins in the file, and which of its ranges are there."""


class PassedBytes:
    """Bytes that were read from some objects; thread-safe.

    If there is not enough room for all objects, it keeps the first ones, as tiers do.
    """

    def __init__(self, folder: str, objects: Sequence[ObjectInfo], size_bytes_max: int) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder, prefix=".penstock-passed-")  # noqa: SIM115
        self._begins: dict[str, int] = {}
        """Where each kept object begins. They lie one after another, and holes take no room."""
        at = 0
        for info in objects:
            if at + info.size_bytes > size_bytes_max:
                break
            self._begins[info.key] = at
            at += info.size_bytes
        self._runs: dict[str, list[tuple[int, int]]] = {key: [] for key in self._begins}
        """Ranges of each object that are here: ascending, none adjacent to the next."""
        self._is_full = False
        # Guards the ranges. The file needs no lock: a range is added here after its bytes are
        # written, and removed before they are read.
        self._lock = threading.Lock()

    def handed_over(self) -> tuple[int, Ranges]:
        """Return the file and its ranges, for another process; this object is empty afterwards.

        Two processes must not take from one file: bytes that one has taken are zeros for the other.
        """
        with self._lock:
            runs, self._runs = self._runs, {}
            begins, self._begins = self._begins, {}
        return self._file.fileno(), (begins, runs)

    @classmethod
    def taken_over(cls, file: int, ranges: Ranges) -> PassedBytes:
        """Return the bytes that another process has handed over."""
        passed = cls.__new__(cls)
        passed._file = os.fdopen(file, "w+b", buffering=0)
        passed._begins, passed._runs = ranges
        passed._is_full, passed._lock = True, threading.Lock()
        return passed

    @property
    def held_bytes(self) -> int:
        """Bytes that are here now."""
        with self._lock:
            return sum(stop - start for runs in self._runs.values() for start, stop in runs)

    def keeps(self, key: str) -> bool:
        """Return whether there is room for an object."""
        return key in self._begins and not self._is_full

    def keep(self, key: str, offset: int, data: memoryview) -> None:
        """Keep bytes of an object, if there is room for it."""
        if not self.keeps(key):
            return
        try:
            write_all(self._file.fileno(), data, self._begins[key] + offset)
        except OSError as error:
            _log.info("bytes that are read while indexing are not kept any more: %s", error)
            self._is_full = True
            return
        with self._lock:
            _add(self._runs[key], offset, offset + len(data))

    def take(self, key: str, offset: int, length: int) -> memoryview | None:
        """Remove and return bytes of an object; None if not all of them are here."""
        with self._lock:
            if not _remove(self._runs.get(key, []), offset, offset + length):
                return None
        at = self._begins[key] + offset
        try:
            data = os.pread(self._file.fileno(), length, at)
        except OSError:
            return None
        punch(self._file.fileno(), at, length)
        return memoryview(data) if len(data) == length else None


def _add(runs: list[tuple[int, int]], start: int, stop: int) -> None:
    """Add a range to ascending ones, joined with those that it touches."""
    first = bisect_right(runs, (start,))
    if first and runs[first - 1][1] >= start:
        first -= 1
    last = first
    while last < len(runs) and runs[last][0] <= stop:
        start, stop = min(start, runs[last][0]), max(stop, runs[last][1])
        last += 1
    runs[first:last] = [(start, stop)]


def _remove(runs: list[tuple[int, int]], start: int, stop: int) -> bool:
    """Remove a range from ascending ones; return whether one of them held it."""
    number = bisect_right(runs, (start, stop)) - 1
    for at in (number, number + 1):  # The range that begins where this one does may be longer.
        if 0 <= at < len(runs) and runs[at][0] <= start and stop <= runs[at][1]:
            low, high = runs[at]
            runs[at : at + 1] = [r for r in ((low, start), (stop, high)) if r[0] < r[1]]
            return True
    return False


class PassingStore(WrappedStore):
    """A store that keeps the bytes that are read from it."""

    def __init__(self, store: Store, passed: PassedBytes) -> None:
        super().__init__(store)
        self.passed = passed

    def read(self, key: str) -> memoryview:
        """Return a whole object, and keep it."""
        data = self.inner.read(key)
        self.passed.keep(key, 0, data)
        return data

    def read_range(self, info: ObjectInfo, offset: int, length: int) -> memoryview:
        """Return bytes of an object, and keep them."""
        data = self.inner.read_range(info, offset, length)
        self.passed.keep(info.key, offset, data)
        return data

    def read_into(self, info: ObjectInfo, offset: int, target: memoryview) -> None:
        """Fill `target` with bytes of an object, and keep them."""
        self.inner.read_into(info, offset, target)
        self.passed.keep(info.key, offset, target)


def passing_to(
    tiers: Sequence[Wish], store: Store, objects: Sequence[ObjectInfo]
) -> PassingStore | None:
    """Return a store that keeps the bytes that are read, for these tiers; None if it cannot.

    The file lies beside the tier with the most room to spare, on a disk rather than in memory. It
    takes at most as much as all tiers together, and none of the room that its own tier will need.
    """
    for tier in tiers:
        if not isinstance(tier, Wish):
            raise OptionError(
                f"tiers={tier!r}: a tier is a place and a size, such as "
                'tiers=[penstock.Disk("/scratch", "200GB")]'
            )
    if store.source in ("folder", "memory"):
        return None  # Reading these again costs nothing.
    rooms = []
    total_bytes = 0
    for tier in tiers:
        try:
            room = allowance_for(tier, tier.place)
        except OSError as error:
            _log.info("%s keeps no bytes that are read while indexing: %s", tier.place, error)
            continue
        size_bytes = wished_bytes(tier, room)
        total_bytes += size_bytes
        rooms.append((tier.kind == "disk", usable_bytes(tier, room) - size_bytes, tier.place))
    _, spare_bytes, folder = max(rooms, default=(False, 0, ""))
    if spare_bytes <= 0:
        return None
    try:
        return PassingStore(store, PassedBytes(folder, objects, min(total_bytes, spare_bytes)))
    except OSError as error:
        _log.info("%s keeps no bytes that are read while indexing: %s", Path(folder), error)
        return None
