"""Bytes that pass while a data set is indexed, kept until its tiers take them.

To index some formats means to read them: the headers of a tar lie between its members, the ends of
JSON lines are nowhere listed. Where a unit lies in a tier depends on the finished index, so what
passes is kept as it lies in its object first: in one sparse file without a name, in the folder of
the tier. The kernel removes such a file with the process, however that ends. Whoever fills the
tiers takes bytes from here before the store is asked; what was taken is forgotten, and its room
given back.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from penstock.errors import OptionError
from penstock.storage.base import Buffer, ObjectInfo, Store
from penstock.storage.tier_files import punch, write_all
from penstock.storage.tier_sizes import Wish, allowance_for, usable_bytes, wished_bytes

_log = logging.getLogger("penstock.storage")


Ranges = tuple[dict[str, int], dict[str, list[tuple[int, int]]]]
"""Where objects begin in a file, and which ranges of each are in it."""


class PassedBytes:
    """What was read of some objects; safe for threads.

    Of more objects than there is room for, the first ones are kept: tiers keep those, too.
    """

    def __init__(self, folder: str, objects: Sequence[ObjectInfo], size_bytes_max: int) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder, prefix=".penstock-passed-")  # noqa: SIM115
        self._begins: dict[str, int] = {}
        """Where each object that is kept begins: they stand in a row, and holes cost no room."""
        at = 0
        for info in objects:
            if at + info.size_bytes > size_bytes_max:
                break
            self._begins[info.key] = at
            at += info.size_bytes
        self._runs: dict[str, list[tuple[int, int]]] = {key: [] for key in self._begins}
        """Ranges of each object that are here, rising, none touching the next."""
        self._is_full = False
        self._lock = threading.Lock()  # Guards the ranges; the file is used outside of it.

    def handed_over(self) -> tuple[int, Ranges]:
        """Return the file and what is in it, for another process; nothing is left here.

        Two processes must not take from one file: what one has taken is a hole, zeros to the other.
        """
        with self._lock:
            runs, self._runs = self._runs, {}
            begins, self._begins = self._begins, {}
        return self._file.fileno(), (begins, runs)

    @classmethod
    def taken_over(cls, file: int, ranges: Ranges) -> PassedBytes:
        """Return what another process has handed over."""
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
            _log.info("what is read while indexing is not kept any more: %s", error)
            self._is_full = True
            return
        with self._lock:
            _add(self._runs[key], offset, offset + len(data))

    def take(self, key: str, offset: int, length: int) -> memoryview | None:
        """Return bytes of an object and forget them; None where not all of them are here."""
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
    """Add a range to rising ones, joined with those that it touches."""
    first = bisect_right(runs, (start,))
    if first and runs[first - 1][1] >= start:
        first -= 1
    last = first
    while last < len(runs) and runs[last][0] <= stop:
        start, stop = min(start, runs[last][0]), max(stop, runs[last][1])
        last += 1
    runs[first:last] = [(start, stop)]


def _remove(runs: list[tuple[int, int]], start: int, stop: int) -> bool:
    """Take a range out of rising ones; return whether one of them held it."""
    number = bisect_right(runs, (start, stop)) - 1
    for at in (number, number + 1):  # The range that begins where this one does may be longer.
        if 0 <= at < len(runs) and runs[at][0] <= start and stop <= runs[at][1]:
            low, high = runs[at]
            runs[at : at + 1] = [r for r in ((low, start), (stop, high)) if r[0] < r[1]]
            return True
    return False


class PassingStore:
    """A store that keeps what is read from it."""

    def __init__(self, store: Store, passed: PassedBytes) -> None:
        self.inner = store
        self.passed = passed

    @property
    def uri(self) -> str:
        """Return the inner store's root."""
        return self.inner.uri

    @property
    def source(self) -> str:
        """Return the inner store's word."""
        return self.inner.source

    @property
    def can_list(self) -> bool:
        """Return whether the inner store can."""
        return self.inner.can_list

    def info(self, key: str) -> ObjectInfo:
        """Return size and marks of an object."""
        return self.inner.info(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects."""
        return self.inner.list(prefix)

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
        """Fill `target`, and keep what it is filled with."""
        self.inner.read_into(info, offset, target)
        self.passed.keep(info.key, offset, target)

    def write(self, key: str, data: Buffer, *, only_if_absent: bool = False) -> ObjectInfo:
        """Put a whole object."""
        return self.inner.write(key, data, only_if_absent=only_if_absent)

    def delete(self, key: str) -> None:
        """Remove an object."""
        self.inner.delete(key)

    def close(self) -> None:
        """Let go of clients and files of the inner store."""
        self.inner.close()


def passing_to(
    tiers: Sequence[Wish], store: Store, objects: Sequence[ObjectInfo]
) -> PassingStore | None:
    """Return a store that keeps what is read for these tiers; None where nothing can be kept.

    The file lies in the tier with most room, a disk before memory, and takes no more than all tiers
    together will, nor any of the room that its own tier is meant to have.
    """
    for tier in tiers:
        if not isinstance(tier, Wish):
            raise OptionError(
                f"tiers={tier!r}: a tier is a place and a size, such as "
                'tiers=[penstock.Disk("/scratch", "200GB")]'
            )
    if store.source in ("folder", "memory"):
        return None  # Read where it lies.
    rooms = []
    total_bytes = 0
    for tier in tiers:
        try:
            room = allowance_for(tier, tier.place)
        except OSError as error:
            _log.info("%s keeps nothing of what is read while indexing: %s", tier.place, error)
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
        _log.info("%s keeps nothing of what is read while indexing: %s", Path(folder), error)
        return None
