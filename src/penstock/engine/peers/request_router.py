"""The server's decision about each request: answer it, park it, or check leftover units first.

A router belongs to one loop, and only the thread of that loop uses it. It knows shelves and
requests; of a connection it knows only that frames can be queued there. Checking the sums of units
that an earlier run left takes long, so a thread of its own does it for all routers
(`LeftoverChecker`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.engine.peers import wire
from penstock.engine.peers.base import ABSENT, UNCHECKED, Gossip, Lookup, Shelf, Shelves
from penstock.engine.peers.guard import guarded
from penstock.engine.peers.parking import Parking
from penstock.engine.peers.requests import OutgoingFrame, PeerRequest, segments_of
from penstock.engine.peers.wire import UNIT, Frame

_SHELVES_COUNTED_MAX = 256
SETTLING_MAX = 4096
"""Requests that may wait for the `LeftoverChecker`, of all connections together."""


class AskingConnection(Protocol):
    """A connection as a router sees it."""

    peer: str
    run_id: bytes
    said: bytes | None
    """The gossip that was last sent on it."""

    def put(self, outgoing: OutgoingFrame) -> None:
        """Queue a frame behind those that wait to be sent."""

    def finished(self, request: PeerRequest) -> None:
        """Note that a request will not be answered any more."""


@dataclass(slots=True)
class ServerCounts:
    """Counters of one loop."""

    bytes: int = 0
    requests: int = 0
    ranges: int = 0
    absent: int = 0
    """Ranges that were requested and not served."""
    was_parked: int = 0
    accepted: int = 0
    refused: int = 0
    broken: int = 0
    """Connections dropped because of bytes that no client of ours sends."""
    dropped: int = 0
    """Connections dropped because they were too slow or too many."""

    def add(self, other: ServerCounts) -> None:
        """Add the counters of another loop."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """What all loops of a server share."""

    name: str
    shelves: Shelves
    secrets: Callable[[bytes], bytes | None]
    gossip: Callable[[bytes], Gossip]
    """Returns the gossip of a run, by its id."""
    status: Callable[[bytes], dict[str, Any]] | None
    """Returns the status that members of a run may see, by the run's id."""
    may_read: Callable[[bytes, bytes], bool] | None
    """Whether a run may read a shelf; None: every run may read every shelf."""
    settler: LeftoverChecker


class LeftoverChecker:
    """A thread that checks units which earlier runs have left; the first such unit starts it."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Shelf, PeerRequest, Callable[[PeerRequest], None]]] = deque()
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self._changed = threading.Condition()

    def submit(
        self, shelf: Shelf, request: PeerRequest, done: Callable[[PeerRequest], None]
    ) -> bool:
        """Check the units of a request in the thread, which then calls `done`.

        Return False if too many requests wait; units that stay unchecked count as absent.
        """
        with self._changed:
            if self._is_stopped or len(self._waiting) >= SETTLING_MAX:
                return False
            self._waiting.append((shelf, request, done))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="penstock-settle", daemon=True
                )
                self._thread.start()
            self._changed.notify()
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._is_stopped):
                    self._changed.wait()
                if self._is_stopped:
                    return
                shelf, request, done = self._waiting.popleft()
            # Outside the lock: reading units may take seconds, and `submit` must not wait for it.
            guarded(None, shelf.settle, request.ranges[:, UNIT])
            done(request)

    def stop(self, timeout_s: float) -> bool:
        """End the thread after its present request; return whether it ended in time."""
        with self._changed:
            self._is_stopped = True
            self._waiting.clear()
            self._changed.notify()
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()


@dataclass(slots=True)
class RequestRouter:
    """All unanswered requests of one loop."""

    serving: ServerState
    settled: Callable[[PeerRequest], None]
    """Called from the `LeftoverChecker`'s thread; lets the loop look at the request again."""
    counts: ServerCounts = field(default_factory=ServerCounts)
    bytes_by_shelf: dict[bytes, int] = field(default_factory=dict)
    parked: dict[bytes, Parking] = field(default_factory=dict)
    is_leaving: bool = False
    """Whether the server is stopping, so that nothing is parked any more."""
    has_room_to_park: Callable[[], bool] = lambda: True
    """Whether another request may be parked. Parked requests use at most half of the loop's bound,
    so that requests that can be answered at once still get in."""

    def asked(self, connection: AskingConnection, frame: Frame, now_s: float) -> PeerRequest:
        """Read a request from a frame."""
        ask = wire.parse_ask(frame.body)
        if ask.gossip:
            gossip = self.serving.gossip(connection.run_id)
            guarded(None, gossip.hear, connection.peer, ask.gossip)
        request = PeerRequest(
            connection=connection,
            number=frame.number,
            shelf=ask.shelf,
            ranges=ask.ranges,
            deadline_s=now_s + ask.wait_s,
            asked_ns=time.perf_counter_ns(),
        )
        self.counts.requests += 1
        self.counts.ranges += len(ask.ranges)
        return request

    def status_asked(self, connection: AskingConnection, frame: Frame) -> None:
        """Answer a status request."""
        fault = {"error": "the status could not be made: see the server's log"}
        look = self.serving.status
        status = guarded(fault, look, connection.run_id) if look else {}
        connection.put(OutgoingFrame(head=memoryview(wire.pack_status(frame.number, status))))

    def look(self, request: PeerRequest, connection: AskingConnection, now_s: float) -> None:
        """Answer a request, park it, or have its leftover units checked first."""
        shelf, num_ranges = self._shelf(request.shelf, connection), len(request.ranges)
        if shelf is None:
            self._answer(request, connection, None, Lookup.nothing(num_ranges))
            return
        found = guarded(None, shelf.lookup, request.ranges) or Lookup.nothing(num_ranges)
        is_here = found.places > ABSENT
        is_unchecked = not request.has_settled and bool((found.places == UNCHECKED).any())
        if is_here.all():
            self._answer(request, connection, shelf, found)
        elif is_unchecked and self.serving.settler.submit(shelf, request, self.settled):
            return  # `settled` will bring it back here.
        elif now_s < request.deadline_s and self._may_park(shelf, request, is_here):
            request.missing = int(np.argmin(is_here))
            self._park(request, connection)
        else:
            self._answer(request, connection, shelf, found)

    def _shelf(self, name: bytes, connection: AskingConnection) -> Shelf | None:
        may_read = self.serving.may_read
        if may_read is not None and not guarded(False, may_read, connection.run_id, name):
            return None
        return self.serving.shelves.get(name)

    def _may_park(self, shelf: Shelf, request: PeerRequest, is_here: npt.NDArray[np.bool_]) -> bool:
        # A request that was parked before keeps its place, even if there is no more room.
        if self.is_leaving or not (request.was_parked or self.has_room_to_park()):
            return False
        return guarded(False, shelf.are_coming, request.ranges[~is_here, wire.UNIT])

    def _may_come(self, shelf: Shelf) -> bool:
        return not self.is_leaving and guarded(False, shelf.is_filling)

    def _park(self, request: PeerRequest, connection: AskingConnection) -> None:
        if not request.was_parked:
            request.was_parked = True
            self.counts.was_parked += 1
            head = wire.framed(wire.PARKED, request.number)
            connection.put(OutgoingFrame(head=memoryview(head)))
        self.parked.setdefault(request.shelf, Parking()).add(request)

    def take_due(self, now_s: float) -> list[PeerRequest]:
        """Remove and return the parked requests to look at again."""
        due: list[PeerRequest] = []
        for name, parking in list(self.parked.items()):
            shelf = self.serving.shelves.get(name)
            if shelf is None or not self._may_come(shelf):
                due += parking.take_all()
            else:
                due += guarded([], parking.take_due, shelf, now_s)
            if not len(parking):
                del self.parked[name]
        return due

    def take_of(self, connection: object) -> list[PeerRequest]:
        """Remove and return the parked requests of a connection."""
        return [r for parking in self.parked.values() for r in parking.take_of(connection)]

    def progress_marks(self) -> dict[object, dict[bytes, int]]:
        """Return, by connection, the progress marks of shelves that have parked requests."""
        out: dict[object, dict[bytes, int]] = {}
        for name, parking in self.parked.items():
            shelf = self.serving.shelves.get(name)
            progress_mark = guarded(0, shelf.progress_mark) if shelf is not None else 0
            for request in parking:
                out.setdefault(request.connection, {})[name] = progress_mark
        return out

    def _answer(
        self, request: PeerRequest, connection: AskingConnection, shelf: Shelf | None, found: Lookup
    ) -> None:
        is_here = (found.places > ABSENT).tobytes()
        segments = segments_of(request.ranges, found)
        payload_bytes = sum(segment.length for segment in segments)
        gossip = guarded(b"", self.serving.gossip(connection.run_id).say)
        head = wire.pack_answer(
            request.number,
            progress_mark=guarded(0, shelf.progress_mark) if shelf is not None else 0,
            payload_bytes=payload_bytes,
            gossip=gossip if gossip != connection.said else b"",
            is_here=is_here,
            sums=found.sums,
        )
        connection.said = gossip
        self.counts.bytes += payload_bytes
        self.counts.absent += is_here.count(0)
        if shelf is not None:
            self._count(shelf.name, payload_bytes)
        connection.put(
            OutgoingFrame(
                head=memoryview(head),
                segments=segments,
                request=request,
                shelf=shelf,
                size_bytes=payload_bytes,
            )
        )

    def _count(self, shelf: bytes, num_bytes: int) -> None:
        by_shelf = self.bytes_by_shelf
        if shelf in by_shelf or len(by_shelf) < _SHELVES_COUNTED_MAX:
            by_shelf[shelf] = by_shelf.get(shelf, 0) + num_bytes
