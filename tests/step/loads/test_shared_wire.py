"""A wire that is shared: loads make way for communication, unless they are urgent."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.step.ranks import run_ranks

import penstock.step as ps
from penstock.errors import OptionError
from penstock.step.loads.shared_wire import Wire

LARGE_BYTES = 1 << 20


class Flying:
    """Communication that ends when the test says so."""

    def __init__(self) -> None:
        self._works: list[Callable[[], None]] = []
        self._is_done = False

    def wait(self) -> None: ...

    def is_done(self) -> bool:
        return self._is_done

    def then(self, work: Callable[[], None]) -> None:
        self._works.append(work)

    def land(self) -> None:
        self._is_done = True
        for work in self._works:
            work()

    def fail(self) -> None:
        self._is_done = True  # and nobody is called


class Counted:
    """Batches that tell how many were taken of them."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._changed = threading.Condition()
        self.num_taken = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self._length):
            with self._changed:
                self.num_taken += 1
                self._changed.notify_all()
            yield number

    def reaches(self, number: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.num_taken >= number, 10)

    def stays_at(self, number: int) -> bool:
        with self._changed:
            is_more = self._changed.wait_for(lambda: self.num_taken > number, 0.1)
        return not is_more and self.num_taken == number


def test_a_wire_is_busy_while_something_large_is_under_way() -> None:
    wire, large, small = Wire(), Flying(), Flying()
    wire.begun(small, 100)
    assert not wire.is_busy
    wire.begun(large, LARGE_BYTES)
    assert wire.is_busy
    large.land()
    assert not wire.is_busy


def test_batches_come_in_order_and_end() -> None:
    with Wire().ahead(range(5)) as batches:
        assert list(batches) == [0, 1, 2, 3, 4]
        assert list(batches) == []


def test_no_more_are_taken_than_were_asked_for_ahead() -> None:
    source = Counted(9)
    with Wire().ahead(source, batches_ahead=3) as batches:
        assert next(batches) == 0
        assert source.reaches(4)
        assert source.stays_at(4)


def test_a_load_waits_for_communication_and_goes_when_the_wire_is_free() -> None:
    wire, flying, source = Wire(), Flying(), Counted(9)
    with wire.ahead(source) as batches:
        assert next(batches) == 0
        assert source.reaches(3)
        wire.begun(flying, LARGE_BYTES)
        assert next(batches) == 1  # 2 is there, 3 has time
        assert source.stays_at(3)
        flying.land()
        assert source.reaches(4)
    assert (wire.num_held, wire.num_urgent) == (1, 0)


def test_a_load_goes_when_the_last_batch_was_taken() -> None:
    wire, source = Wire(), Counted(9)
    with wire.ahead(source) as batches:
        assert next(batches) == 0
        assert source.reaches(3)
        wire.begun(Flying(), LARGE_BYTES)  # never lands
        assert [next(batches) for _ in range(8)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert wire.num_urgent > 0


def test_communication_that_failed_holds_nobody_up() -> None:
    wire, flying, source = Wire(), Flying(), Counted(9)
    with wire.ahead(source) as batches:
        assert next(batches) == 0
        assert source.reaches(3)
        wire.begun(flying, LARGE_BYTES)
        assert next(batches) == 1
        flying.fail()
        assert source.reaches(4)


def test_what_goes_wrong_is_raised_where_the_batch_is_asked_for() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise ValueError("no second one")

    with Wire().ahead(broken()) as batches:
        assert next(batches) == 1
        with pytest.raises(ValueError, match="no second one"):
            next(batches)


def test_closing_ends_a_load_that_is_held() -> None:
    wire, source = Wire(), Counted(9)
    batches = wire.ahead(source)
    assert next(batches) == 0
    assert source.reaches(3)
    wire.begun(Flying(), LARGE_BYTES)
    next(batches)
    batches.close()
    assert source.num_taken == 3
    assert batches._thread is not None
    assert not batches._thread.is_alive()


def test_a_loop_that_was_left_leaves_no_thread() -> None:
    batches = Wire().ahead(Counted(9))
    for number in batches:
        assert number == 0
        break
    thread = batches._thread
    assert thread is not None
    assert thread.is_alive()
    del batches
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_nothing_ahead_is_refused() -> None:
    with pytest.raises(OptionError, match="0 batches ahead"):
        Wire().ahead([], batches_ahead=0)


def loads_and_sums(rank: int, size: int) -> dict[str, Any]:
    """Load rows over a wire that sums take too, in a compiled step."""

    @ps.program
    def step(w: ps.R["n"]):
        g = ps.all_reduce(ps.load("train.x", ps.P["n"]))
        return ps.update(w, w + g)

    num_steps, n = 6, LARGE_BYTES // 4
    program = step.on(ps.mesh(dp=size), n=n)
    load = next(node.name for node in program.nodes if node.op == "load")
    wire, w = Wire(), torch.zeros(n)
    batches = ({"x": np.full(n, i + rank, np.float32)} for i in range(num_steps + 3))
    with (
        ps.Groups(program.mesh, over=wire) as groups,
        ps.compile(program.rotate(load, 2), groups, sources={"train": batches}) as compiled,
    ):
        for _ in range(num_steps):
            compiled(w=w)
    return {"w": w.unique().tolist(), "is_busy": wire.is_busy}


def test_a_compiled_step_sees_its_own_communication() -> None:
    for found in run_ranks(loads_and_sums, 2):
        assert found == {"w": [sum(2 * i + 1 for i in range(6))], "is_busy": False}
