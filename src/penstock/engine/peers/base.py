"""The words of the peer transport: addresses, asks and answers, shelves, gossip.

A *shelf* is a data set's tiers on one node, named by 16 bytes that every node computes alike. An
*ask* names ranges of units in the coordinates of the tier's file, so the one who serves needs no
data set, no index and no store. An *answer* says which ranges came, what sum each whole unit was
written with, and how far its node has got with filling. Whatever carries them is a `Transport`.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from penstock.engine.peers.wire import INSIDE, SHELF_BYTES, WAIT_S_MAX, Ints, Words
from penstock.errors import OptionError, PeerError

__all__ = [
    "SHELF_BYTES",
    "Address",
    "Answer",
    "Ask",
    "UnitLocation",
    "Gossip",
    "HeldFile",
    "Ints",
    "Lookup",
    "NoGossip",
    "PeerError",
    "Shelf",
    "Shelves",
    "Words",
    "unnamed",
]

ABSENT, UNCHECKED = -1, -2
"""In a lookup, instead of a file: not here; here, but to be checked before it is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server listens. The host is a literal of IPv4 or IPv6, perhaps with a scope."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise OptionError(f"a port lies between 0 and 65535, got {self.port}")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def unnamed(address: Address) -> str:
    """Return a name for a peer of which only the address is known; it may call itself anything."""
    return f"@{address}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Ranges of units that one node wants from another."""

    shelf: bytes
    ranges: Ints
    """One row a range: unit, unit_offset, unit_length, inside, length."""
    wait_s: float = 0.0
    """How long it may be parked until all is there; 0: answer at once what is."""

    def __post_init__(self) -> None:
        assert len(self.shelf) == SHELF_BYTES, self.shelf
        assert self.ranges.dtype == np.int64, self.ranges.dtype
        assert self.ranges.shape == (len(self.ranges), 5), self.ranges.shape
        assert 0 <= self.wait_s <= WAIT_S_MAX, self.wait_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of an ask."""

    absent: tuple[int, ...]
    """Numbers of the ranges that were not served."""
    sums: tuple[int, ...]
    """The xxh3_64 of each range's whole unit, as its tier wrote it, or of a part (`part_sums`); 0
    where absent."""
    cursor: int
    was_parked: bool
    seconds: float
    """From the ask, or from the end of parking, to the last byte."""


class HeldFile:
    """A file to send from; its descriptor lives as long as somebody holds this."""

    def __init__(self, descriptor: int, *, is_disk: bool = False, close: bool = False) -> None:
        self.descriptor = descriptor
        self.is_disk = is_disk
        """Whether to ask for bytes ahead of sending them."""
        self._is_mine = close
        self._map: memoryview = memoryview(b"")

    def mapped(self, offset: int, length: int) -> memoryview | None:
        """Return bytes of the file for the kernel to copy; None where they cannot be mapped.

        To be given to a system call and not looked at: where bytes have been cut off meanwhile, the
        call fails (EFAULT), but a look would end the process.
        """
        if self._map.nbytes < offset + length:
            size = os.fstat(self.descriptor).st_size
            if size < offset + length:
                return None
            self._map = memoryview(mmap.mmap(self.descriptor, size, access=mmap.ACCESS_READ))
        return self._map[offset : offset + length]

    def __del__(self) -> None:
        if self._is_mine:
            os.close(self.descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLocation:
    """Where one unit lies."""

    descriptor: int
    total: int
    """The unit's sum."""
    view: memoryview | None = None
    file: HeldFile | None = None
    """What keeps the descriptor open, where somebody else might close it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Where the units of some ranges lie."""

    places: Ints
    """By range: a number in `files`, or ABSENT, or UNCHECKED."""
    files: tuple[HeldFile, ...]
    sums: Words
    """By range; 0 where absent."""


class Shelf:
    """A data set's tiers as a server sees them; derive from it.

    `find` is all that a shelf must have. `lookup` does it for many ranges, and never checks a sum:
    it is called by the thread that serves everybody. What it calls UNCHECKED is given to `settle`,
    in a thread where that may take its time.
    """

    name: bytes

    def find(self, unit: int, unit_offset: int, unit_length: int) -> UnitLocation | None:
        """Return where a unit lies, checked; None: not here (yet)."""
        raise NotImplementedError

    def cursor(self) -> int:
        """Return the position in the global order before which all home units are there."""
        raise NotImplementedError

    def is_filling(self) -> bool:
        """Return whether what is absent may still come."""
        raise NotImplementedError

    def are_coming(self, units: Ints) -> bool:
        """Return whether all of some absent units may still come; those of other nodes may not."""
        del units
        return self.is_filling()

    def lookup(self, ranges: Ints) -> Lookup:
        """Return where the units of some ranges lie."""
        places = np.full(len(ranges), ABSENT, np.int64)
        sums = np.zeros(len(ranges), np.uint64)
        files: list[HeldFile] = []
        for number, (unit, offset, length) in enumerate(ranges[:, :INSIDE].tolist()):
            found = self.find(unit, offset, length)
            if found is not None:
                places[number], sums[number] = len(files), found.total
                files.append(found.file or HeldFile(found.descriptor))
        return Lookup(places=places, files=tuple(files), sums=sums)

    def settle(self, units: Ints) -> None:
        """Check units that `lookup` called unchecked."""

    def spoil(self, unit: int) -> None:
        """Be told that a unit could not be read from its device."""


Served = Callable[[str, int, int, int], None]
"""Is told of each answer when its last byte has been sent: who asked, when (perf_counter_ns), bytes
and ranges."""


class Shelves:
    """The shelves of one server, by name; used by all its threads."""

    def __init__(self, served: Served | None = None) -> None:
        self.served = served
        self._shelves: dict[bytes, Shelf] = {}
        self._lock = threading.Lock()

    def add(self, shelf: Shelf) -> None:
        """Serve a shelf from now on, in the place of one of the same name."""
        assert isinstance(shelf, Shelf), f"{type(shelf)} does not derive from Shelf"
        assert len(shelf.name) == SHELF_BYTES, shelf.name
        with self._lock:
            self._shelves = {**self._shelves, shelf.name: shelf}

    def remove(self, name: bytes) -> None:
        """Serve it no more; what is being sent goes on."""
        with self._lock:
            self._shelves = {key: each for key, each in self._shelves.items() if key != name}

    def get(self, name: bytes) -> Shelf | None:
        """Return a shelf; None where there is none of that name."""
        return self._shelves.get(name)  # the mapping is replaced, never changed

    def all(self) -> Mapping[bytes, Shelf]:
        """Return all shelves by name."""
        return self._shelves


class Gossip(Protocol):
    """What nodes say about each other; carried along with asks and answers.

    Called by the threads of servers and clients, so it must be quick and safe for threads. What
    has been said on a connection is not said again until it changes.
    """

    def say(self) -> bytes:
        """Return what to tell, at most 4,096 bytes."""
        ...

    def hear(self, peer: str, data: bytes) -> None:
        """Take what a peer tells; it may be anything."""
        ...

    def reached(self, peer: str) -> None:
        """Be told that a peer has answered."""
        ...

    def silent(self, peer: str, kind: str) -> None:
        """Be told that a peer failed, once for all that was asked of it; kinds: `PeerError`."""
        ...


@dataclass(frozen=True, slots=True)
class NoGossip:
    """For those who have nothing to say."""

    def say(self) -> bytes:
        """Return nothing."""
        return b""

    def hear(self, peer: str, data: bytes) -> None:
        """Forget it."""

    def reached(self, peer: str) -> None:
        """Forget it."""

    def silent(self, peer: str, kind: str) -> None:
        """Forget it."""
