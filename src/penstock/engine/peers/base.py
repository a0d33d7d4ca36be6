"""The values that client and server share: addresses, requests and answers, shelves, gossip.

A *shelf* is the tiers of one data set on one node; its name is 16 bytes that every node of a run
computes alike. An `Ask` is a request for ranges of units. Its coordinates are those of the tier's
data file, so a server needs no data set, no index and no store. An `Answer` says which ranges came,
the checksum that each whole unit was written with, and whether the node makes progress.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from penstock.engine.peers.wire import SHELF_BYTES, WAIT_S_MAX, Ints, Words
from penstock.errors import OptionError

ABSENT, UNCHECKED = -1, -2
"""In a lookup, instead of a file: not here; here, but from an earlier run and not checked yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server listens. The host is an IPv4 or IPv6 literal, perhaps with a scope."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise OptionError(f"a port lies between 0 and 65535, got {self.port}")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def unnamed(address: Address) -> str:
    """Return a name for a peer whose own name is not known; a client then accepts any name."""
    return f"@{address}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request for ranges of units."""

    shelf: bytes
    ranges: Ints
    """One row per range: unit, unit_offset, unit_length, inside, length."""
    wait_s: float = 0.0
    """How long the server may park it until all ranges are there; 0: answer at once."""

    def __post_init__(self) -> None:
        assert len(self.shelf) == SHELF_BYTES, self.shelf
        assert self.ranges.dtype == np.int64, self.ranges.dtype
        assert self.ranges.shape == (len(self.ranges), 5), self.ranges.shape
        assert 0 <= self.wait_s <= WAIT_S_MAX, self.wait_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of an `Ask`; its bytes lie in the memory that the caller gave."""

    absent: tuple[int, ...]
    """Numbers of the ranges that were not served."""
    sums: tuple[int, ...]
    """By range: the xxh3_64 of its whole unit, as its tier wrote it, or of the part that was sent
    (`part_sums`); 0 where absent."""
    progress_mark: int
    """The peer's `Shelf.progress_mark` when it answered."""
    was_parked: bool
    seconds: float
    """From the request, or from the end of parking, to the last byte."""


class HeldFile:
    """A file to send; queued frames hold it, so it stays open until their last byte is sent."""

    def __init__(self, descriptor: int, *, is_disk: bool = False, close: bool = False) -> None:
        self.descriptor = descriptor
        self.is_disk = is_disk
        """Whether to start reading ahead before the bytes are sent."""
        self._is_mine = close
        self._map: memoryview = memoryview(b"")

    def mapped(self, offset: int, length: int) -> memoryview | None:
        """Return bytes of the file for a system call to copy; None if the file is too short.

        Python code must not read the view: if the file is truncated meanwhile, a system call fails
        with EFAULT, but a read in this process raises SIGBUS and ends it.
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
class Lookup:
    """Where the units of some ranges lie."""

    places: Ints
    """By range: an index into `files`, or ABSENT, or UNCHECKED."""
    files: tuple[HeldFile, ...]
    sums: Words
    """By range; 0 where absent."""

    @classmethod
    def nothing(cls, num_ranges: int) -> Lookup:
        """Return a lookup that found none of so many ranges."""
        places = np.full(num_ranges, ABSENT, np.int64)
        return cls(places=places, files=(), sums=np.zeros(num_ranges, np.uint64))


class Shelf:
    """The tiers of one data set as a server sees them; derive from it.

    `lookup` must be fast and never checks a sum, because a loop that serves many connections calls
    it. Units that it reports as UNCHECKED are passed to `settle` in another thread
    (`LeftoverChecker`), where reading them may take its time.
    """

    name: bytes

    def progress_mark(self) -> int:
        """Return a number that changes while this node makes progress.

        Clients only compare it with the last one that they saw.
        """
        raise NotImplementedError

    def is_filling(self) -> bool:
        """Return whether absent units may still come: filling goes on."""
        raise NotImplementedError

    def are_coming(self, units: Ints) -> bool:
        """Return whether all of these absent units may still come; this node fills only its own."""
        del units
        return self.is_filling()

    def lookup(self, ranges: Ints) -> Lookup:
        """Return where the units of some ranges lie."""
        raise NotImplementedError

    def settle(self, units: Ints) -> None:
        """Check the sums of units that `lookup` reported as UNCHECKED."""

    def spoil(self, unit: int) -> None:
        """Count a unit as absent, because its device could not read it."""


Served = Callable[[str, int, int, int], None]
"""Called when the last byte of an answer has been sent: with the client's name, the time of its
request (perf_counter_ns), the number of bytes and of ranges."""


class Shelves:
    """The shelves of one server, by name; any thread may use it."""

    def __init__(self, served: Served | None = None) -> None:
        self.served = served
        self._shelves: dict[bytes, Shelf] = {}
        # Orders writers only. Readers take no lock: a new mapping replaces the old one in one step.
        self._lock = threading.Lock()

    def add(self, shelf: Shelf) -> None:
        """Serve a shelf from now on; it replaces one of the same name."""
        assert isinstance(shelf, Shelf), f"{type(shelf)} does not derive from Shelf"
        assert len(shelf.name) == SHELF_BYTES, shelf.name
        with self._lock:
            self._shelves = {**self._shelves, shelf.name: shelf}

    def remove(self, name: bytes) -> None:
        """Stop serving a shelf; answers that are being sent go on."""
        with self._lock:
            self._shelves = {key: each for key, each in self._shelves.items() if key != name}

    def get(self, name: bytes) -> Shelf | None:
        """Return the shelf of that name, or None."""
        return self._shelves.get(name)

    def all(self) -> Mapping[bytes, Shelf]:
        """Return all shelves by name."""
        return self._shelves


class Gossip(Protocol):
    """What nodes tell each other about other nodes; travels inside requests and answers.

    The threads of servers and clients call it, so it must be fast and thread-safe. A connection
    does not send a message again until it has changed.
    """

    def say(self) -> bytes:
        """Return the message to send, at most 4,096 bytes."""

    def hear(self, peer: str, data: bytes) -> None:
        """Take the message of a peer; it may hold any bytes."""

    def reached(self, peer: str) -> None:
        """Note that a peer has answered."""

    def silent(self, peer: str, kind: str) -> None:
        """Note that a peer failed: one call for all its open requests; kinds as in `PeerError`."""


@dataclass(frozen=True, slots=True)
class NoGossip:
    """Gossip for clients and servers that take no part in it."""

    def say(self) -> bytes:
        """Return nothing."""
        return b""

    def hear(self, peer: str, data: bytes) -> None:
        """Ignore it."""

    def reached(self, peer: str) -> None:
        """Ignore it."""

    def silent(self, peer: str, kind: str) -> None:
        """Ignore it."""
