"""Spare units: units that lie in a tier but have no place there now.

When nodes come and go, the homes of units change. Units from earlier runs stay here and may be
served until their room is needed: before a tier would exceed its capacity, it drops as many spare
units as necessary.

Only units that the present generation has not verified are dropped, so nobody can be using them.
Dropping holds the unit's lock, so nobody can verify or fill it meanwhile. The state is cleared
before the bytes: a process that is killed in between leaves bytes that count as absent, and these
are found here again.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator

import numpy as np

from penstock.storage.tier_files import Bytes, TierFiles
from penstock.storage.tier_places import NOWHERE
from penstock.storage.tier_shape import Bools, Ints, TierShape

_CHUNK_UNITS = 1 << 14
"""Units whose states are read at once."""
_FAR = 2**63 - 1


class Spares:
    """The spare units of one tier; each is visited once."""

    def __init__(
        self, files: TierFiles, shape: TierShape, tier_of: Callable[[Ints], Ints], number: int
    ) -> None:
        self._files, self._shape = files, shape
        self._tier_of, self._number = tier_of, number
        self._loose = self._all_loose()
        # Guards the generator `_loose`, which two threads must not advance at once.
        self._mutex = threading.Lock()
        self.is_over = False

    def make_room(self, needed_bytes: int, capacity_bytes: int) -> None:
        """Drop spare units until so many bytes fit, or there are none left."""
        while self._files.data_taken_bytes + needed_bytes > capacity_bytes:
            if not self.drop_one():
                break

    def drop_one(self) -> bool:
        """Drop a spare unit; False if there is none, or another thread is dropping one."""
        if self.is_over or not self._mutex.acquire(blocking=False):
            return False
        try:
            self.is_over = not any(self._has_dropped(unit) for unit in self._loose)
        finally:
            self._mutex.release()
        return not self.is_over

    def _has_dropped(self, unit: int) -> bool:
        files = self._files
        if not files.locks.claim(unit):
            return False
        try:
            if files.state_of(unit) == files.generation:
                return False
            if files.state_of(unit):
                files.set_state(unit, 0)
            return files.punch(*self._shape.extent(unit))
        finally:
            files.locks.release(unit)

    def _all_loose(self) -> Iterator[int]:
        """Yield units that take room and that this generation has not verified.

        Units that belong to another tier of this node come last: they can be copied from here.
        """
        for are_mine in (False, True):
            for stop in range(self._shape.num_units, 0, -_CHUNK_UNITS):
                units = np.arange(max(0, stop - _CHUNK_UNITS), stop)
                units = units[self._is_loose(self._files.states_of(units))]
                tiers = self._tier_of(units)
                units = units[(tiers != self._number) & ((tiers != NOWHERE) == are_mine)]
                if len(units) and self._files.locks.can_claim:
                    yield from self._with_bytes(units)

    def _is_loose(self, states: Bytes) -> Bools:
        is_loose: Bools = states != self._files.generation
        if self._shape.is_computed:
            # Half-written and half-dropped units stay: there are too many places to check.
            is_loose &= states != 0
        return is_loose

    def _with_bytes(self, units: Ints) -> Iterator[int]:
        """Yield those of some units that take room, but none in the part that a single node uses.

        Jobs on one and on several nodes may share a tier, and the header tells only which part of
        the layout the former use.
        """
        header = self._files.read_header()
        units = units[np.argsort(self._shape.offsets[units])]
        offsets, ends = self._shape.offsets[units], self._shape.ends(units)
        data_at = -1
        for unit, offset, end in zip(units.tolist(), offsets.tolist(), ends.tolist(), strict=True):
            if offset == end or (header.first <= offset and end <= header.last):
                continue
            if data_at < offset:
                data_at = _data_from(self._files.data_descriptor, offset)
            if data_at < end:
                yield unit


def _data_from(descriptor: int, offset: int) -> int:
    """Return where the next allocated bytes begin."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as error:
        return _FAR if error.errno == errno.ENXIO else offset
