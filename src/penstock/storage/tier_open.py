"""Opens the tiers that a user wishes for.

The wishes are opened one after another, and each takes the next part of the layout. Sizes are
decided under the opening lock. The first process computes a size from the free room and records it;
processes that join with the same wish use the recorded size, so that all ranks of a node cut the
layout at the same place. A process that is the only user also begins a new generation, and frees
the room of units that no longer have a place here.

If several nodes share a data set (`placed=False`), only sizes are decided here. `Tiers.place` says
later which units belong to this node, and these may lie anywhere in the layout. So the sparse data
file extends to the end of the layout from the start. A file system that cannot hold such a file is
then found out before other nodes rely on the tier.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from penstock.errors import OptionError
from penstock.storage.tier import Tier, Tiers
from penstock.storage.tier_cells import CELL_BYTES
from penstock.storage.tier_files import TierFiles
from penstock.storage.tier_folders import Folder, NoTierError, no_tier_errors, root_of
from penstock.storage.tier_found import evict_unused, promised_elsewhere_bytes, sweep
from penstock.storage.tier_registry import TierOpening, opening
from penstock.storage.tier_shape import Bools, TierShape
from penstock.storage.tier_sizes import (
    TierAllowance,
    Wish,
    allowance_for,
    usable_bytes,
    wished_bytes,
)
from penstock.units import show_bytes

_TRIES_MAX = 20
"""Tries to open a tier: the last user of a memory tier may remove its folder at the same moment."""

_log = logging.getLogger("penstock.storage")


def open_tiers(wishes: Sequence[Wish], shape: TierShape, *, placed: bool = True) -> Tiers:
    """Open the tiers of a node, the fastest first; those that cannot be opened are left out.

    With `placed=False`, no unit has its place here before `Tiers.place`.
    """
    _check(wishes)
    tiers: list[Tier] = []
    try:
        for wish in wishes:
            first = tiers[-1].part[1] if tiers else 0
            if not placed:
                first = sum(tier.capacity_bytes for tier in tiers)
            tier = _tier_or_none(_TierRequest(wish=wish, shape=shape, first=first, placed=placed))
            if tier is not None:
                tiers.append(tier)
    except BaseException:
        Tiers(tiers, shape, placed=placed).close()
        raise
    return Tiers(tiers, shape, placed=placed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TierRequest:
    """One tier to open."""

    wish: Wish
    shape: TierShape
    first: int
    """Bytes of the layout that faster tiers take."""
    placed: bool

    @property
    def hash(self) -> int:
        """Equal for processes that must get the same capacity."""
        how = "from" if self.placed else "by span behind"
        return xxhash.xxh3_64_intdigest(f"{self.wish.size} {how} {self.first}".encode())

    def part(self, capacity_bytes: int) -> tuple[int, int]:
        """Return the part of the layout that belongs here, if the node is alone."""
        if not self.placed:
            return 0, 0
        return self.first, self.shape.cut(self.first, capacity_bytes)


def _check(wishes: Sequence[Wish]) -> None:
    places = [(wish.kind, wish.place) for wish in wishes]
    for kind, place in places:
        if places.count((kind, place)) > 1:
            raise OptionError(
                f"there are {places.count((kind, place))} {kind} tiers in {place}; one of the "
                "sum of their sizes does the same"
            )


def _tier_or_none(asked: _TierRequest) -> Tier | None:
    try:
        with no_tier_errors(asked.wish.place):
            return _tier(asked)
    except NoTierError as error:
        _log.warning("no %s tier: %s. The run goes on without it", asked.wish.kind, error)
        return None


def _tier(asked: _TierRequest) -> Tier:
    for tries_left in reversed(range(_TRIES_MAX)):
        try:
            with root_of(asked.wish) as root:
                return _tier_in(root, asked)
        except FileNotFoundError:
            if not tries_left:
                raise
    raise AssertionError("the last try returns or raises")


def _tier_in(root: Folder, asked: _TierRequest) -> Tier:
    wish, shape = asked.wish, asked.shape
    # Memory that a killed run has left is freed at once; disk tiers stay as long as there is room.
    if wish.kind == "memory":
        sweep(root, keep=shape.name)
    else:
        _make_room_for_files(root, wish, shape)
    with opening(root, shape, wish.kind) as opened:
        files = opened.files
        capacity_bytes = _capacity(opened, root, asked)
        first, last = asked.part(capacity_bytes)
        if opened.is_alone:
            files.begin_generation()
            # Computed columns have too many units to check now: `Spares` drops them one by one.
            if asked.placed and not opened.is_new and not shape.is_computed:
                _trim(files, shape, capacity_bytes=capacity_bytes, first=first, last=last)
        files.grow(last if asked.placed else shape.size_bytes)
        _record(opened, asked.hash, capacity_bytes=capacity_bytes, first=first, last=last)
        os.utime(files.locks.descriptor)  # when it was last used, for evictions
        return Tier(files, shape, capacity_bytes=capacity_bytes, first=first, last=last)


def _make_room_for_files(root: Folder, wish: Wish, shape: TierShape) -> None:
    """Evict unused tiers if the disk has no room even for the files of an empty one."""
    needed_bytes = 2**20 + 9 * shape.num_units
    lacking_bytes = needed_bytes - allowance_for(wish, root.path).free_bytes
    if lacking_bytes > 0:
        evict_unused(root, shape.name, lacking_bytes)


def _capacity(opened: TierOpening, root: Folder, asked: _TierRequest) -> int:
    """Return the size of the tier; warn if it is less than what the user wished for."""
    wish, shape = asked.wish, asked.shape
    settled = None if opened.is_alone else opened.files.terms().get(asked.hash)
    if settled is not None:
        return settled
    allowance = _allowance(opened.files, root, wish, shape)
    wished = wished_bytes(wish, allowance)
    needed = min(wished, max(0, shape.size_bytes - asked.first))
    lacking = needed - usable_bytes(wish, allowance)
    if lacking > 0 and wish.kind == "disk" and evict_unused(root, shape.name, lacking):
        allowance = _allowance(opened.files, root, wish, shape)
    usable = usable_bytes(wish, allowance)
    if usable <= 0:
        raise NoTierError(f"{allowance.bound} has no room left; {allowance.way_out}")
    if needed > usable:
        _log.warning(
            "the %s tier in %s will be %s instead of %s, because of the limit of %s; %s",
            wish.kind,
            root.path,
            show_bytes(usable),
            show_bytes(wished),
            allowance.bound,
            allowance.way_out,
        )
    return min(wished, usable)


def _allowance(files: TierFiles, root: Folder, wish: Wish, shape: TierShape) -> TierAllowance:
    """Return what is free for this tier: with what it holds, without what others may still fill."""
    allowance = allowance_for(wish, root.path)
    sums_bytes = 8 * shape.num_units
    free_bytes = allowance.free_bytes + files.room_taken_bytes - sums_bytes
    free_bytes -= promised_elsewhere_bytes(root, shape.name)
    free_bytes -= -(-8 * free_bytes // CELL_BYTES)  # each cell also takes a sum
    return replace(allowance, free_bytes=max(0, free_bytes))


def _record(opened: TierOpening, key: int, *, capacity_bytes: int, first: int, last: int) -> None:
    """Record the decided size, for processes that join."""
    files = opened.files
    if key not in files.terms():
        files.add_term(key, capacity_bytes)
    header = files.header
    if opened.is_alone:
        header = replace(header, promised_bytes=0, first=first, last=last)
    elif header.first == header.last:  # so far only jobs on several nodes have used the tier
        header = replace(header, first=first, last=last)
    files.write_header(replace(header, promised_bytes=max(header.promised_bytes, last - first)))


def _trim(
    files: TierFiles, shape: TierShape, *, capacity_bytes: int, first: int, last: int
) -> None:
    """Free the room of units that have no place here, if those that have one would not fit.

    Units from before our part may belong to a faster tier now. In the first run after a change of
    sizes they stay, so that they can be copied from here instead of fetched again.
    """
    assert isinstance(shape.offsets, np.ndarray)
    assert isinstance(shape.lengths, np.ndarray)
    states = files.all_states()
    is_here = states != 0
    is_own = (shape.offsets >= first) & (shape.offsets + shape.lengths <= last)
    held_bytes = int(shape.lengths[is_here].sum())
    lacking_bytes = int(shape.lengths[is_own & ~is_here].sum())
    excess_bytes = held_bytes + lacking_bytes - capacity_bytes
    is_spare = is_here & ~is_own
    if (files.header.first, files.header.last) != (first, last):
        is_spare &= shape.offsets >= last
    if excess_bytes > 0 and is_spare.any():
        spare = np.flatnonzero(is_spare)
        spare = spare[np.argsort(shape.offsets[spare])][
            ::-1
        ]  # the end of the layout first: least useful
        count = int(np.searchsorted(np.cumsum(shape.lengths[spare]), excess_bytes)) + 1
        states[spare[:count]] = 0
        files.write_states(states)
    if files.room_taken_bytes > capacity_bytes:
        _punch_absent(files, shape, ~is_own)


def _punch_absent(files: TierFiles, shape: TierShape, among: Bools) -> None:
    """Free the room of absent units, which were dropped or half written."""
    assert isinstance(shape.lengths, np.ndarray)
    units = np.flatnonzero(among & (files.all_states() == 0) & (shape.lengths > 0))
    units = units[np.argsort(shape.offsets[units])]
    offsets, ends = shape.offsets[units], shape.ends(units)
    # One call for adjacent units.
    begins = np.flatnonzero(np.r_[True, offsets[1:] != ends[:-1]][: len(units)])
    for begin, end in zip(begins, np.r_[begins[1:], len(units)], strict=bool(len(units))):
        files.punch(int(offsets[begin]), int(ends[end - 1] - offsets[begin]))
