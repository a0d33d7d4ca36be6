"""Parked requests: they wait for units that other processes are filling.

The states of units lie in files that processes share, and no event tells when one changes. So the
server polls every few milliseconds: one pass over all parked requests of a shelf, which checks one
absent unit of each. Only if that unit has come, the whole request is looked up.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.engine.peers.base import ABSENT, Shelf
from penstock.engine.peers.requests import PeerRequest
from penstock.engine.peers.wire import Ints


class Parking:
    """The parked requests of one shelf."""

    def __init__(self) -> None:
        self._requests: list[PeerRequest] = []
        # One row per request; requests that came since the last poll have none yet, and come last.
        self._rows: Ints = np.empty((0, 5), np.int64)
        self._deadlines_s = np.empty(0)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[PeerRequest]:
        return iter(self._requests)

    def add(self, request: PeerRequest) -> None:
        """Park a request."""
        self._requests.append(request)

    def take_all(self) -> list[PeerRequest]:
        """Remove and return all requests."""
        return self._take(np.ones(len(self._requests), np.bool_))

    def take_due(self, shelf: Shelf, now_s: float) -> list[PeerRequest]:
        """Remove and return the requests that may be complete, or whose deadline has passed."""
        self._note_new()
        return self._take((shelf.lookup(self._rows).places > ABSENT) | (self._deadlines_s <= now_s))

    def take_of(self, connection: object) -> list[PeerRequest]:
        """Remove and return the requests of a connection."""
        return self._take(np.array([r.connection is connection for r in self._requests], np.bool_))

    def _note_new(self) -> None:
        new = self._requests[len(self._rows) :]
        if new:
            rows = np.stack([request.ranges[request.missing] for request in new])
            self._rows = np.concatenate((self._rows, rows))
            deadlines_s = [request.deadline_s for request in new]
            self._deadlines_s = np.concatenate((self._deadlines_s, deadlines_s))

    def _take(self, is_due: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[PeerRequest]:
        if not is_due.any():
            return []
        self._note_new()
        due = [request for request, is_one in zip(self._requests, is_due, strict=True) if is_one]
        self._requests = [r for r, is_one in zip(self._requests, is_due, strict=True) if not is_one]
        self._rows, self._deadlines_s = self._rows[~is_due], self._deadlines_s[~is_due]
        return due
