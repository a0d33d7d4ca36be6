"""The thread that checks what earlier runs left, beside the loops that serve."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import numpy as np

from penstock.engine.peers import request_router
from penstock.engine.peers.request_router import LeftoverChecker
from penstock.engine.peers.requests import PeerRequest
from penstock.engine.peers.wire import Ints


class SlowShelf:
    """A shelf whose disk is slow: it answers when it is let."""

    def __init__(self) -> None:
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def settle(self, units: Ints) -> None:
        self.is_asked.set()
        assert self.may_answer.wait(20)


def request() -> PeerRequest:
    asker: Any = object()
    ranges = np.zeros((1, 5), np.int64)
    return PeerRequest(connection=asker, number=1, shelf=b"", ranges=ranges, deadline_s=0.0)


def begun() -> tuple[LeftoverChecker, Any, list[PeerRequest]]:
    settler, shelf, done = LeftoverChecker(), SlowShelf(), []
    assert settler.submit(shelf, request(), done.append)  # type: ignore[arg-type]
    assert shelf.is_asked.wait(20)
    return settler, shelf, done


def test_the_thread_does_not_outlive_stop_and_leaves_what_waits() -> None:
    settler, shelf, done = begun()
    assert settler.submit(shelf, request(), done.append)
    stopping = threading.Timer(0.05, shelf.may_answer.set)
    stopping.start()
    assert settler.stop(20)
    stopping.join()
    assert len(done) == 1
    assert not [t for t in threading.enumerate() if t.name == "penstock-settle"]
    assert not settler.submit(shelf, request(), done.append)


def test_a_disk_that_hangs_is_not_waited_for_without_end() -> None:
    settler, shelf, _ = begun()
    assert not settler.stop(0.01)
    shelf.may_answer.set()
    assert settler.stop(20)


def test_only_so_many_wait_to_be_checked() -> None:
    settler, shelf, done = begun()
    with mock.patch.object(request_router, "SETTLING_MAX", 2):
        taken = [settler.submit(shelf, request(), done.append) for _ in range(4)]
    assert taken == [True, True, False, False]
    shelf.may_answer.set()
    assert settler.stop(20)
