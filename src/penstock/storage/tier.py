"""Tiers: caches of a data set on a node, in memory and on disk.

A tier is a folder with a sparse file in which every unit has its fixed place (`tier_files`). All
ranks of a node and all its jobs use it at once, and no process is in charge. A process that needs
an absent unit claims it, fetches it and writes it; all others read it from the file.

    with open_tiers([Memory("8GB"), Disk("/scratch", "200GB")], shape) as tiers:
        tier = tiers.tiers[0]
        if not tiers.held(units).all() and tier.claim(unit):
            try:
                tier.write(unit, fetched)
            finally:
                tier.release(unit)

If several nodes share a data set, `open_tiers(…, placed=False)` decides sizes only, and
`tiers.place(span_bytes, spans)` says which part of the layout belongs to this node (`tier_places`).

A tier that cannot be opened (a read-only folder, no room) is left out, with a warning that says
what to do; a tier larger than its device becomes smaller. Bytes are checked each time they are read
(`tier_reads`), and a damaged unit counts as absent. The store has every byte of a tier, so no
failure of a tier ends a run.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np

from penstock.memory import memory_left_bytes
from penstock.storage.base import Buffer
from penstock.storage.tier_files import Bytes, TierFiles, write_all
from penstock.storage.tier_identity import identity_of
from penstock.storage.tier_places import (
    NOWHERE,
    SpanPlaces,
    TierPlacement,
    UnitPlaces,
    places_of,
)
from penstock.storage.tier_reads import copy_ranges, read_unit
from penstock.storage.tier_registry import announce_fill, enter_after_fork, release
from penstock.storage.tier_shape import PAGE_BYTES, Bools, Ints, TierShape
from penstock.storage.tier_spare import Spares

_LOOK_EVERY_BYTES = 64 * 2**20
"""Bytes written to a memory tier between two checks of the node's free memory."""
_LEFT_BYTES_MAX, _LEFT_SHARE = 256 * 2**20, 0.02
"""A memory tier stops growing when the node has less memory left than these bytes, or than this
share of what it had at first if that is less: other programs may have grown, and the kernel would
kill one of them."""
_ROUNDED_BYTES = 1 << 20
"""What a tier may take beyond its capacity, because devices allocate whole pages."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_VOUCH_TRIES_MAX, _VOUCH_S = 100, 0.0005
"""Tries and pause while another process holds an unchecked unit: it only marks it as verified or
drops it, so it holds the lock only briefly."""

_log = logging.getLogger("penstock.storage")


class Tier:
    """One tier for one user: shared files, and the units that belong there."""

    def __init__(
        self, files: TierFiles, shape: TierShape, *, capacity_bytes: int, first: int, last: int
    ) -> None:
        self.files = files
        self._shape = shape
        self.kind = files.kind
        self.source = f"tier:{files.kind}"
        self.path = files.folder.path
        self.capacity_bytes = capacity_bytes
        self.part = (first, last)
        """The part of the layout whose units belong here; only on a single node."""
        self._has_warned = False
        self._unlooked_bytes = 0
        self._left_bytes_min = min(_LEFT_BYTES_MAX, int(_LEFT_SHARE * memory_left_bytes()))
        self._spares: Spares | None = None
        self.is_moving = False
        """Whether units come and go here, so that each write counts the room that is left."""
        # Guards the number of bytes being written: two threads must not count on the same room.
        self._writing = threading.Lock()
        self._writing_bytes = 0

    def set_places(self, places: TierPlacement, number: int, *, has_spares: bool) -> None:
        """Set which units belong here; `has_spares`: others may lie here as well."""
        self._places, self._number = places, number
        files, shape = self.files, self._shape
        self._spares = Spares(files, shape, places.tier_of, number) if has_spares else None

    def __repr__(self) -> str:
        return f"Tier({self.path!r}, capacity_bytes={self.capacity_bytes})"

    @property
    def descriptor(self) -> int:
        """The data file."""
        return self.files.data_descriptor

    @property
    def fill_bytes(self) -> int:
        """Bytes of units that lie here, including those not yet checked."""
        if self._shape.is_computed:
            return self.files.data_taken_bytes
        held = (units[self.present(units)] for units in self._shape.chunks())
        return sum(int(self._shape.lengths[units].sum()) for units in held)

    @property
    def num_damaged(self) -> int:
        """Units that this process found damaged; each was fetched again."""
        return self.files.num_damaged

    @property
    def is_full(self) -> bool:
        """Whether the device refused room a short while ago, to any process."""
        return self.files.is_full

    def is_held(self, unit: int) -> bool:
        """Return whether a unit is here and verified."""
        enter_after_fork(self.files)
        return self.files.is_held(unit)

    def covers(self, unit: int, offset: int, length: int) -> bool:
        """Return whether the unit exists and the range lies inside the data file."""
        is_unit = 0 <= unit < self._shape.num_units
        if not is_unit or offset < 0 or length < 0:
            return False
        return offset + length <= self.files.data_bytes

    def sum_of(self, unit: int) -> int:
        """Return the sum that was written for a unit."""
        return self.files.sum_of(unit)

    def sums_of(self, units: Ints) -> list[int]:
        """Return the sums that were written for some units."""
        return [self.files.sum_of(unit) for unit in units.tolist()]

    def held(self, units: Ints) -> Bools:
        """Return which units are here and verified."""
        enter_after_fork(self.files)
        return self.files.held(units)

    def present(self, units: Ints) -> Bools:
        """Return which units are here, including those that only an earlier run has verified."""
        enter_after_fork(self.files)
        present: Bools = self.files.states_of(units) != 0
        return present

    def unchecked(self, units: Ints) -> Bools:
        """Return which units are here but must be checked before they are used."""
        enter_after_fork(self.files)
        states = self.files.states_of(units)
        unchecked: Bools = (states != 0) & (states != self.files.generation)
        return unchecked

    def claim(self, unit: int) -> bool:
        """Claim a unit to fill it; does not wait.

        False: another process or thread is filling it, or it is here by now. A unit that an earlier
        run left is checked first, so True means that there is no valid copy here.
        """
        files = self.files
        enter_after_fork(files)
        if files.is_lost:
            return True  # the tier holds nothing any more: the caller fetches the unit for itself
        if not files.locks.claim(unit):
            return False
        if not files.state_of(unit):
            return True
        if files.state_of(unit) != files.generation:
            files.set_state(unit, files.generation if self.check(unit) else 0)
        if files.state_of(unit):
            self.release(unit)
        return not files.state_of(unit)

    def release(self, unit: int) -> None:
        """Give a claim back."""
        self.files.locks.release(unit)

    def write(self, unit: int, view: Buffer) -> bool:
        """Fill a claimed unit; False if there is no room for it."""
        files, data = self.files, memoryview(view)
        if files.is_full:
            return False
        if self.is_moving and self._places.tier_of_one(unit) != self._number:
            return False  # it was dropped while it was being fetched
        offset, length = self._shape.extent(unit)
        assert files.locks.has_claimed(unit), f"unit {unit} is not claimed"
        assert data.nbytes == length, f"unit {unit} has {length} bytes, got {data.nbytes}"
        assert self._places.tier_of_one(unit) == self._number, f"unit {unit} is elsewhere"
        if files.state_of(unit):
            # First: a process that is killed while it writes must not leave a valid state behind.
            files.set_state(unit, 0)
        try:
            self._check_memory(length)
            with self._reserved(length) as has_room:
                if not has_room:
                    return False
                if length:
                    self._write_bytes(data.cast("B"), offset)
            files.write_sums(unit, data.cast("B"), offset)
            # Last: whoever sees this state must find all bytes and sums of the unit.
            files.set_state(unit, files.generation)
            if self._spares is not None:
                # Other ranks may have used the same free room. The rank that ends last sees all
                # writes, and drops spare units if they are too many.
                self._spares.make_room(0, self.capacity_bytes)
        except OSError as error:
            self._on_write_error(error, offset, length)
            return False
        return not files.is_lost

    @contextmanager
    def _reserved(self, length: int) -> Iterator[bool]:
        """Yield whether there is room for a unit, reserved for it while units come and go."""
        if not self.is_moving:
            yield self._has_room(length)
            return
        needed_bytes = -(-length // PAGE_BYTES) * PAGE_BYTES
        with self._writing:
            has_room = self._has_room(needed_bytes + self._writing_bytes)
            needed_bytes *= has_room
            self._writing_bytes += needed_bytes
        try:
            yield has_room
        finally:
            with self._writing:
                self._writing_bytes -= needed_bytes

    def _has_room(self, length: int) -> bool:
        """Return whether so much fits into the capacity, after spare units were dropped for it."""
        files = self.files
        if self._spares is not None:
            self._spares.make_room(length, self.capacity_bytes)
        if self.is_moving:
            return files.data_taken_bytes + length <= self.capacity_bytes
        if not self._shape.is_computed:
            return True  # the units that belong here were counted one by one
        # Units were counted by the span. Other jobs may fill here too, as much as they announced.
        limit_bytes = max(self.capacity_bytes, files.read_header().promised_bytes)
        return files.data_taken_bytes + length <= limit_bytes + _ROUNDED_BYTES

    def _write_bytes(self, data: memoryview, offset: int) -> None:
        """Write a unit; if the device is full, drop spare units for it."""
        while True:
            try:
                return write_all(self.files.data_descriptor, data, offset)
            except OSError as error:
                is_full = error.errno in _NO_ROOM
                if not is_full or self._spares is None or not self._spares.drop_one():
                    raise

    def _check_memory(self, length: int) -> None:
        self._unlooked_bytes += length
        if self.kind != "memory" or self._unlooked_bytes < _LOOK_EVERY_BYTES:
            return
        self._unlooked_bytes = 0
        if memory_left_bytes() < self._left_bytes_min:
            raise OSError(errno.ENOMEM, "the node is running out of memory")

    def _on_write_error(self, error: OSError, offset: int, length: int) -> None:
        files = self.files
        files.punch(offset, length)
        if error.errno in (*_NO_ROOM, errno.ENOMEM):
            files.set_full()
        else:  # read-only or failing: units that are here can still be read
            files.takes_more = False
        if not self._has_warned and not files.is_lost:
            self._has_warned = True
            _log.warning(
                "the %s tier %s takes no more (%s); units that do not fit there are read from the "
                "source each time: free some room or wish for a smaller tier",
                self.kind,
                self.path,
                error.strerror,
            )

    def drop(self, unit: int) -> bool:
        """Give back the room of a unit; False if somebody is filling it.

        The state goes first, so that a process that looks meanwhile finds the unit absent.
        """
        files = self.files
        enter_after_fork(files)
        if not files.locks.claim(unit):
            return False
        try:
            if files.state_of(unit):
                files.set_state(unit, 0)
            offset, length = self._shape.extent(unit)
            # Units that come and go share no pages, so the last page can go as a whole.
            files.punch(offset, -(-length // PAGE_BYTES) * PAGE_BYTES)
        finally:
            self.release(unit)
        return True

    def forget(self, unit: int) -> None:
        """Mark a unit as absent, whatever lies there."""
        enter_after_fork(self.files)
        self.files.set_state(unit, 0)

    # -- reading -----------------------------------------------------------------------------

    def read(self, unit: int) -> memoryview | None:
        """Return the bytes of a unit that is held; None if they are damaged."""
        data = read_unit(self.files, unit, *self._shape.extent(unit))
        if data is None:
            self._mark_damaged(unit)
        return data

    def read_part(self, unit: int, inside: int, size: int) -> Bytes | None:
        """Return `size` bytes of a unit that is held; None if they are damaged."""
        target = np.empty(size, np.uint8)
        asked = np.array([[unit], [inside], [size], [0]], np.int64)
        is_damaged = self.copy(asked[0], asked[1], asked[2], target.data, asked[3])
        return None if is_damaged else target

    def copy(
        self, units: Ints, inside: Ints, sizes: Ints, target: memoryview, starts: Ints
    ) -> list[int]:
        """Copy parts of held units into `target`; return the numbers of the damaged ones."""
        ranges = np.empty((len(units), 5), np.int64)
        ranges[:, 0], ranges[:, 3], ranges[:, 4] = units, inside, sizes
        ranges[:, 1], ranges[:, 2] = self._shape.offsets[units], self._shape.lengths[units]
        missing = copy_ranges(self.files, ranges, target, starts)
        for unit in np.unique(units[missing]).tolist():
            self._mark_damaged(unit)
        return missing

    def _mark_damaged(self, unit: int) -> None:
        """Mark a damaged unit as absent.

        Holds the unit's lock and checks it again, because another thread or process may have
        fetched it meanwhile. If only the sums of its cells were wrong, they are written again.
        """
        files = self.files
        files.unsee(unit)
        if not files.locks.claim(unit):
            return  # another thread or process is filling it
        try:
            if files.state_of(unit) != files.generation:
                return
            self._warn_damaged(unit)
            offset, length = self._shape.extent(unit)
            data = read_unit(files, unit, offset, length)
            if data is not None:
                files.write_sums(unit, data, offset)
            else:
                files.set_state(unit, 0)
        except OSError:
            files.set_state(unit, 0)
        finally:
            self.release(unit)

    def _warn_damaged(self, unit: int) -> None:
        self.files.num_damaged += 1
        if self.files.num_damaged == 1:
            _log.warning(
                "unit %d of the %s tier %s is not what was written there; it is fetched again, as "
                "are all damaged units (stats count them): %s/data may lie on a failing device, "
                "or another program writes to it",
                unit,
                self.kind,
                self.path,
                self.path,
            )

    def check(self, unit: int) -> bool:
        """Return whether the bytes at a unit's place match the sum that was written for it."""
        return read_unit(self.files, unit, *self._shape.extent(unit)) is not None

    def settle(self, units: Ints) -> Bools:
        """Check the unchecked ones among some units; return which of all are here and valid."""
        good = self.held(units)
        for place in np.flatnonzero(self.unchecked(units)).tolist():
            unit = int(units[place])
            good[place] = self.settle_at(unit, *self._shape.extent(unit))
        return good

    def settle_at(self, unit: int, offset: int, length: int) -> bool:
        """Check one unit if necessary; for callers that know its place but have no layout."""
        enter_after_fork(self.files)
        state = self.files.state_of(unit)
        if state in (0, self.files.generation):
            return bool(state)
        is_good = read_unit(self.files, unit, offset, length) is not None
        return self._settled(unit, is_good=is_good)

    def _settled(self, unit: int, *, is_good: bool) -> bool:
        """Mark an unchecked unit as verified if its bytes were valid, else as absent.

        Holds the unit's lock, and changes only a unit that is still unchecked: another process may
        be filling it, or may have dropped it since it was read.
        """
        files = self.files
        for _ in range(_VOUCH_TRIES_MAX):
            if files.state_of(unit) in (0, files.generation):
                break
            if files.locks.claim(unit):
                try:
                    if files.state_of(unit) not in (0, files.generation):
                        files.set_state(unit, files.generation if is_good else 0)
                    break
                finally:
                    self.release(unit)
            time.sleep(_VOUCH_S)  # the kernel has no wait with a time-out for record locks
        return files.state_of(unit) == files.generation


class Tiers:
    """The tiers of a node, the fastest first; a context that closes them."""

    def __init__(self, tiers: Sequence[Tier], shape: TierShape, *, placed: bool = True) -> None:
        self.tiers = tuple(tiers)
        self.shape = shape
        self._is_placed = placed
        nowhere = SpanPlaces.nowhere if shape.is_computed else UnitPlaces.nowhere
        self._own_places: SpanPlaces | UnitPlaces = nowhere(shape, len(self.tiers))
        parts = [tier.part for tier in self.tiers]
        self._take(places_of(shape, parts) if placed else self._own_places)
        self._files = [tier.files for tier in self.tiers]

    def _take(self, places: TierPlacement) -> None:
        for number, tier in enumerate(self.tiers):
            tier.set_places(
                places, number, has_spares=self.shape.is_computed or not self._is_placed
            )
        # Last: other threads may read `_places` and write units, and every tier must know by then
        # that these units belong to it.
        self._places = places

    def place(self, span_bytes: int, spans: Bools) -> None:
        """Let the units of some spans of the layout belong here, in addition to earlier ones.

        They fill the fastest tier first, in the order of the layout, each up to its capacity. All
        ranks of a node that make the same calls in the same order agree. Units from earlier runs
        that belong here are used; others stay until their room is needed.
        """
        assert not self._is_placed, "only after open_tiers(…, placed=False)"
        assert span_bytes > 0, f"{span_bytes=}"
        assert len(spans) * span_bytes >= self.shape.size_bytes, f"{len(spans)=} {span_bytes=}"
        before, capacities = self._own_places, [tier.capacity_bytes for tier in self.tiers]
        self._own_places = before.with_spans(self.shape, span_bytes, spans, capacities)
        for number, tier in enumerate(self.tiers):
            added_bytes = self._own_places.placed_bytes[number] - before.placed_bytes[number]
            announce_fill(tier.files, spans, added_bytes, self.shape.size_bytes)
        self._take(self._own_places)

    def begin_moving(self) -> None:
        """Let units come and go from now on, by `keep` and `drop`."""
        assert not self._is_placed, "only after open_tiers(…, placed=False)"
        assert isinstance(self._own_places, UnitPlaces), "only where units are known one by one"
        for tier in self.tiers:
            tier.is_moving = True
            if not tier.files.can_punch():
                tier.capacity_bytes = 0
                _log.warning(
                    "the %s tier %s is not used: its file system cannot give back the room of "
                    "single samples, which importance sampling needs; ext4, xfs, btrfs and tmpfs "
                    "can",
                    tier.kind,
                    tier.path,
                )
            announce_fill(
                tier.files, np.ones(1, np.bool_), tier.capacity_bytes, self.shape.size_bytes
            )

    def keep(self, units: Ints, number: int) -> None:
        """Let units belong to a tier; whoever uses one of them fetches it there."""
        assert isinstance(self._own_places, UnitPlaces)
        self._own_places.put(units, number)

    def drop(self, unit: int) -> bool:
        """Let a unit belong to no tier and give back its room; False if it is being filled."""
        assert isinstance(self._own_places, UnitPlaces)
        number = self.tier_of_one(unit)
        if number != NOWHERE and not self.tiers[number].drop(unit):
            return False
        self._own_places.put(np.array([unit]), NOWHERE)
        return True

    @property
    def capacity_bytes(self) -> int:
        """Bytes of units that certainly fit here, wherever the tiers cut the layout."""
        capacities = [tier.capacity_bytes for tier in self.tiers]
        lost_bytes = max(0, len(capacities) - 1) * self.shape.length_max
        return max([0, sum(capacities) - lost_bytes, *capacities])

    @cached_property
    def identity(self) -> str:
        """32 hex digits: the name of this node, which lies on its first disk."""
        return identity_of([(tier.kind, tier.path) for tier in self.tiers])

    def __enter__(self) -> Tiers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all tiers; the last user of a memory tier removes it."""
        files, self._files = self._files, []
        for one in files:
            release(one)

    def tier_of(self, units: Ints) -> Ints:
        """Return the number of the tier in which each unit has its place; -1: in none."""
        return self._places.tier_of(units)

    def tier_of_one(self, unit: int) -> int:
        """Return the number of one unit's tier; -1: in none."""
        return self._places.tier_of_one(unit)

    @property
    def placed_bytes(self) -> int:
        """Bytes of the units that have a place; for computed columns, with the gaps between."""
        return sum(self._places.placed_bytes)

    @property
    def present_bytes(self) -> int:
        """Bytes of the units with a place that lie in any tier already, checked or not.

        An estimate for computed columns, because no unit is looked up.
        """
        if self.shape.is_computed:
            return min(self.placed_bytes, sum(tier.fill_bytes for tier in self.tiers))
        here = (units[self.present(units)] for units in self.shape.chunks())
        placed = (units[self.tier_of(units) != NOWHERE] for units in here)
        return sum(int(self.shape.lengths[units].sum()) for units in placed)

    def held(self, units: Ints) -> Bools:
        """Return which units are in their own tier and verified."""
        return self._asked("held", units)

    def unchecked(self, units: Ints) -> Bools:
        """Return which units are in their own tier but must be checked before they are used."""
        return self._asked("unchecked", units)

    def settle(self, units: Ints) -> Bools:
        """Check the unchecked among some units; return which are in their own tier and valid."""
        return self._asked("settle", units)

    def _asked(self, question: str, units: Ints) -> Bools:
        owners = self._places.tier_of(units)
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
        """Return a tier that has a valid copy of a unit; its own tier first.

        After sizes have changed, a unit may lie in another tier than its own: it is read or copied
        from there, not fetched again.
        """
        own = self.tier_of_one(unit)
        order = sorted(range(len(self.tiers)), key=lambda number: number != own)
        offset, length = self.shape.extent(unit)
        for number in order:
            tier = self.tiers[number]
            if tier.settle_at(unit, offset, length):
                return tier
        return None
