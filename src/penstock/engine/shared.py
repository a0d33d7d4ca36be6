"""Memory that several processes of a loader share: segments, and values that lie in them.

A *segment* is memory without a name (memfd): it ends with the last process that has it, also after
kill -9, and needs no room in /dev/shm. One process owns a segment and leases it out, as
`BufferPool` does with private memory. Others map it with the first message that refers to it.

A *parcel* is a value on its way to another process. Large arrays inside it stay where they are and
travel as references to segments; the rest is pickled. The receiver gets arrays that look into the
segments. When the last view of a reference is gone, the receiver tells the sender, whose pool then
leases the memory again.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import mmap
import os
import pickle
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from penstock.engine.buffers import BufferPool, Bytes, Memory, holder_type, room_for
from penstock.engine.convert import tensor_reducers

_IN_BAND_BYTES = 16 << 10
"""Arrays of this size are copied into the message: a reference would cost as much."""
_NUM_SPARE = 8
"""Buffers kept beyond the look-ahead: for batches on their way, in use by the training loop, and
copied to a GPU. A new segment costs as much as several batches: every process has to map it."""
_numbers = itertools.count(1)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


class SharedSegment:
    """Shared memory that is mapped here."""

    def __init__(self, file: int, size_bytes: int) -> None:
        # Not with Python's own mmap, which keeps a descriptor open for each map: a training loop
        # that keeps a thousand batches would run out of descriptors. Populated at once, because
        # one call costs less than a fault for each page.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        address = _libc.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0)
        if address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f"{size_bytes} bytes of shared memory: {os.strerror(code)}")
        self.number = next(_numbers)
        """Its number among the segments of this process."""
        self.address = int(address)
        self.size_bytes = size_bytes
        self.memory: Memory = holder_type(size_bytes).from_address(address)
        """The bytes; they stay mapped as long as an array looks into them."""
        weakref.finalize(self.memory, _libc.munmap, address, size_bytes).atexit = False
        self._file: int | None = None
        self.is_own = False
        """Whether this process has made it."""

    @classmethod
    def made(cls, size_bytes: int) -> SharedSegment:
        """Return new memory; its descriptor stays open, to be passed on."""
        file = os.memfd_create("penstock", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, size_bytes)
            segment = cls(file, size_bytes).keeping(file)
        except BaseException:
            os.close(file)
            raise
        segment.is_own = True
        return segment

    def keeping(self, file: int) -> SharedSegment:
        """Keep a descriptor open as long as this segment is known, to be passed on."""
        self._file = file
        weakref.finalize(self, os.close, file).atexit = False
        return self

    @property
    def file(self) -> int:
        """The descriptor to pass on."""
        assert self._file is not None
        return self._file


class SharedSegments:
    """The segments that a process has mapped, those it has made and those of others."""

    def __init__(self) -> None:
        # No lock, because finalizers change it while the garbage collector runs, in any thread,
        # also inside of these methods. Single operations of a dict are atomic.
        self._segments: dict[int, SharedSegment] = {}

    def add(self, segment: SharedSegment) -> None:
        """Add a segment."""
        self._segments[segment.number] = segment

    def remove(self, number: int) -> SharedSegment | None:
        """Forget a segment; its memory is unmapped when no array looks into it any more."""
        return self._segments.pop(number, None)

    def __contains__(self, number: int) -> bool:
        return number in self._segments

    def __getitem__(self, number: int) -> SharedSegment:
        return self._segments[number]

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size_bytes for segment in list(self._segments.values()))

    def at(self, address: int) -> SharedSegment | None:
        """Return the segment that begins at an address."""
        return next((s for s in list(self._segments.values()) if s.address == address), None)

    def find(self, address: int, size_bytes: int) -> tuple[SharedSegment, int] | None:
        """Return the segment that some memory lies in, and the offset in it."""
        for segment in list(self._segments.values()):
            offset = address - segment.address
            if offset >= 0 and offset + size_bytes <= segment.size_bytes:
                return segment, offset
        return None


class SharedPool(BufferPool):
    """Leases shared memory as `BufferPool` leases private memory."""

    def __init__(self, size_bytes_max: int, segments: SharedSegments) -> None:
        super().__init__(size_bytes_max, num_spare=_NUM_SPARE)
        self.segments = segments
        self._spoilt: set[int] = set()
        """Addresses of segments that are never leased again: a forked child may look at them."""

    def spoil(self, array: npt.NDArray[Any]) -> bool:
        """Never lease the segment of an array again; return whether it is one of this pool's."""
        found = self.segments.find(array.__array_interface__["data"][0], array.nbytes)
        if found is None or not found[0].is_own:
            return False
        self._spoilt.add(found[0].address)
        return True

    def _is_spoilt(self, memory: Memory) -> bool:
        return ctypes.addressof(memory) in self._spoilt

    def _make(self, room: int) -> Memory:
        segment = SharedSegment.made(room)
        self.segments.add(segment)
        return segment.memory

    def _drop(self, memory: Memory) -> None:
        segment = self.segments.at(ctypes.addressof(memory))
        if segment is not None:
            self.segments.remove(segment.number)
            self._spoilt.discard(segment.address)

    def reference(self, array: npt.NDArray[Any]) -> Reference | None:
        """Return the place of an array in shared memory; None if it lies elsewhere."""
        found = self.segments.find(array.__array_interface__["data"][0], array.nbytes)
        return None if found is None else (found[0].number, found[1], array.nbytes)


Reference = tuple[int, int, int]
"""Number of a segment, offset and length."""


@dataclass(slots=True)
class SharedParcel:
    """A value on its way to another process."""

    data: bytes | bytearray
    references: list[Reference] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    """The arrays that keep the memory of the references leased; they stay with the sender."""

    @property
    def shared_bytes(self) -> int:
        """Bytes that travel as references, uncopied."""
        return sum(length for _, _, length in self.references)


class _ParcelPacker(cloudpickle.Pickler):  # type: ignore[misc,unused-ignore]
    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is memoryview:
            return bytes, (obj.tobytes(),)
        reduce = tensor_reducers().get(kind)
        return super().reducer_override(obj) if reduce is None else reduce(obj)


def packed(value: Any, pool: SharedPool) -> SharedParcel:
    """Return a value as a parcel; large arrays outside of shared memory are copied into it."""
    parcel = SharedParcel(b"")

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < _IN_BAND_BYTES:
            return True
        array: Bytes = np.frombuffer(view, np.uint8)
        reference = pool.reference(array)
        if reference is None:
            copy = pool.lease(view.nbytes)
            copy[:] = array
            array, reference = copy, pool.reference(copy)
        assert reference is not None
        parcel.references.append(reference)
        parcel.held.append(array)
        return False

    out = io.BytesIO()
    _ParcelPacker(out, protocol=5, buffer_callback=is_small).dump(value)
    parcel.data = out.getvalue()
    return parcel


class Inbox:
    """The segments of another process that are mapped here, by its numbers for them."""

    def __init__(self, segments: SharedSegments, *, passes_on: bool = False) -> None:
        self._segments = segments
        self._passes_on = passes_on
        """Whether this process passes them on to others, and keeps their files open for that."""
        self._mine: dict[int, SharedSegment] = {}

    @property
    def segments(self) -> list[SharedSegment]:
        """All segments that are mapped."""
        return list(self._mine.values())

    def add(self, fresh: Sequence[tuple[int, int]], files: Sequence[int]) -> list[SharedSegment]:
        """Map segments, given by numbers, sizes and files; return them."""
        out = []
        for (number, size_bytes), file in zip(fresh, files, strict=True):
            try:
                segment = SharedSegment(file, size_bytes)
            except BaseException:
                os.close(file)
                raise
            if self._passes_on:
                segment.keeping(file)
            else:
                os.close(file)
            self._mine[number] = segment
            self._segments.add(segment)
            out.append(segment)
        return out

    def forget(self, numbers: Sequence[int]) -> list[int]:
        """Let go of segments; return the numbers that they have here."""
        gone = [self._mine.pop(n) for n in numbers if n in self._mine]
        for segment in gone:
            self._segments.remove(segment.number)
        return [segment.number for segment in gone]

    def array(self, reference: Reference) -> Bytes:
        """Return memory of another process; it is valid until that process reuses it."""
        return self._held(reference)[1]

    def _held(self, reference: Reference) -> tuple[Memory, Bytes]:
        """Return memory of another process, and an object that lives as long as views of it."""
        number, offset, length = reference
        segment = self._mine[number]
        room = room_for(length)
        size_bytes = room if offset + room <= segment.size_bytes else length
        holder = holder_type(size_bytes).from_buffer(segment.memory, offset)
        return holder, np.frombuffer(holder, np.uint8, length)

    def open(self, parcel: SharedParcel, released: Callable[[int], None] | None = None) -> Any:
        """Return the value of a parcel.

        `released` is called with the number of each reference when nobody looks at it any more; the
        garbage collector may call it, in any thread.
        """
        return pickle.loads(parcel.data, buffers=self._lent(parcel, released))

    def passed_on(self, parcel: SharedParcel, released: Callable[[int], None]) -> SharedParcel:
        """Return the same parcel for a third process, without opening it here."""
        references = [(self._mine[n].number, o, length) for n, o, length in parcel.references]
        return SharedParcel(parcel.data, references, self._lent(parcel, released))

    def _lent(self, parcel: SharedParcel, released: Callable[[int], None] | None) -> list[Bytes]:
        out = []
        for index, reference in enumerate(parcel.references):
            holder, view = self._held(reference)
            if released is not None:
                weakref.finalize(holder, released, index).atexit = False
            out.append(view)
        return out


class Outbox:
    """What another process has of ours: segments that it has mapped, parcels that it has open."""

    def __init__(self, segments: SharedSegments) -> None:
        self._segments = segments
        self._known: set[int] = set()
        self._held: dict[tuple[int, int], Any] = {}
        self._numbers = itertools.count()

    def new_files(self, numbers: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
        """Return numbers, sizes and files of those segments that the other end has not mapped."""
        fresh = [n for n in dict.fromkeys(numbers) if n not in self._known]
        self._known.update(fresh)
        found = [self._segments[n] for n in fresh]
        return [(s.number, s.size_bytes) for s in found], [s.file for s in found]

    def stale(self) -> list[int]:
        """Return the segments that the other end has mapped and that are gone here."""
        gone = [n for n in self._known if n not in self._segments]
        self._known.difference_update(gone)
        return gone

    def keep(self, parcel: SharedParcel) -> int:
        """Keep the memory of a parcel until the other end releases it; return its number."""
        number = next(self._numbers)
        for index, held in enumerate(parcel.held):
            self._held[number, index] = held
        return number

    def release(self, number: int, index: int) -> Any:
        """Let go of the memory of a reference, and return it: the other end has released it."""
        return self._held.pop((number, index), None)
