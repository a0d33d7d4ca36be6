"""The files of one tier, opened.

    data        the bytes of the units at their places in the layout; sparse
    state       a header, then one byte a unit: 0 absent, else the generation that vouched for it
    sums        xxh3_64 of each unit
    meta.json   what it is, for people and for a look from outside
    lock        see `tier_locks`

Everything is written with `pwrite` and only read through maps: a full tmpfs answers a store into a
map with a signal that ends the process. For the same reason `state` is allocated in full (even
reading a hole of a tmpfs allocates), while `sums` is read with `pread`.

A *generation* is a time during which the tier was open somewhere without a gap. In between the
machine may have crashed with the state of a unit on disk and its bytes not, or anybody may have
written into the files: what older generations vouched for is checked before its first use.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import struct
import time
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from penstock.storage.tier_folders import (
    DATA,
    META,
    STATE,
    SUMS,
    Folder,
    NoTierError,
    write_named,
)
from penstock.storage.tier_locks import RecordLocks
from penstock.storage.tier_shape import CHUNK_UNITS, Ints, TierShape
from penstock.units import show_bytes

FORMAT = 1
GENERATION_MAX = 254
UNKNOWN_GENERATION = 255
"""Vouched for by a generation whose number is in use again."""
FULL_S = 60.0
"""A full device is asked again after this time: others may have made room."""

_MAGIC = b"PENSTOCK"
_FIELDS = struct.Struct("<8sIIQQqqq")
_FULL = struct.Struct("<d")
_FULL_AT = _FIELDS.size
_TERM = struct.Struct("<Qq")
_TERMS_AT, _TERMS_MAX = 128, 24
HEADER_BYTES = 512

_PUNCH = 0x01 | 0x02
"""FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE"""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What all users of a tier agree on."""

    magic: bytes = _MAGIC
    format: int = FORMAT
    generation: int = 0
    num_units: int
    digest: int
    """Of the layout."""
    promised_bytes: int = 0
    """The most that any user of this generation may fill."""
    first: int = 0
    """Where the units begin in the layout that whoever began this generation places here."""
    last: int = 0
    """Where they end."""

    def packed(self) -> bytes:
        """Return the header as bytes."""
        values = (self.magic, self.format, self.generation, self.num_units, self.digest)
        return _FIELDS.pack(*values, self.promised_bytes, self.first, self.last)


def read_header(descriptor: int) -> Header | None:
    """Return the header of a state file; None where it does not carry our mark."""
    data = os.pread(descriptor, _FIELDS.size, 0)
    if len(data) < _FIELDS.size or data[:8] != _MAGIC:
        return None
    names = [field.name for field in fields(Header)]
    return Header(**dict(zip(names, _FIELDS.unpack(data), strict=True)))


def header_in(folder: Folder) -> Header | None:
    """Return the header of the tier in a folder; None where there is none of ours."""
    try:
        descriptor = folder.open_file(STATE, os.O_RDONLY)
    except OSError:
        return None
    try:
        return read_header(descriptor)
    finally:
        os.close(descriptor)


def meta_in(folder: Folder) -> dict[str, object]:
    """Return what a tier says about itself; empty where that cannot be read."""
    try:
        descriptor = folder.open_file(META, os.O_RDONLY)
        with os.fdopen(descriptor, "rb") as file:
            meta = json.loads(file.read(2**20))
    except (OSError, ValueError):
        return {}
    return meta if isinstance(meta, dict) and meta.get("penstock") == "tier" else {}


def is_marked(folder: Folder) -> bool:
    """Return whether the files in a folder are ours to remove."""
    return header_in(folder) is not None or bool(meta_in(folder))


def fits(folder: Folder, shape: TierShape) -> bool:
    """Return whether a folder holds a whole tier of this shape and format."""
    header, meta = header_in(folder), meta_in(folder)
    if header is None or (header.format, meta.get("format")) != (FORMAT, FORMAT):
        return False
    if (header.num_units, header.digest) != (shape.num_units, shape.digest):
        return False
    if not 1 <= header.generation <= GENERATION_MAX:
        return False
    sizes = {name: _size_in(folder, name) for name in (STATE, SUMS, DATA)}
    return (
        sizes[STATE] == HEADER_BYTES + shape.num_units
        and sizes[SUMS] == 8 * shape.num_units
        and 0 <= sizes[DATA] <= shape.size_bytes
    )


def _size_in(folder: Folder, name: str) -> int:
    try:
        descriptor = folder.open_file(name)
    except OSError:
        return -1
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def make_files(folder: Folder, shape: TierShape) -> None:
    """Write the files of an empty tier; the folder has none of these names."""
    header = Header(generation=1, num_units=shape.num_units, digest=shape.digest)
    write_named(folder, STATE, header.packed(), size_bytes=HEADER_BYTES + shape.num_units)
    for name, size_bytes in ((SUMS, 8 * shape.num_units), (DATA, 0)):
        descriptor = folder.open_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.ftruncate(descriptor, size_bytes)
        os.close(descriptor)
    meta = {
        "penstock": "tier",
        "format": FORMAT,
        "name": shape.name,
        "num_units": shape.num_units,
        "size_bytes": shape.size_bytes,
        "layout": f"{shape.digest:016x}",
        "about": shape.about,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    write_named(folder, META, json.dumps(meta, indent=2).encode())


class TierFiles:
    """The open files of a tier, shared by all who use it in this process."""

    def __init__(self, folder: Folder, locks: RecordLocks, kind: str) -> None:
        self.folder = folder
        self.identity = folder.identity
        self.locks = locks
        self.kind = kind
        self.pid = os.getpid()
        self.num_users = 0
        self.data_descriptor = self.state_descriptor = self.sums_descriptor = -1
        self._each_state: memoryview = memoryview(b"")

    def open(self) -> None:
        """Open and map the files."""
        self.data_descriptor = self.folder.open_file(DATA)
        self.sums_descriptor = self.folder.open_file(SUMS)
        self.state_descriptor = self.folder.open_file(STATE)
        size_bytes = os.fstat(self.state_descriptor).st_size
        os.posix_fallocate(self.state_descriptor, 0, size_bytes)
        self._state_file = _mapped(self.state_descriptor, size_bytes)
        self.states: Bytes = self._state_file[HEADER_BYTES:]
        self._each_state = self.states.data
        self.header = self.read_header()
        self._map_data()

    def _map_data(self) -> None:
        self.data: Bytes = _mapped(
            self.data_descriptor,
            os.fstat(self.data_descriptor).st_size,
            is_random=self.kind == "disk",
        )

    def read_header(self) -> Header:
        """Return the header as it is now."""
        header = read_header(self.state_descriptor)
        assert header is not None, self.folder.path
        return header

    def write_header(self, header: Header) -> None:
        """Write the header; only in the opening moment."""
        os.pwrite(self.state_descriptor, header.packed(), 0)
        self.header = header

    @property
    def generation(self) -> int:
        """Return the present generation; it does not change while anybody has the tier open."""
        return self.header.generation

    def begin_generation(self) -> None:
        """Let everything be checked again; only by one who is alone."""
        generation = self.header.generation + 1
        if generation > GENERATION_MAX:
            for first in range(0, len(self.states), CHUNK_UNITS):
                states = self.states[first : first + CHUNK_UNITS].copy()
                states[states != 0] = UNKNOWN_GENERATION
                write_all(self.state_descriptor, states.data, HEADER_BYTES + first)
            self.flush_state()
            generation = 1
        os.pwrite(self.state_descriptor, bytes(HEADER_BYTES - _FULL_AT), _FULL_AT)
        self.write_header(replace(self.header, generation=generation))
        # Else a crash could bring back the old number beside states with the new one.
        self.flush_state()

    def write_states(self, states: Bytes) -> None:
        """Write all states; only by one who is alone."""
        assert states.shape == self.states.shape
        if len(states):
            write_all(self.state_descriptor, states.data, HEADER_BYTES)
        self.flush_state()

    def flush_state(self) -> None:
        """Make the state survive a crash of the machine."""
        if self.kind == "disk":
            os.fsync(self.state_descriptor)

    def state_of(self, unit: int) -> int:
        """Return one unit's state, in a tenth of the time that `states` takes for one."""
        return self._each_state[unit]

    def set_state(self, unit: int, state: int) -> None:
        """Write one unit's state."""
        os.pwrite(self.state_descriptor, bytes((state,)), HEADER_BYTES + unit)

    def grow(self, size_bytes: int) -> None:
        """Let the data file reach so far; it never shrinks, since others have mapped it."""
        try:
            if os.fstat(self.data_descriptor).st_size < size_bytes:
                os.ftruncate(self.data_descriptor, size_bytes)
            if self.data.nbytes < size_bytes:
                self._map_data()
        except OSError as error:
            if error.errno not in (errno.EFBIG, errno.EINVAL, errno.ENOMEM, errno.EOVERFLOW):
                raise
            raise NoTierError(
                f"{self.folder.path} needs a sparse file of {show_bytes(size_bytes)}, as long as "
                f"the units of the data set, and cannot have it ({error.strerror}); ext4 ends "
                "files at 17.6 TB and a process maps 128 TiB: give a folder on XFS, or open "
                "parts of the data set"
            ) from error

    def sum_of(self, unit: int) -> int:
        """Return the sum that was written for a unit."""
        return int.from_bytes(os.pread(self.sums_descriptor, 8, 8 * unit), "little")

    def sums_of(self, units: Ints) -> list[int]:
        """Return the sums that were written for some units."""
        return [self.sum_of(unit) for unit in units.tolist()]

    def write_sum(self, unit: int, value: int) -> None:
        """Write one unit's sum."""
        if os.pwrite(self.sums_descriptor, value.to_bytes(8, "little"), 8 * unit) != 8:
            raise OSError(28, "No space left on device")

    def punch(self, offset: int, length: int) -> bool:
        """Give the room of some bytes back; they read as zeros afterwards."""
        return length == 0 or punch(self.data_descriptor, offset, length)

    @property
    def is_full(self) -> bool:
        """Return whether anybody was refused room here a short while ago."""
        (full_at_s,) = _FULL.unpack(self._state_file[_FULL_AT : _FULL_AT + _FULL.size].tobytes())
        return bool(full_at_s) and bool(abs(time.monotonic() - full_at_s) < FULL_S)

    def set_full(self) -> None:
        """Tell all users that the device is full."""
        os.pwrite(self.state_descriptor, _FULL.pack(time.monotonic()), _FULL_AT)

    def terms(self) -> dict[int, int]:
        """Return which wish became which capacity in this generation, wishes by their hash."""
        data = os.pread(self.state_descriptor, _TERM.size * _TERMS_MAX, _TERMS_AT)
        return {wish: size_bytes for wish, size_bytes in _TERM.iter_unpack(data) if wish}

    def add_term(self, wish: int, capacity_bytes: int) -> None:
        """Write down what a wish became; only in the opening moment."""
        number = len(self.terms())
        if number < _TERMS_MAX:  # else those who come with this wish reckon again
            at = _TERMS_AT + _TERM.size * number
            os.pwrite(self.state_descriptor, _TERM.pack(wish, capacity_bytes), at)

    @property
    def data_taken_bytes(self) -> int:
        """Return what the units take on their device."""
        return os.fstat(self.data_descriptor).st_blocks * 512

    @property
    def room_taken_bytes(self) -> int:
        """Return what the files take on their device."""
        descriptors = (self.data_descriptor, self.sums_descriptor, self.state_descriptor)
        return sum(os.fstat(d).st_blocks for d in descriptors) * 512

    def close(self) -> None:
        """Close all descriptors, which lets go of all locks; a map lives on with its last view."""
        self.data = self.states = self._state_file = np.empty(0, np.uint8)
        self._each_state = self.states.data
        for name in ("data_descriptor", "sums_descriptor", "state_descriptor"):
            descriptor = getattr(self, name)
            setattr(self, name, -1)
            if descriptor >= 0:
                os.close(descriptor)
        self.folder.close()
        self.locks.close()


def _mapped(descriptor: int, size_bytes: int, *, is_random: bool = False) -> Bytes:
    if size_bytes == 0:  # an empty file cannot be mapped
        return np.empty(0, np.uint8)
    mapped = mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_READ)
    if is_random:
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, np.uint8)


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of it, however many calls that takes."""
    while data.nbytes:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


_libc = ctypes.CDLL(None, use_errno=True)


def punch(descriptor: int, offset: int, length: int) -> bool:
    """Make a hole in a file; False where the file system cannot."""
    fallocate = getattr(_libc, "fallocate64", None) or getattr(_libc, "fallocate", None)
    if fallocate is None:
        return False
    off_t = ctypes.c_int64
    return bool(fallocate(descriptor, _PUNCH, off_t(offset), off_t(length)) == 0)
