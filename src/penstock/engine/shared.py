"""Memory that several processes of a loader see: segments, and values that lie in them.

A *segment* is memory without a name (memfd): it ends with the last process that has it, also after
kill -9, and needs no room in /dev/shm. One process owns a segment and leases it out, as
`BufferPool` does with private memory. Others map it when they first hear of it.

A *parcel* is a value on its way to another process. Large arrays inside it stay where they are, as
references to segments; the rest is pickled. Whoever opens a parcel gets arrays that look into the
segments. When the last of them is gone, the sender is told, and the memory can be used again.
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
"""Arrays up to here are copied into the message: a reference would cost as much."""
_NUM_SPARE = 8
"""Buffers beyond the look-ahead: batches on their way, in use by the training loop, and read by a
GPU. A new segment costs as much as several batches: it is made, and mapped in every process."""
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
        # Not by Python's own mmap, which keeps a descriptor open for each: whoever keeps a
        # thousand batches would run out of them. Populated at once: a fault for each page costs
        # more than all of them together.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        address = _libc.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0)
        if address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f"{size_bytes} bytes of shared memory: {os.strerror(code)}")
        self.number = next(_numbers)
        """Its name among the segments of this process."""
        self.address = int(address)
        self.size_bytes = size_bytes
        self.memory: Memory = holder_type(size_bytes).from_address(address)
        """The bytes; mapped as long as somebody looks into them."""
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
    """The segments that a process has mapped, its own and those of others."""

    def __init__(self) -> None:
        # Changed while the garbage collector runs, so without a lock: single steps are atomic.
        self._segments: dict[int, SharedSegment] = {}

    def add(self, segment: SharedSegment) -> None:
        """Take note of a segment."""
        self._segments[segment.number] = segment

    def remove(self, number: int) -> SharedSegment | None:
        """Forget a segment; its memory goes when nobody looks into it."""
        return self._segments.pop(number, None)

    def __contains__(self, number: int) -> bool:
        return number in self._segments

    def __getitem__(self, number: int) -> SharedSegment:
        return self._segments[number]

    @property
    def size_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(segment.size_bytes for segment in list(self._segments.values()))

    def at(self, address: int) -> SharedSegment | None:
        """Return the segment that begins at an address."""
        return next((s for s in list(self._segments.values()) if s.address == address), None)

    def find(self, address: int, size_bytes: int) -> tuple[SharedSegment, int] | None:
        """Return the segment that some memory lies in, and where in it."""
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
        """Addresses of segments that are not used again."""

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
        """Return where in shared memory an array lies, if it does."""
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
    """What keeps the references valid, in their order; it stays with the sender."""

    @property
    def shared_bytes(self) -> int:
        """Bytes that are not copied."""
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
    """The segments of another process, by the numbers that it gave them."""

    def __init__(self, segments: SharedSegments, *, passes_on: bool = False) -> None:
        self._segments = segments
        self._passes_on = passes_on
        """Whether third processes are to get them from this one."""
        self._mine: dict[int, SharedSegment] = {}

    @property
    def segments(self) -> list[SharedSegment]:
        """All that are mapped."""
        return list(self._mine.values())

    def add(self, fresh: Sequence[tuple[int, int]], files: Sequence[int]) -> list[SharedSegment]:
        """Map segments: their numbers and sizes, and as many files; return them."""
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
        """Let go of segments; return what they are called here."""
        gone = [self._mine.pop(n) for n in numbers if n in self._mine]
        for segment in gone:
            self._segments.remove(segment.number)
        return [segment.number for segment in gone]

    def array(self, reference: Reference) -> Bytes:
        """Return memory that another process has lent, for as long as that process says."""
        return self._held(reference)[1]

    def _held(self, reference: Reference) -> tuple[Memory, Bytes]:
        """Return memory that another process has lent, and what lives as long as views of it."""
        number, offset, length = reference
        segment = self._mine[number]
        room = room_for(length)
        size_bytes = room if offset + room <= segment.size_bytes else length
        holder = holder_type(size_bytes).from_buffer(segment.memory, offset)
        return holder, np.frombuffer(holder, np.uint8, length)

    def open(self, parcel: SharedParcel, released: Callable[[int], None] | None = None) -> Any:
        """Return the value of a parcel.

        `released` is told the number of each reference when nobody looks at it any more; the
        garbage collector may call it, in any thread.
        """
        return pickle.loads(parcel.data, buffers=self._lent(parcel, released))

    def passed_on(self, parcel: SharedParcel, released: Callable[[int], None]) -> SharedParcel:
        """Return a parcel for a third process, which this one need not open."""
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
    """What another process holds of ours: the segments that it knows, the parcels it has open."""

    def __init__(self, segments: SharedSegments) -> None:
        self._segments = segments
        self._known: set[int] = set()
        self._held: dict[tuple[int, int], Any] = {}
        self._numbers = itertools.count()

    def new_files(self, numbers: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
        """Return number and size of those segments that the other end lacks, and their files."""
        fresh = [n for n in dict.fromkeys(numbers) if n not in self._known]
        self._known.update(fresh)
        found = [self._segments[n] for n in fresh]
        return [(s.number, s.size_bytes) for s in found], [s.file for s in found]

    def stale(self) -> list[int]:
        """Return segments that the other end knows and that are gone here."""
        gone = [n for n in self._known if n not in self._segments]
        self._known.difference_update(gone)
        return gone

    def keep(self, parcel: SharedParcel) -> int:
        """Keep what a parcel refers to until the other end has released it; return its number."""
        number = next(self._numbers)
        for index, held in enumerate(parcel.held):
            self._held[number, index] = held
        return number

    def release(self, number: int, index: int) -> Any:
        """Take note that the other end does not look at a reference any more; return its memory."""
        return self._held.pop((number, index), None)
