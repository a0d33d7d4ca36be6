"""A tier that the service keeps: its files stay as long as it does, and peers read from them.

The service joins as one more user of the tier (`storage.tier_locks`), so the last job to leave
does not remove it. It joins only beside a job that has it open: what was vouched for then is good
as long as the service stays, and sizes are settled by those who fill.

Nothing is mapped here. The files belong to users, who may cut them short at any moment, and a map
would answer that with a signal that ends the service for everybody. States and sums are read with
`pread`, bytes are sent by descriptor.
"""

from __future__ import annotations

import os
import threading

import numpy as np
import xxhash

from penstock.clock import Clock, SystemClock
from penstock.engine.node.folders import OwnedFolder, clear_tier
from penstock.engine.peers.base import (
    ABSENT,
    UNCHECKED,
    HeldFile,
    Ints,
    Lookup,
    Shelf,
    UnitLocation,
)
from penstock.engine.peers.part_sums import with_part_sums
from penstock.storage.tier_files import read_into
from penstock.storage.tier_folders import CELLS, DATA, LOCK, STATE, SUMS
from penstock.storage.tier_header import HEADER_BYTES, Header, read_header
from penstock.storage.tier_locks import OPENING, USERS, RecordLocks

_OPENING_S_MAX = 1.5
"""The opening moment takes milliseconds; a job that is stopped in it must not stop the service, nor
other jobs that wait for its answer (`storage.process_wait`)."""
_UNCHECKED_MAX = 65536
_CHECKED_BYTES_MAX = 2**30


class KeptTier:
    """A tier's files, held open, and the service's share in its lock."""

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
        """Return a unit's state: 0 absent, else the generation that vouched for it."""
        if not 0 <= unit < self.header.num_units:
            return 0
        data = os.pread(self._state.descriptor, 1, HEADER_BYTES + unit)
        return data[0] if data else 0

    def read_data(self, target: memoryview, offset: int) -> bool:
        """Fill a buffer from the data file; False where that ends before."""
        return read_into(self.file.descriptor, target, offset)

    def sum_of(self, unit: int) -> int:
        """Return the sum that was written for a unit."""
        return int.from_bytes(os.pread(self._sums.descriptor, 8, 8 * unit), "little")

    @property
    def size_bytes(self) -> int:
        """How long the data file is."""
        return os.fstat(self.file.descriptor).st_size

    def settle(self, unit: int, offset: int, length: int) -> bool | None:
        """Vouch for a unit whose bytes have their sum; None: a job is at it just now.

        Under the unit's lock, since a job may be dropping it to make room.
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
        """Let the next one who opens it be alone; the files stay as they are."""
        self._locks.close()

    def try_alone(self) -> bool:
        """Return whether nobody else has it open, who then cannot begin to until we leave."""
        return _taken(self._locks, OPENING) and self._locks.try_alone(USERS)

    def stay(self) -> None:
        """Be one among others again after `try_alone`."""
        self._locks.try_shared(USERS)
        self._locks.drop(OPENING)


def join(folder: OwnedFolder, kind: str) -> KeptTier | None:
    """Become a user of a tier; None where no job has it open."""
    locks = RecordLocks(folder.open_file(LOCK))
    try:
        if not _taken(locks, OPENING):
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


def _taken(locks: RecordLocks, byte: int, clock: Clock | None = None) -> bool:
    clock = clock or SystemClock()
    end_s = clock.now_s() + _OPENING_S_MAX
    while not locks.try_alone(byte):
        if clock.now_s() > end_s:
            return False
        clock.sleep(0.005)
    return True


class KeptShelf(Shelf):
    """A data set's kept tiers, as they are served to one run."""

    def __init__(self, name: bytes, tiers: tuple[KeptTier, ...], progress: RunProgress) -> None:
        self.name = name
        self._tiers = tiers
        self._progress = progress
        self._mutex = threading.Lock()
        self._unchecked: dict[int, tuple[KeptTier, int, int]] = {}
        self._wrong: set[int] = set()
        """Units whose sum was wrong; good again once a job vouches for them."""
        self._spoilt: set[int] = set()
        """Units that their device does not give."""

    def cursor(self) -> int:
        """Return how far the run's ranks on this node have filled."""
        return self._progress.cursor

    def is_filling(self) -> bool:
        """Return whether any of them still fills."""
        return self._progress.is_filling

    def find(self, unit: int, unit_offset: int, unit_length: int) -> UnitLocation | None:
        """Return where a unit lies, checked."""
        row = np.array([[unit, unit_offset, unit_length, 0, unit_length]], np.int64)
        found = self.lookup(row)
        if found.places[0] == UNCHECKED:
            self.settle(row[:, 0])
            found = self.lookup(row)
        if found.places[0] < 0:
            return None
        file = found.files[found.places[0]]
        return UnitLocation(descriptor=file.descriptor, total=int(found.sums[0]), file=file)

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
        """Check units that an earlier generation vouched for.

        One whose sum is wrong is left as it is, and not served: where it lies is only the
        asker's word, and a job that fills finds out for itself.
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
        """Serve a unit no more."""
        with self._mutex:
            self._spoilt.add(unit)


class RunProgress:
    """How far a run's ranks on this node are; all words of one run share it."""

    cursor: int = 0
    is_filling: bool = False
