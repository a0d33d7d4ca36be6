"""From what a user wishes for to open tiers.

Each wish is opened in its turn and takes the next part of the layout. In the opening moment the
size is settled: who comes first reckons with what is free and writes down what came of it, who
joins with the same wish takes that over, so that all ranks of a node cut the layout at one place.
Who is alone also begins a new generation and gives back the room of units that have no place here
any more.

Where several nodes share a data set (`placed=False`) only the sizes are settled here. Which units
belong to this node is said later and may be any of the layout, so the data file, sparse as it is,
reaches to the layout's end: a file system whose files cannot is found out before others count on
the tier.
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
from penstock.storage.tier_folders import Folder, NoTierError, leaving_out, root_of
from penstock.storage.tier_found import give_up, promised_elsewhere_bytes, sweep
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
"""The last user of a memory tier removes its folder, perhaps just when we open it."""

_log = logging.getLogger("penstock.storage")


def open_tiers(wishes: Sequence[Wish], shape: TierShape, *, placed: bool = True) -> Tiers:
    """Open the tiers of a node, the fastest first; those that cannot be had are left out.

    With `placed=False` no unit has its place here until `Tiers.place` says so.
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
    """What one tier is opened for."""

    wish: Wish
    shape: TierShape
    first: int
    """Bytes of the layout that faster tiers take."""
    placed: bool

    @property
    def hash(self) -> int:
        """Equal for those who must get the same capacity."""
        how = "from" if self.placed else "by span behind"
        return xxhash.xxh3_64_intdigest(f"{self.wish.size} {how} {self.first}".encode())

    def part(self, capacity_bytes: int) -> tuple[int, int]:
        """Return where in the layout the units begin and end that a node alone keeps here."""
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
        with leaving_out(asked.wish.place):
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
            # Computed columns are too many to look at now: their spare units go one by one.
            if asked.placed and not opened.is_new and not shape.is_computed:
                _trim(files, shape, capacity_bytes=capacity_bytes, first=first, last=last)
        files.grow(last if asked.placed else shape.size_bytes)
        _record(opened, asked.hash, capacity_bytes=capacity_bytes, first=first, last=last)
        os.utime(files.locks.descriptor)
        return Tier(files, shape, capacity_bytes=capacity_bytes, first=first, last=last)


def _make_room_for_files(root: Folder, wish: Wish, shape: TierShape) -> None:
    """See to it that a tier can be made at all on a disk that is full of unused ones."""
    needed_bytes = 2**20 + 9 * shape.num_units
    lacking_bytes = needed_bytes - allowance_for(wish, root.path).free_bytes
    if lacking_bytes > 0:
        give_up(root, shape.name, lacking_bytes)


def _capacity(opened: TierOpening, root: Folder, asked: _TierRequest) -> int:
    """Return how large the tier becomes; warn where that is less than what was wished for."""
    wish, shape = asked.wish, asked.shape
    settled = None if opened.is_alone else opened.files.terms().get(asked.hash)
    if settled is not None:
        return settled
    allowance = _allowance(opened.files, root, wish, shape)
    wished = wished_bytes(wish, allowance)
    needed = min(wished, max(0, shape.size_bytes - asked.first))
    lacking = needed - usable_bytes(wish, allowance)
    if lacking > 0 and wish.kind == "disk" and give_up(root, shape.name, lacking):
        allowance = _allowance(opened.files, root, wish, shape)
    usable = usable_bytes(wish, allowance)
    if usable <= 0:
        raise NoTierError(f"{allowance.bound} has no room left; {allowance.way_out}")
    if needed > usable:
        _log.warning(
            "the %s tier in %s will be %s instead of %s: that is what %s leaves; %s",
            wish.kind,
            root.path,
            show_bytes(usable),
            show_bytes(wished),
            allowance.bound,
            allowance.way_out,
        )
    return min(wished, usable)


def _allowance(files: TierFiles, root: Folder, wish: Wish, shape: TierShape) -> TierAllowance:
    """Return what is free for this tier, counting what it holds and what others were promised."""
    allowance = allowance_for(wish, root.path)
    sums_bytes = 8 * shape.num_units
    free_bytes = allowance.free_bytes + files.room_taken_bytes - sums_bytes
    free_bytes -= promised_elsewhere_bytes(root, shape.name)
    free_bytes -= -(-8 * free_bytes // CELL_BYTES)  # what is kept takes a sum for each cell
    return replace(allowance, free_bytes=max(0, free_bytes))


def _record(opened: TierOpening, key: int, *, capacity_bytes: int, first: int, last: int) -> None:
    """Write down what was settled, for those who join."""
    files = opened.files
    if key not in files.terms():
        files.add_term(key, capacity_bytes)
    header = files.header
    if opened.is_alone:
        header = replace(header, promised_bytes=0, first=first, last=last)
    elif header.first == header.last:  # so far only jobs of several nodes were here
        header = replace(header, first=first, last=last)
    files.write_header(replace(header, promised_bytes=max(header.promised_bytes, last - first)))


def _trim(
    files: TierFiles, shape: TierShape, *, capacity_bytes: int, first: int, last: int
) -> None:
    """Give back room of units without a place here, if what has one could not fit otherwise.

    Units from before our part may belong to a faster tier now. In the first run after sizes have
    changed they stay, to be copied from here instead of fetched again.
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
        spare = spare[np.argsort(shape.offsets[spare])][::-1]  # the least worthy first
        count = int(np.searchsorted(np.cumsum(shape.lengths[spare]), excess_bytes)) + 1
        states[spare[:count]] = 0
        files.write_states(states)
    if files.room_taken_bytes > capacity_bytes:
        _punch_absent(files, shape, ~is_own)


def _punch_absent(files: TierFiles, shape: TierShape, among: Bools) -> None:
    """Give back the room of units that are not here, whoever dropped or half wrote them."""
    assert isinstance(shape.lengths, np.ndarray)
    units = np.flatnonzero(among & (files.all_states() == 0) & (shape.lengths > 0))
    units = units[np.argsort(shape.offsets[units])]
    offsets, ends = shape.offsets[units], shape.ends(units)
    # Units that lie side by side go in one call.
    begins = np.flatnonzero(np.r_[True, offsets[1:] != ends[:-1]][: len(units)])
    for begin, end in zip(begins, np.r_[begins[1:], len(units)], strict=bool(len(units))):
        files.punch(int(offsets[begin]), int(ends[end - 1] - offsets[begin]))
