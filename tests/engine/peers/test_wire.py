"""Frames as bytes: what goes in comes out, and nothing else ever does but `WireError`."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.peers import wire
from penstock.engine.peers.wire import Decoder, WireError

SHELF = b"s" * 16
NUMBERS = st.integers(0, 2**64 - 1)


def ranges(num: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    numbers = np.arange(num, dtype=np.int64)
    return np.stack([numbers, numbers * 100, numbers + 50, numbers, numbers % 50], axis=1)


def an_answer(number: int, num: int) -> bytes:
    is_here = (np.arange(num) % 3 > 0).tobytes()
    return wire.pack_answer(
        number,
        progress_mark=-5,
        payload_bytes=17,
        gossip=b"gossip",
        is_here=is_here,
        sums=np.arange(num, dtype=np.uint64) * np.uint64(2**60),
    )


VALID = [
    wire.pack_ask(1, SHELF, ranges(3), 1.5, b"so it is said"),
    wire.pack_ask(2**64 - 1, SHELF, ranges(0), 0.0, b""),
    an_answer(1, 3),
    wire.pack_beat({SHELF: 7, b"t" * 16: -1}),
    wire.framed(wire.PARKED, 9),
    wire.framed(wire.BYE),
    wire.framed(wire.STATUS_ASK, 3),
    wire.pack_status(3, {"a": [1, 2.5, "x", None]}),
    wire.framed(wire.REFUSE, 0, b"\x02"),
]
ALL_KINDS = frozenset(wire.BODY_BYTES_MAX)


def read(data: bytes, cuts: list[int]) -> list[wire.Frame]:
    """Feed bytes in pieces; return all frames, each read by the function of its kind."""
    decoder, frames = Decoder(ALL_KINDS), []
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for begin, end in itertools.pairwise(edges):
        decoder.feed(data[begin:end])
        while (frame := decoder.next()) is not None:
            frames.append(frame)
            understand(frame)
        assert len(decoder._buffer) <= wire.HEAD.size + max(wire.BODY_BYTES_MAX.values()) + 65536
    return frames


def understand(frame: wire.Frame) -> None:
    if frame.kind == wire.ASK:
        ask = wire.parse_ask(frame.body)
        assert len(ask.ranges) <= wire.RANGES_MAX
        assert int(ask.ranges[:, wire.LENGTH].sum()) <= wire.ANSWER_BYTES_MAX
    elif frame.kind == wire.ANSWER:
        answer = wire.parse_answer(frame.body)
        assert len(answer.is_here) == len(answer.sums)
        wire.fault_in_answer(answer, [1] * len(answer.sums))
    elif frame.kind == wire.BEAT:
        wire.parse_beat(frame.body)
    elif frame.kind == wire.STATUS:
        wire.parse_status(frame.body)


@given(num=st.integers(0, 40), wait_s=st.floats(0, 600), gossip=st.binary(max_size=200))
def test_an_ask_comes_out_as_it_went_in(num: int, wait_s: float, gossip: bytes) -> None:
    decoder = Decoder({wire.ASK})
    decoder.feed(wire.pack_ask(77, SHELF, ranges(num), wait_s, gossip))
    frame = decoder.next()
    assert frame is not None
    ask = wire.parse_ask(frame.body)
    assert (frame.number, ask.shelf, ask.gossip) == (77, SHELF, gossip)
    assert ask.wait_s == pytest.approx(wait_s, abs=0.001)
    assert np.array_equal(ask.ranges, ranges(num))


def test_an_answer_comes_out_as_it_went_in() -> None:
    decoder = Decoder({wire.ANSWER})
    decoder.feed(an_answer(8, 4) + b"the payload follows")
    frame = decoder.next()
    assert frame is not None
    answer = wire.parse_answer(frame.body)
    assert (answer.progress_mark, answer.payload_bytes, answer.gossip) == (-5, 17, b"gossip")
    assert answer.is_here == b"\0\1\1\0"
    assert answer.sums == (0, 2**60, 2**61, 3 * 2**60)
    target = bytearray(100)
    assert decoder.take(memoryview(target)) == 19
    assert target[:19] == b"the payload follows"


@given(order=st.lists(st.sampled_from(VALID), max_size=8), cuts=st.lists(st.integers(0, 5000)))
def test_frames_are_the_same_however_the_bytes_are_cut(order: list[bytes], cuts: list[int]) -> None:
    data = b"".join(order)
    assert read(data, cuts) == read(data, [])
    assert len(read(data, cuts)) == len(order)


@given(data=st.binary(max_size=400), cuts=st.lists(st.integers(0, 400), max_size=5))
def test_random_bytes_are_refused_or_wait_for_more(data: bytes, cuts: list[int]) -> None:
    with contextlib.suppress(WireError):
        read(data, cuts)


@given(
    frame=st.sampled_from(VALID),
    changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.integers(0, 400),
)
def test_spoilt_frames_are_refused_or_read(
    frame: bytes, changes: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(frame)
    for place, value in changes:
        data[place % len(data)] = value
    with contextlib.suppress(WireError):
        read(bytes(data) + VALID[0], [cut])


@pytest.mark.parametrize("kind", sorted(ALL_KINDS))
def test_a_length_beyond_its_bound_is_refused_before_anything_of_it_is_kept(kind: int) -> None:
    decoder = Decoder(ALL_KINDS)
    decoder.feed(wire.HEAD.pack(kind, wire.BODY_BYTES_MAX[kind] + 1, 1))
    with pytest.raises(WireError, match="at most"):
        decoder.next()


def test_a_kind_that_may_not_come_now_is_refused() -> None:
    decoder = Decoder({wire.HELLO})
    decoder.feed(VALID[0][: wire.HEAD.size])
    with pytest.raises(WireError, match="came where none may"):
        decoder.next()


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ([-1, 0, 10, 0, 10], "number -1"),
        ([0, 2**63 - 1, 10, 0, 10], "number 9223372036854775807"),
        ([0, 0, 10, 5, 6], "beyond its unit"),
        ([0, 0, 2**40, 0, 2**40], "1099511627776 bytes"),
    ],
)
def test_ranges_that_make_no_sense_are_refused(row: list[int], fault: str) -> None:
    data = wire.pack_ask(1, SHELF, np.array([row], np.int64), 0, b"")
    with pytest.raises(WireError, match=fault):
        wire.parse_ask(data[wire.HEAD.size :])


def test_asks_beyond_the_bounds_are_refused() -> None:
    rows = np.zeros((wire.RANGES_MAX + 1, 5), np.int64)
    assert "4097 ranges" in wire.fault_in_ask(rows)
    rows = rows[1:]
    assert wire.fault_in_ask(rows) == ""
    rows[:, wire.UNIT_LENGTH] = rows[:, wire.LENGTH] = wire.ANSWER_BYTES_MAX // wire.RANGES_MAX
    assert wire.fault_in_ask(rows) == ""
    rows[7, wire.UNIT_LENGTH] = rows[7, wire.LENGTH] = wire.ANSWER_BYTES_MAX // 4096 + 1
    assert "67108865 bytes" in wire.fault_in_ask(rows)


def test_a_status_that_is_too_long_says_so_instead() -> None:
    data = wire.pack_status(1, {"words": "x" * wire.STATUS_BYTES_MAX})
    assert "at most" in wire.parse_status(data[wire.HEAD.size :])["error"]
