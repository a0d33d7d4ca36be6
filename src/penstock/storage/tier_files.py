"""The files of one tier, opened.

    data        the bytes of the units at their places in the layout; sparse
    state       a header, then one byte per unit: 0 if absent, else the generation that verified it
    sums        xxh3_64 of each unit
    cells       xxh3_64 of parts of units that hold many samples (`tier_cells`); sparse
    meta.json   a description of the tier, for people and for other programs
    lock        see `tier_locks`

Nothing is mapped. Others may truncate these files, and a disk may fail. With a map, both would
raise SIGBUS and end the process; a read returns an error or fewer bytes. A unit that cannot be read
counts as absent. If bytes cannot be written, the tier stays smaller. If states cannot be written,
the tier is lost to this process, which goes on without it. Neither raises an error.

Every read is checked (`tier_reads`), so a state is only a hint, and this process does not look up a
unit again that it has once seen as held.

A *generation* is a time in which the tier was open somewhere without a gap. Between generations the
machine may have crashed when the state of a unit was on the disk and its bytes were not, or others
may have written to the files. So units that an older generation has verified are checked again
before their first use.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import struct
import time
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.storage.tier_cells import cell_sums, cells_in
from penstock.storage.tier_folders import (
    CELLS,
    DATA,
    STATE,
    SUMS,
    Folder,
    NoTierError,
)
from penstock.storage.tier_header import (
    FIELDS_BYTES,
    GENERATION_MAX,
    HEADER_BYTES,
    Header,
    read_header,
)
from penstock.storage.tier_locks import RecordLocks
from penstock.storage.tier_shape import CHUNK_UNITS, PAGE_BYTES, Bools, Ints, TierShape
from penstock.units import show_bytes

UNKNOWN_GENERATION = 255
"""Marks units that were verified by a generation whose number is in use again."""
FULL_S = 60.0
"""After this time, writing to a full device is tried again: others may have made room."""

_FULL = struct.Struct("<d")
_FULL_AT = FIELDS_BYTES
_TERM = struct.Struct("<Qq")
_TERMS_AT, _TERMS_MAX = 128, 24

_PUNCH = 0x01 | 0x02
"""FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE"""

_PAGE_UNITS = 4096
"""States read at once if the wanted ones lie far apart."""

Bytes = npt.NDArray[np.uint8]

_log = logging.getLogger("penstock.storage")


class TierFiles:
    """The open files of a tier, shared by all its users in this process."""

    def __init__(self, folder: Folder, locks: RecordLocks, kind: str) -> None:
        self.folder = folder
        self.identity = folder.identity
        self.locks = locks
        self.kind = kind
        self.pid = os.getpid()
        self.num_users = 0
        self.data_descriptor = self.state_descriptor = -1
        self.sums_descriptor = self.cells_descriptor = -1
        self.is_lost = False
        """Whether states can no longer be written; then this process treats all units as absent."""
        self.takes_more = True
        """Whether bytes can be written, as far as this process knows."""
        self.num_damaged = 0
        """Units that did not match their sum when this process read them."""
        self._seen: Bools = np.zeros(0, np.bool_)
        self._known_sums: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        """Sums of units that this process has looked up; 0 for others."""

    def open(self, shape: TierShape) -> None:
        """Open the files."""
        self.data_descriptor = self.folder.open_file(DATA)
        self.sums_descriptor = self.folder.open_file(SUMS)
        self.cells_descriptor = self.folder.open_file(CELLS)
        self.state_descriptor = self.folder.open_file(STATE)
        size_bytes = os.fstat(self.state_descriptor).st_size
        # Allocates the states, so that a full device refuses the tier now and not a unit later.
        os.posix_fallocate(self.state_descriptor, 0, size_bytes)
        header = read_header(self.state_descriptor)
        if header is None:
            raise OSError(errno.EIO, "no header", self.folder.path)
        self.header = header
        self.num_units = shape.num_units
        if not shape.is_computed:
            self._seen = np.zeros(self.num_units, np.bool_)
            self._known_sums = np.zeros(self.num_units, np.uint64)
        if self.kind == "disk":
            # Units are used in random order, so reading ahead would only waste reads.
            os.posix_fadvise(self.data_descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def read_header(self) -> Header:
        """Return the header as it is now, or the last valid one if it is damaged."""
        found = None if self.is_lost else _read_header_or_none(self.state_descriptor)
        if found is None or replace(found, promised_bytes=0, first=0, last=0) != replace(
            self.header, promised_bytes=0, first=0, last=0
        ):
            return self.header
        return found

    def write_header(self, header: Header) -> None:
        """Write the header; the caller holds the opening lock."""
        os.pwrite(self.state_descriptor, header.packed(), 0)
        self.header = header

    @property
    def generation(self) -> int:
        """Return the present generation; it does not change while anybody has the tier open."""
        return self.header.generation

    def begin_generation(self) -> None:
        """Let all units be checked again; the caller is the only user."""
        generation = self.header.generation + 1
        if generation > GENERATION_MAX:
            for first in range(0, self.num_units, CHUNK_UNITS):
                states = self._read_states(first, min(CHUNK_UNITS, self.num_units - first))
                states[states != 0] = UNKNOWN_GENERATION
                write_all(self.state_descriptor, states.data, HEADER_BYTES + first)
            self.flush_state()
            generation = 1
        # Clears what users of the last generation shared: the time of a full device, and the terms.
        os.pwrite(self.state_descriptor, bytes(HEADER_BYTES - _FULL_AT), _FULL_AT)
        self.write_header(replace(self.header, generation=generation))
        self._seen[:] = False
        # Else, after a crash, the old number could be used again while states have it already.
        self.flush_state()

    def write_states(self, states: Bytes) -> None:
        """Write all states; the caller is the only user."""
        assert len(states) == self.num_units
        if len(states):
            write_all(self.state_descriptor, states.data, HEADER_BYTES)
        self.flush_state()

    def flush_state(self) -> None:
        """Make the state survive a crash of the machine."""
        if self.kind == "disk":
            os.fsync(self.state_descriptor)

    # -- states ------------------------------------------------------------------------------

    def held(self, units: Ints) -> Bools:
        """Return which units this generation has verified."""
        if self.is_lost:
            return np.zeros(len(units), np.bool_)
        if not len(self._seen):
            found: Bools = self.states_of(units) == self.generation
            return found
        held: Bools = self._seen[units]
        if not held.all():
            new = np.flatnonzero(~held)
            held[new] = self.states_of(units[new]) == self.generation
            self._seen[units[new[held[new]]]] = True
        return held

    def is_held(self, unit: int) -> bool:
        """Return whether this generation has verified a unit."""
        if len(self._seen) and self._seen[unit]:
            return not self.is_lost
        return self.state_of(unit) == self.generation

    def states_of(self, units: Ints) -> Bytes:
        """Return the states of some units as they are now."""
        if self.is_lost or not len(units):
            return np.zeros(len(units), np.uint8)
        low, high = int(units.min()), int(units.max())
        if high - low < max(_PAGE_UNITS, 16 * len(units)):
            return self._read_states(low, high - low + 1)[units - low]
        out = np.zeros(len(units), np.uint8)
        pages = units // _PAGE_UNITS
        for page in np.unique(pages).tolist():
            here = np.flatnonzero(pages == page)
            first = page * _PAGE_UNITS
            out[here] = self._read_states(first, _PAGE_UNITS)[units[here] - first]
        return out

    def all_states(self) -> Bytes:
        """Return the states of all units as they are now."""
        return self._read_states(0, self.num_units)

    def _read_states(self, first: int, count: int) -> Bytes:
        """Return adjacent states; 0 where the file cannot be read or has ended."""
        states = np.zeros(count, np.uint8)
        with contextlib.suppress(OSError):
            read_into(self.state_descriptor, states.data, HEADER_BYTES + first)
        return states

    def state_of(self, unit: int) -> int:
        """Return one unit's state as it is now."""
        return 0 if self.is_lost else int(self._read_states(unit, 1)[0])

    def set_state(self, unit: int, state: int) -> None:
        """Write one unit's state; if that fails, the tier is lost."""
        if len(self._seen):
            self._seen[unit] = state == self.generation
        try:
            os.pwrite(self.state_descriptor, bytes((state,)), HEADER_BYTES + unit)
        except OSError as error:
            self._lose(error)

    def unsee(self, unit: int) -> None:
        """Forget what this process knows of a unit, so that it is looked up again."""
        if len(self._seen):
            self._seen[unit] = False
            self._known_sums[unit] = 0

    def _lose(self, error: OSError) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        _log.warning(
            "the %s tier %s cannot be used any more (%s): the job goes on without it; look at the "
            "device, or give another folder",
            self.kind,
            self.folder.path,
            error.strerror,
        )

    # -- bytes -------------------------------------------------------------------------------

    def read_data(self, target: memoryview, offset: int) -> bool:
        """Fill a buffer from the data file; False if the file ends before."""
        return read_into(self.data_descriptor, target, offset)

    # -- sums --------------------------------------------------------------------------------

    def sum_of(self, unit: int) -> int:
        """Return the sum that was written for a unit."""
        known = self._known_sums
        if not len(known):
            return int.from_bytes(os.pread(self.sums_descriptor, 8, 8 * unit), "little")
        if not known[unit]:
            known[unit] = int.from_bytes(os.pread(self.sums_descriptor, 8, 8 * unit), "little")
        return int(known[unit])

    def write_sums(self, unit: int, data: memoryview, offset: int) -> None:
        """Write the sums of a unit at `offset` and of its cells."""
        self.unsee(unit)
        first, count = cells_in(offset, data.nbytes)
        if count:
            cells = cell_sums(data, offset, first)
            write_all(self.cells_descriptor, memoryview(cells), 8 * first)
        value = xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")
        write_all(self.sums_descriptor, memoryview(value), 8 * unit)

    # -- room --------------------------------------------------------------------------------

    def grow(self, size_bytes: int) -> None:
        """Extend the data file; it never shrinks, because others read from it."""
        try:
            if self.data_bytes < size_bytes:
                os.ftruncate(self.data_descriptor, size_bytes)
        except OSError as error:
            if error.errno not in (errno.EFBIG, errno.EINVAL, errno.ENOMEM, errno.EOVERFLOW):
                raise
            raise NoTierError(
                f"{self.folder.path} needs a sparse file of {show_bytes(size_bytes)}, as long as "
                f"the units of the data set, and cannot have it ({error.strerror}); ext4 ends "
                "files at 17.6 TB: give a folder on XFS, or open parts of the data set"
            ) from error

    def can_punch(self) -> bool:
        """Return whether this file system can free single pages of a file."""
        try:
            descriptor = os.open(self.folder.path, os.O_TMPFILE | os.O_RDWR)
        except OSError:
            return self.punch(self.data_bytes, PAGE_BYTES)
        try:
            os.pwrite(descriptor, bytes([1]) * PAGE_BYTES, 0)
            return punch(descriptor, 0, PAGE_BYTES) and not os.fstat(descriptor).st_blocks
        except OSError:
            return False
        finally:
            os.close(descriptor)

    def punch(self, offset: int, length: int) -> bool:
        """Free the room of some bytes; they read as zeros afterwards."""
        return length == 0 or punch(self.data_descriptor, offset, length)

    @property
    def is_full(self) -> bool:
        """Return whether nothing can be written, or the device was full for any user lately."""
        if self.is_lost or not self.takes_more:
            return True
        try:
            data = os.pread(self.state_descriptor, _FULL.size, _FULL_AT)
        except OSError:
            return True
        (full_at_s,) = _FULL.unpack(data) if len(data) == _FULL.size else (0.0,)
        return bool(full_at_s) and bool(abs(time.monotonic() - full_at_s) < FULL_S)

    def set_full(self) -> None:
        """Tell all users that the device is full."""
        try:
            os.pwrite(self.state_descriptor, _FULL.pack(time.monotonic()), _FULL_AT)
        except OSError:
            self.takes_more = False

    def terms(self) -> dict[int, int]:
        """Return the capacities of this generation by the hash of their wish."""
        data = os.pread(self.state_descriptor, _TERM.size * _TERMS_MAX, _TERMS_AT)
        whole = data[: len(data) // _TERM.size * _TERM.size]
        return {wish: size_bytes for wish, size_bytes in _TERM.iter_unpack(whole) if wish}

    def add_term(self, wish: int, capacity_bytes: int) -> None:
        """Record the capacity that a wish became; the caller holds the opening lock."""
        number = len(self.terms())
        if number < _TERMS_MAX:  # else later users with this wish compute it again
            at = _TERMS_AT + _TERM.size * number
            os.pwrite(self.state_descriptor, _TERM.pack(wish, capacity_bytes), at)

    @property
    def data_bytes(self) -> int:
        """Return the length of the data file."""
        return os.fstat(self.data_descriptor).st_size

    @property
    def data_taken_bytes(self) -> int:
        """Return the room that the units take on their device."""
        return os.fstat(self.data_descriptor).st_blocks * 512

    @property
    def room_taken_bytes(self) -> int:
        """Return the room that all files take on their device."""
        descriptors = (
            self.data_descriptor,
            self.sums_descriptor,
            self.cells_descriptor,
            self.state_descriptor,
        )
        return sum(os.fstat(d).st_blocks for d in descriptors) * 512

    def close(self) -> None:
        """Close all descriptors, which drops all locks; later calls find no units."""
        # First, so that threads that still read do not use a number that means another file by
        # then.
        self.is_lost = True
        for name in ("data", "sums", "cells", "state"):
            descriptor = getattr(self, f"{name}_descriptor")
            setattr(self, f"{name}_descriptor", -1)
            if descriptor >= 0:
                os.close(descriptor)
        self.folder.close()
        self.locks.close()


def _read_header_or_none(descriptor: int) -> Header | None:
    try:
        return read_header(descriptor)
    except OSError:
        return None


def read_into(descriptor: int, target: memoryview, offset: int) -> bool:
    """Fill a buffer from a file; False if the file ends before."""
    count = os.preadv(descriptor, [target], offset)
    while 0 < count < target.nbytes:
        target, offset = target[count:], offset + count
        count = os.preadv(descriptor, [target], offset)
    return count == target.nbytes


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all bytes, in as many calls as it takes."""
    while data.nbytes:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


_libc = ctypes.CDLL(None, use_errno=True)


def punch(descriptor: int, offset: int, length: int) -> bool:
    """Make a hole in a file; False if the file system cannot."""
    fallocate = getattr(_libc, "fallocate64", None) or getattr(_libc, "fallocate", None)
    if fallocate is None:
        return False
    off_t = ctypes.c_int64
    return bool(fallocate(descriptor, _PUNCH, off_t(offset), off_t(length)) == 0)
