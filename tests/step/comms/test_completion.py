"""A lane's thread completes in order, passes errors on and holds nobody up."""

import threading
from collections.abc import Iterator

import pytest
import torch

from penstock.step.comms.completion import OPERATIONS_MAX, Completion
from penstock.step.comms.gloo_wire import Staging


class Waits:
    """Something to wait for that a test lets happen."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def wait(self) -> None:
        assert self._event.wait(20)

    def happen(self) -> None:
        self._event.set()


def steps(said: list[str], name: str, *pending: Waits) -> Iterator[Waits]:
    said.append(f"{name} begins on {threading.current_thread().name}")
    yield from pending
    said.append(f"{name} ends on {threading.current_thread().name}")


def test_all_begin_at_once_and_end_in_their_order() -> None:
    lane, said = Completion("lane"), []
    first, second = Waits(), Waits()
    a = lane.start("a", steps(said, "a", first))
    b = lane.start("b", steps(said, "b", second))
    second.happen()
    assert not b.is_done(), "b is over, but a was asked first"
    first.happen()
    b.wait()
    assert a.is_done()
    lane.close()
    here = threading.current_thread().name
    begins = [f"a begins on {here}", f"b begins on {here}"]
    assert said == [*begins, "a ends on lane", "b ends on lane"]


def test_chained_work_may_ask_for_more_on_its_own_lane() -> None:
    lane, said = Completion("lane"), []
    asked, go = [], Waits()
    first = lane.start("first", steps(said, "first", go))
    first.then(lambda: asked.append(lane.start("next", steps(said, "next"))))
    go.happen()
    first.wait()
    lane.close()
    assert asked[0].is_done()
    assert said[-2:] == ["next begins on lane", "next ends on lane"]


def test_one_error_ends_all_that_is_and_all_that_comes() -> None:
    lane, go = Completion("lane"), Waits()

    def fails() -> Iterator[Waits]:
        yield go
        raise ZeroDivisionError("the first one")

    bad, after = lane.start("bad", fails()), lane.start("after", steps([], "after", Waits()))
    after.then(lambda: pytest.fail("it did not come to its end"))
    go.happen()
    for handle in (bad, after):
        with pytest.raises(ZeroDivisionError, match="the first one"):
            handle.wait()
    with pytest.raises(ZeroDivisionError, match="the first one"):
        lane.start("later", steps([], "later"))
    with pytest.raises(ZeroDivisionError, match="the first one"):
        lane.drain()
    lane.close()


def test_chained_work_that_fails_is_not_lost() -> None:
    lane, go = Completion("lane"), Waits()
    handle = lane.start("good", steps([], "good", go))
    handle.then(lambda: 1 // 0)
    last = lane.start("last", steps([], "last", go))
    go.happen()
    with pytest.raises(ZeroDivisionError):
        last.wait()
    with pytest.raises(ZeroDivisionError):
        lane.drain()
    lane.close()


def test_the_number_under_way_is_bounded() -> None:
    lane, go = Completion("lane"), Waits()
    handles = [lane.start("one", steps([], "one", go)) for _ in range(OPERATIONS_MAX)]
    more: list[object] = []
    thread = threading.Thread(target=lambda: more.append(lane.start("more", steps([], "more"))))
    thread.start()
    assert not more, "there is no room before the first has ended"
    go.happen()
    thread.join()
    lane.close()
    assert all(handle.is_done() for handle in handles)


def test_buffers_come_again_and_never_more_than_the_bound() -> None:
    staging = Staging(limit_bytes=8000)
    lease = staging.lease(4000, is_forced=False)
    assert lease is not None
    first = lease.take(1000, torch.float32)
    assert staging.lease(4001, is_forced=False) is None
    assert staging.lease(4001, is_forced=True) is not None, "the oldest must get on"
    lease.end()
    again = staging.lease(0, is_forced=True)
    assert again is not None
    assert again.take(1000, torch.float32).data_ptr() == first.data_ptr()
    assert again.take(1000, torch.float32).data_ptr() != first.data_ptr()
