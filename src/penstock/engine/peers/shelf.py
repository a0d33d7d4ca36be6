"""A node's tiers as a shelf that a server can serve.

Requests have the coordinates of the tier's file, so a server needs only a unit's state, its sum and
a descriptor. The shelf duplicates the descriptor, because tiers may be closed while an answer is
being sent, and the same number could then mean another file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import numpy as np

from penstock.engine.peers.base import ABSENT, UNCHECKED, HeldFile, Lookup, Shelf
from penstock.engine.peers.part_sums import with_part_sums
from penstock.engine.peers.wire import SHELF_BYTES, UNIT, UNIT_LENGTH, UNIT_OFFSET, Ints
from penstock.storage.tier import Tiers

_FEW = 4
"""Ranges up to which a loop is quicker than arrays."""

_log = logging.getLogger("penstock.engine.peers")


class TierShelf(Shelf):
    """The units of one data set that lie on this node, in whichever tier."""

    def __init__(
        self,
        name: bytes,
        tiers: Tiers,
        progress_mark: Callable[[], int],
        is_filling: Callable[[], bool],
        are_at_home: Callable[[Ints], bool] = lambda units: True,
    ) -> None:
        """`are_at_home` returns whether all of some units have their home on this node."""
        assert len(name) == SHELF_BYTES, name
        self.name = name
        self._tiers = tiers.tiers
        self._num_units = tiers.shape.num_units
        self._progress_mark = progress_mark
        self._is_filling = is_filling
        self._are_at_home = are_at_home
        self._files: tuple[HeldFile, ...] | None = None
        self._sizes = np.zeros(len(self._tiers), np.int64)

    def progress_mark(self) -> int:
        """Return a number that changes while this node makes progress."""
        return self._progress_mark()

    def is_filling(self) -> bool:
        """Return whether absent units may still come: filling goes on."""
        return self._is_filling()

    def are_coming(self, units: Ints) -> bool:
        """Return whether all of some absent units may still come."""
        return self._is_filling() and self._are_at_home(units)

    def lookup(self, ranges: Ints) -> Lookup:
        """Return where the units of some ranges lie."""
        try:
            files = self._files or self._opened()
            look = self._looked_up_few if len(ranges) <= _FEW else self._looked_up
            found = look(ranges, files)
            return with_part_sums(ranges, found, [tier.files for tier in self._tiers])
        except (IndexError, OSError):  # the tiers were closed meanwhile
            _log.debug("a lookup on a shelf whose tiers are closed", exc_info=True)
            return Lookup.nothing(len(ranges))

    def _looked_up_few(self, ranges: Ints, files: tuple[HeldFile, ...]) -> Lookup:
        places, sums = [], []
        for unit, offset, length, _, _ in ranges.tolist():
            place, total = ABSENT, 0
            for number, tier in enumerate(self._tiers):
                if not tier.covers(unit, offset, length):
                    continue
                if tier.is_held(unit):
                    place, total = number, tier.sum_of(unit)
                    break
                if place == ABSENT and tier.present(np.array([unit]))[0]:
                    place = UNCHECKED
            places.append(place)
            sums.append(total)
        return Lookup(
            places=np.array(places, np.int64), files=files, sums=np.array(sums, np.uint64)
        )

    def _looked_up(self, ranges: Ints, files: tuple[HeldFile, ...]) -> Lookup:
        sums = np.zeros(len(ranges), np.uint64)
        places = np.full(len(ranges), ABSENT, np.int64)
        units, ends = ranges[:, UNIT], ranges[:, UNIT_OFFSET] + ranges[:, UNIT_LENGTH]
        is_valid = (units >= 0) & (units < self._num_units)
        if not is_valid.all():
            units = np.where(is_valid, units, 0)
        for number, tier in enumerate(self._tiers if self._num_units else ()):
            can_be = is_valid & (places < 0) & self._reaches(number, ends)
            is_here = can_be & tier.held(units)
            places[is_here] = number
            sums[is_here] = tier.sums_of(units[is_here])
            if is_here.all():
                break
            places[can_be & ~is_here & tier.unchecked(units)] = UNCHECKED
        return Lookup(places=places, files=files, sums=sums)

    def _reaches(self, number: int, ends: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        if len(ends) and int(ends.max()) > self._sizes[number]:
            assert self._files is not None
            # Another process may have let the file grow since the last look.
            self._sizes[number] = os.fstat(self._files[number].descriptor).st_size
        is_within: np.ndarray[tuple[int], np.dtype[np.bool_]] = ends <= self._sizes[number]
        return is_within

    def _opened(self) -> tuple[HeldFile, ...]:
        self._files = tuple(
            HeldFile(os.dup(tier.descriptor), is_disk=tier.kind == "disk", close=True)
            for tier in self._tiers
        )
        return self._files

    def settle(self, units: Ints) -> None:
        """Check the sums of units that an earlier run left."""
        units = units[(units >= 0) & (units < self._num_units)]
        try:
            for tier in self._tiers:
                tier.settle(units)
        except (IndexError, OSError):
            _log.debug("a check on a shelf whose tiers are closed", exc_info=True)

    def spoil(self, unit: int) -> None:
        """Count a unit as absent, because it cannot be read."""
        for tier in self._tiers:
            tier.forget(unit)
