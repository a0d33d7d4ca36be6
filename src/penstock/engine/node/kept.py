"""Tiers that the service keeps: their files stay as long as it runs, and peers read from them.

The service joins a tier as one more user (`storage.tier_locks`), so the last job that closes it
does not remove it. It joins only while a job has the tier open: then the present generation goes on
as long as the service stays, and only jobs have to agree on sizes.

Nothing is mapped here. Users own the files and may truncate them at any moment; with a map, that
would raise SIGBUS and end the service for everybody. States and sums are read with `pread`, and
bytes are sent by descriptor.
"""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import xxhash

from penstock.engine.node.folders import OwnedFolder, clear_tier
from penstock.engine.peers.base import ABSENT, UNCHECKED, HeldFile, Lookup, Shelf
from penstock.engine.peers.part_sums import with_part_sums
from penstock.engine.peers.wire import Ints
from penstock.storage.tier_files import read_into
from penstock.storage.tier_folders import CELLS, DATA, LOCK, STATE, SUMS
from penstock.storage.tier_header import HEADER_BYTES, Header, read_header
from penstock.storage.tier_locks import OPENING, USERS, RecordLocks

_OPENING_S_MAX = 1.5
"""Jobs hold the opening lock for milliseconds. A job that is stopped in that moment must not
block the service, nor other jobs that wait for the service's answer (`storage.process_wait`)."""
_UNCHECKED_MAX = 65536
_CHECKED_BYTES_MAX = 2**30


class KeptTier:
    """The open files of a tier, and the service's shared lock on it."""

    def __init__(self, folder: OwnedFolder, kind: str, locks: RecordLocks) -> None:
        self.path = folder.path
        self.kind = kind
        self._locks = locks
        self._state = HeldFile(folder.open_file(STATE), close=True)
        self._sums = HeldFile(folder.open_file(SUMS, os.O_RDONLY), close=True)
        self._cells = HeldFile(folder.open_file(CELLS, os.O_RDONLY), close=True)
        self.file = HeldFile(
            folder.open_file(DATA, os.O_RDONLY), is_disk=kind == "disk", close=True
        )
        header = read_header(self._state.descriptor)
        if header is None:
            raise OSError(5, "no tier", folder.path)
        self.header: Header = header
        self.cells_descriptor = self._cells.descriptor

    def state_of(self, unit: int) -> int:
        """Return a unit's state: 0 if absent, else the generation that verified it."""
        if not 0 <= unit < self.header.num_units:
            return 0
        data = os.pread(self._state.descriptor, 1, HEADER_BYTES + unit)
        return data[0] if data else 0

    def read_data(self, target: memoryview, offset: int) -> bool:
        """Fill a buffer from the data file; False if the file ends before."""
        return read_into(self.file.descriptor, target, offset)

    def sum_of(self, unit: int) -> int:
        """Return the sum that was written for a unit."""
        return int.from_bytes(os.pread(self._sums.descriptor, 8, 8 * unit), "little")

    @property
    def size_bytes(self) -> int:
        """The length of the data file."""
        return os.fstat(self.file.descriptor).st_size

    def settle(self, unit: int, offset: int, length: int) -> bool | None:
        """Mark a unit as verified if its bytes match its sum; None: a job holds the unit now.

        Holds the unit's lock, because a job may be dropping the unit to make room.
        """
        if not self._locks.claim(unit):
            return None
        try:
            if not self.state_of(unit) or not self._has_sum(unit, offset, length):
                return False
            state = bytes((self.header.generation,))
            os.pwrite(self._state.descriptor, state, HEADER_BYTES + unit)
            return True
        finally:
            self._locks.release(unit)

    def _has_sum(self, unit: int, offset: int, length: int) -> bool:
        hasher = xxhash.xxh3_64()
        while length:
            data = os.pread(self.file.descriptor, min(length, 4 * 2**20), offset)
            if not data:
                return False
            hasher.update(data)
            offset, length = offset + len(data), length - len(data)
        return hasher.intdigest() == self.sum_of(unit)

    def leave(self) -> None:
        """Stop being a user of the tier; the files stay as they are."""
        self._locks.close()

    def try_alone(self) -> bool:
        """Return whether nobody else has it open; then nobody can open it before `leave`."""
        return _has_opening(self._locks) and self._locks.try_alone(USERS)

    def stay(self) -> None:
        """Share the tier with others again after `try_alone`."""
        self._locks.try_shared(USERS)
        self._locks.drop(OPENING)


def join(folder: OwnedFolder, kind: str) -> KeptTier | None:
    """Become a user of a tier; None if no job has it open."""
    locks = RecordLocks(folder.open_file(LOCK))
    try:
        if not _has_opening(locks):
            raise TimeoutError(
                f"{folder.path} has been held for {_OPENING_S_MAX:g} s by a process that opens or "
                "closes it; is that process stopped?"
            )
        if locks.try_alone(USERS):
            locks.close()
            return None
        tier = KeptTier(folder, kind, locks)
        locks.try_shared(USERS)
        locks.drop(OPENING)
        return tier
    except BaseException:
        locks.close()
        raise


def remove_if_unused(folder: OwnedFolder, above: OwnedFolder) -> bool:
    """Remove a tier that the service does not keep, unless a job uses it."""
    try:
        locks = RecordLocks(folder.open_file(LOCK))
    except OSError:
        return False
    try:
        if not (locks.try_alone(OPENING) and locks.try_alone(USERS)):
            return False
        clear_tier(folder, above)
        return True
    finally:
        locks.close()


def _has_opening(locks: RecordLocks) -> bool:
    """Take the opening lock; False if another process does not give it back in time."""
    end_s = time.monotonic() + _OPENING_S_MAX
    while not locks.try_alone(OPENING):
        if time.monotonic() > end_s:
            return False
        time.sleep(0.005)
    return True


class KeptShelf(Shelf):
    """The kept tiers of a data set, as a shelf for one run."""

    def __init__(self, name: bytes, tiers: tuple[KeptTier, ...], progress: RunProgress) -> None:
        self.name = name
        self._tiers = tiers
        self._progress = progress
        # Guards the sets below: the server's loops and its `LeftoverChecker` use them.
        self._mutex = threading.Lock()
        self._unchecked: dict[int, tuple[KeptTier, int, int]] = {}
        self._wrong: set[int] = set()
        """Units whose sum was wrong; they are served again once a job has verified them."""
        self._spoilt: set[int] = set()
        """Units that their device could not read."""

    def progress_mark(self) -> int:
        """Return how far the run's ranks on this node have filled."""
        return self._progress.progress_mark

    def is_filling(self) -> bool:
        """Return whether any of them is still filling."""
        return self._progress.is_filling

    def lookup(self, ranges: Ints) -> Lookup:
        """Return where the units of some ranges lie."""
        sizes = [tier.size_bytes for tier in self._tiers]
        rows = ranges[:, :3].tolist()
        found = [self._place(unit, offset, length, sizes) for unit, offset, length in rows]
        looked_up = Lookup(
            places=np.array([place for place, _ in found], np.int64),
            files=tuple(tier.file for tier in self._tiers),
            sums=np.array([total for _, total in found], np.uint64),
        )
        return with_part_sums(ranges, looked_up, self._tiers)

    def _place(self, unit: int, offset: int, length: int, sizes: list[int]) -> tuple[int, int]:
        """Return the number of the tier that has a unit, and the unit's sum."""
        place = ABSENT
        for number, tier in enumerate(self._tiers):
            state = tier.state_of(unit)
            if not state or offset + length > sizes[number] or unit in self._spoilt:
                continue
            if state == tier.header.generation:
                return number, tier.sum_of(unit)
            if self._note_unchecked(tier, unit, offset, length):
                place = UNCHECKED
        return place, 0

    def _note_unchecked(self, tier: KeptTier, unit: int, offset: int, length: int) -> bool:
        with self._mutex:
            is_full = len(self._unchecked) >= _UNCHECKED_MAX
            if is_full or unit in self._wrong or length > _CHECKED_BYTES_MAX:
                return False
            self._unchecked[unit] = (tier, offset, length)
            return True

    def settle(self, units: Ints) -> None:
        """Check units that an earlier generation has verified.

        A unit with a wrong sum is not served, but its state stays: the client named its position
        and may be wrong. A job that fills the tier checks the unit by itself.
        """
        for unit in units.tolist():
            with self._mutex:
                known = self._unchecked.pop(unit, None)
            if known is None:
                continue
            tier, offset, length = known
            try:
                is_good = tier.settle(unit, offset, length)
            except OSError:
                is_good = False
            if is_good is False:
                with self._mutex:
                    self._wrong.add(unit)

    def spoil(self, unit: int) -> None:
        """Never serve a unit again, because it could not be read."""
        with self._mutex:
            self._spoilt.add(unit)


class RunProgress:
    """How far a run's ranks on this node have filled; all shelves of the run share it."""

    progress_mark: int = 0
    is_filling: bool = False
