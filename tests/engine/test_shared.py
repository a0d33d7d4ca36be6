"""Parcels and segments, with both ends in one process."""

import gc
import os
from typing import Any

import numpy as np
import pytest

from penstock.engine.shared import Inbox, Outbox, SharedPool, SharedSegments, packed

LARGE = 1 << 20


class TwoEnds:
    """A sender with a pool, and a receiver, as two processes have them."""

    def __init__(self, size_bytes_max: int = 8 * LARGE) -> None:
        self.segments = SharedSegments()
        self.pool = SharedPool(size_bytes_max, self.segments)
        self.outbox = Outbox(self.segments)
        self.inbox = Inbox(SharedSegments())

    def sent(self, value: Any) -> Any:
        """Send a value as a parcel; what the receiver drops is released at the sender."""
        parcel = packed(value, self.pool)
        fresh, files = self.outbox.new_files([n for n, _, _ in parcel.references])
        number = self.outbox.keep(parcel)
        parcel.held = []
        # The receiver closes files; another process has descriptors of its own.
        self.inbox.add(fresh, [os.dup(file) for file in files])
        return self.inbox.open(parcel, lambda index: self.outbox.release(number, index))


def num_segments(ends: TwoEnds) -> int:
    return ends.segments.size_bytes // LARGE


def test_a_value_arrives_equal_and_large_arrays_are_not_copied() -> None:
    ends = TwoEnds()
    array = ends.pool.array((LARGE,), np.uint8)
    array[:] = 7
    got = ends.sent({"large": array, "small": np.arange(3), "text": "x", "view": memoryview(b"yz")})
    assert (got["large"] == 7).all()
    assert got["small"].tolist() == [0, 1, 2]
    assert (got["text"], got["view"]) == ("x", b"yz")
    array[0] = 1
    assert got["large"][0] == 1  # Both look at the same memory.


def test_memory_is_leased_again_only_after_the_receiver_has_dropped_it() -> None:
    ends = TwoEnds()
    array = ends.pool.array((LARGE,), np.uint8)
    array[:] = 0
    got = ends.sent(array)
    del array
    gc.collect()
    other = ends.pool.array((LARGE,), np.uint8)
    assert num_segments(ends) == 2
    other[:] = 1
    assert not got.any()
    del got, other
    gc.collect()
    again = [ends.pool.array((LARGE,), np.uint8) for _ in range(2)]
    assert (len(again), num_segments(ends)) == (2, 2)


def test_a_segment_travels_once() -> None:
    ends = TwoEnds()
    array = ends.pool.array((LARGE,), np.uint8)
    first = packed(array, ends.pool)
    fresh, files = ends.outbox.new_files([n for n, _, _ in first.references])
    assert len(fresh) == len(files) == 1
    assert ends.outbox.new_files([n for n, _, _ in first.references]) == ([], [])


def test_the_receiver_is_told_of_segments_that_are_gone() -> None:
    ends = TwoEnds(size_bytes_max=0)
    ends.pool._num_spare = 0  # Nothing is kept.
    got = ends.sent(ends.pool.array((LARGE,), np.uint8))
    assert ends.outbox.stale() == []
    del got
    gc.collect()
    [number] = ends.outbox.stale()
    assert ends.inbox.forget([number])
    assert ends.inbox.segments == []
    assert ends.outbox.stale() == []


def test_spoilt_memory_is_never_leased_again() -> None:
    ends = TwoEnds()
    array = ends.pool.array((LARGE,), np.uint8)
    place = ends.pool.reference(array)
    assert place is not None
    assert ends.pool.spoil(array)
    del array
    gc.collect()
    other = ends.pool.array((LARGE,), np.uint8)
    assert ends.pool.reference(other)[0] != place[0]
    assert not ends.pool.spoil(np.zeros(8))


def test_a_parcel_can_be_passed_on_unopened() -> None:
    ends = TwoEnds()
    parcel = packed({"x": ends.pool.array((LARGE,), np.uint8)}, ends.pool)
    fresh, files = ends.outbox.new_files([n for n, _, _ in parcel.references])
    middle = SharedSegments()
    inbox = Inbox(middle, passes_on=True)
    inbox.add(fresh, [os.dup(file) for file in files])
    released: list[int] = []
    passed = inbox.passed_on(parcel, released.append)
    third = Inbox(SharedSegments())
    outbox = Outbox(middle)
    fresh, files = outbox.new_files([n for n, _, _ in passed.references])
    third.add(fresh, [os.dup(file) for file in files])
    assert third.open(passed)["x"].shape == (LARGE,)
    assert released == []
    passed.held = []
    gc.collect()
    assert released == [0]


@pytest.mark.parametrize("size", [0, 1, 100])
def test_small_arrays_travel_inside_of_the_message(size: int) -> None:
    ends = TwoEnds()
    parcel = packed(np.zeros(size, np.uint8), ends.pool)
    assert parcel.references == []
    assert parcel.shared_bytes == 0
