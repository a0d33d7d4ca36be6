"""Tiers: bytes of a data set that a node keeps near, in memory and on disk.

A tier is a folder with a sparse file in which every unit has its fixed place (`tier_files`). All
ranks of a node and all its jobs use it at once and no process is in charge: whoever wants a unit
that is not there claims it, fetches it and writes it; everybody else reads it from the map.

    with open_tiers([Memory("8GB"), Disk("/scratch", "200GB")], shape) as tiers:
        tier = tiers.tiers[0]
        if not tiers.held(units).all() and tier.claim(unit):
            try:
                tier.write(unit, fetched)
            finally:
                tier.release(unit)

A tier that cannot be had (a read-only folder, no room) is left out with a warning that says what to
do; one that is larger than the device becomes smaller. A tier is never the only place of a byte, so
no failure here is worth ending a run.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from types import TracebackType

import numpy as np
import xxhash

from penstock.storage.base import Buffer
from penstock.storage.tier_files import Bytes, TierFiles, write_all
from penstock.storage.tier_registry import enter, release
from penstock.storage.tier_shape import Bools, Ints, TierShape
from penstock.storage.tier_sizes import memory_left_bytes

_LOOK_EVERY_BYTES = 64 * 2**20
"""Written to a memory tier between two looks at what the node has left."""
_LEFT_BYTES_MAX, _LEFT_SHARE = 256 * 2**20, 0.02
"""A memory tier stops where less is left, or less than this share of what there was at first: other
programs may have grown since it was opened, and the kernel would end one of them."""

_log = logging.getLogger("penstock.storage")


class Tier:
    """One tier as one user sees it: shared files, and the part of the layout that it fills."""

    def __init__(
        self, files: TierFiles, shape: TierShape, *, capacity_bytes: int, first: int, last: int
    ) -> None:
        self._files = files
        self._shape = shape
        self.kind = files.kind
        self.source = f"tier:{files.kind}"
        self.path = files.folder.path
        self.capacity_bytes = capacity_bytes
        self.first = first
        """Where the units that are placed here begin in the layout."""
        self.last = last
        """Where they end."""
        self._has_warned = False
        self._unlooked_bytes = 0
        self._left_bytes_min = min(_LEFT_BYTES_MAX, int(_LEFT_SHARE * memory_left_bytes()))

    def __repr__(self) -> str:
        return f"Tier({self.path!r}, capacity_bytes={self.capacity_bytes})"

    @property
    def data(self) -> Bytes:
        """The data file, mapped, to read from: a unit lies at its offset in the layout.

        Only units that are held: on a full tmpfs a look at a hole ends the process.
        """
        return self._files.data

    @property
    def descriptor(self) -> int:
        """The data file, for `preadv`."""
        return self._files.data_descriptor

    @property
    def fill_bytes(self) -> int:
        """Bytes of units that lie here, also those not yet checked."""
        return int(self._shape.lengths[self._files.states != 0].sum())

    @property
    def is_full(self) -> bool:
        """Whether the device refused room a short while ago, to any process."""
        return self._files.is_full

    def owns(self, units: Ints) -> Bools:
        """Return which units are placed here."""
        return (self._shape.offsets[units] >= self.first) & (self._shape.ends[units] <= self.last)

    def held(self, units: Ints) -> Bools:
        """Return which units are here and vouched for."""
        enter(self._files)
        held: Bools = self._files.states[units] == self._files.generation
        return held

    def present(self, units: Ints) -> Bools:
        """Return which units are here, also those that an earlier run vouched for."""
        enter(self._files)
        present: Bools = self._files.states[units] != 0
        return present

    def unchecked(self, units: Ints) -> Bools:
        """Return which units are here but must be checked before they are used."""
        enter(self._files)
        states = self._files.states[units]
        unchecked: Bools = (states != 0) & (states != self._files.generation)
        return unchecked

    def claim(self, unit: int) -> bool:
        """Take a unit to fill it, without waiting.

        False: another process or thread is filling it, or it is here by now. What an earlier run
        left is checked for that, so True means that nothing good lies there.
        """
        files = self._files
        enter(files)
        if not files.locks.claim(unit):
            return False
        if not files.states[unit]:
            return True
        if files.states[unit] != files.generation:
            files.set_state(unit, files.generation if self.check(unit) else 0)
        if files.states[unit]:
            self.release(unit)
        return not files.states[unit]

    def release(self, unit: int) -> None:
        """Give a claim back."""
        self._files.locks.release(unit)

    def write(self, unit: int, view: Buffer) -> bool:
        """Fill a claimed unit; False where there is no room for it."""
        files, data = self._files, memoryview(view)
        offset, length = int(self._shape.offsets[unit]), int(self._shape.lengths[unit])
        assert files.locks.has_claimed(unit), f"unit {unit} is not claimed"
        assert data.nbytes == length, f"unit {unit} has {length} bytes, got {data.nbytes}"
        assert self.first <= offset <= offset + length <= self.last, f"unit {unit} is elsewhere"
        if files.is_full:
            return False
        if files.states[unit]:
            files.set_state(unit, 0)
        try:
            self._look_at_memory(length)
            if length:
                write_all(files.data_descriptor, data.cast("B"), offset)
            files.write_sum(unit, xxhash.xxh3_64_intdigest(data))
            # Last, so that nobody ever sees a unit that is not all there.
            files.set_state(unit, files.generation)
        except OSError as error:
            self._refused(error, offset, length)
            return False
        return True

    def _look_at_memory(self, length: int) -> None:
        self._unlooked_bytes += length
        if self.kind != "memory" or self._unlooked_bytes < _LOOK_EVERY_BYTES:
            return
        self._unlooked_bytes = 0
        if memory_left_bytes() < self._left_bytes_min:
            raise OSError(errno.ENOMEM, "the node is running out of memory")

    def _refused(self, error: OSError, offset: int, length: int) -> None:
        if error.errno == errno.EBADF:
            raise error
        files = self._files
        files.punch(offset, length)
        files.set_full()
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the %s tier %s takes no more (%s); what does not fit there is read from the "
                "source each time: free some room or wish for a smaller tier",
                self.kind,
                self.path,
                error.strerror,
            )

    def forget(self, unit: int) -> None:
        """Let a unit count as absent, whatever lies there."""
        enter(self._files)
        self._files.set_state(unit, 0)

    def read(self, unit: int) -> memoryview:
        """Return the bytes of a unit that is held: from the map in memory, read from a disk."""
        offset, length = int(self._shape.offsets[unit]), int(self._shape.lengths[unit])
        if self.kind == "memory":
            return self._files.data[offset : offset + length].data
        return self._copied(offset, length)

    def _copied(self, offset: int, length: int) -> memoryview:
        target = rest = np.empty(length, np.uint8).data
        while rest.nbytes:
            count = os.preadv(self._files.data_descriptor, [rest], offset + length - rest.nbytes)
            if count == 0:
                raise OSError(errno.EIO, "the data file ends early", self.path)
            rest = rest[count:]
        return target

    def check(self, unit: int) -> bool:
        """Return whether what lies at a unit's place has the sum that was written for it."""
        offset, length = int(self._shape.offsets[unit]), int(self._shape.lengths[unit])
        try:  # never through the map: there may be a hole, or a bad sector
            return self._matches(unit, self._copied(offset, length))
        except OSError as error:
            _log.warning("%s cannot be read at unit %d (%s)", self.path, unit, error.strerror)
            return False

    def _matches(self, unit: int, data: memoryview) -> bool:
        (expected,) = self._files.sums_of(np.array([unit]))
        return xxhash.xxh3_64_intdigest(data) == expected

    def settle(self, units: Ints) -> Bools:
        """Check the unchecked among some units; return which of them all are here and good."""
        good = self.held(units)
        for place in np.flatnonzero(self.unchecked(units)).tolist():
            good[place] = self._settled(int(units[place]), None)
        return good

    def settle_with(self, unit: int, data: memoryview) -> bool:
        """Settle one unit by its bytes, for those who have read them already."""
        if self._files.states[unit] == self._files.generation:
            return True
        return bool(self._files.states[unit]) and self._settled(unit, data)

    def _settled(self, unit: int, data: memoryview | None) -> bool:
        enter(self._files)
        if self.check(unit) if data is None else self._matches(unit, data):
            self._files.set_state(unit, self._files.generation)
            return True
        # Another process may just be filling it anew, which must not be undone.
        if self._files.locks.claim(unit):
            if self._files.states[unit] != self._files.generation:
                self._files.set_state(unit, 0)
            self.release(unit)
        return False


class Tiers:
    """The tiers of a node, first the fastest; a context that closes them."""

    def __init__(self, tiers: Sequence[Tier], shape: TierShape) -> None:
        self.tiers = tuple(tiers)
        self.shape = shape
        self._tier_of = np.full(shape.num_units, -1, np.int64)
        everything = np.arange(shape.num_units)
        for number in reversed(range(len(self.tiers))):
            self._tier_of[self.tiers[number].owns(everything)] = number
        self._files = [tier._files for tier in self.tiers]

    def __enter__(self) -> Tiers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all tiers; the last user of a memory tier removes it."""
        files, self._files = self._files, []
        for one in files:
            release(one)

    def tier_of(self, units: Ints) -> Ints:
        """Return the number of the tier in which each unit has its place; -1 where in none."""
        found: Ints = self._tier_of[units]
        return found

    @property
    def placed_bytes(self) -> int:
        """Bytes of the units that have a place."""
        return int(self.shape.lengths[self._tier_of >= 0].sum())

    @property
    def present_bytes(self) -> int:
        """Bytes of the units with a place that lie in any tier already, checked or not."""
        units = np.flatnonzero(self._tier_of >= 0)
        return int(self.shape.lengths[units[self.present(units)]].sum())

    def held(self, units: Ints) -> Bools:
        """Return which units are in their own tier and vouched for."""
        return self._asked("held", units)

    def unchecked(self, units: Ints) -> Bools:
        """Return which units are in their own tier but must be checked before they are used."""
        return self._asked("unchecked", units)

    def settle(self, units: Ints) -> Bools:
        """Check the unchecked among some units; return which are in their own tier and good."""
        return self._asked("settle", units)

    def _asked(self, question: str, units: Ints) -> Bools:
        owners = self._tier_of[units]
        out = np.zeros(len(units), np.bool_)
        for number, tier in enumerate(self.tiers):
            mine = owners == number
            if mine.any():
                out[mine] = getattr(tier, question)(units[mine])
        return out

    def present(self, units: Ints) -> Bools:
        """Return which units lie in any tier, checked or not."""
        out = np.zeros(len(units), np.bool_)
        for tier in self.tiers:
            out |= tier.present(units)
        return out

    def holder(self, unit: int) -> Tier | None:
        """Return a tier that has a unit, checked; its own tier first.

        After sizes have changed a unit may lie in another tier than the one it belongs to: it is
        read or copied from there and not fetched again.
        """
        own = int(self._tier_of[unit])
        order = sorted(range(len(self.tiers)), key=lambda number: number != own)
        one = np.array([unit])
        for number in order:
            tier = self.tiers[number]
            is_mapped = int(self.shape.ends[unit]) <= tier.data.nbytes
            if is_mapped and tier.present(one)[0] and tier.settle(one)[0]:
                return tier
        return None
