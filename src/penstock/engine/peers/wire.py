"""The wire format between peers: frames with a fixed head, little endian.

    head      kind, body length, request number                       16 bytes
    body      depends on the kind; at most BODY_BYTES_MAX of the kind
    payload   after the body of an ANSWER: the bytes of the ranges that are there, one after another

Everything here is a pure function of bytes, or a `Decoder` that takes bytes as they come. A length
is compared with its bound before bytes of that length are kept; nothing is unpickled; invalid bytes
raise `WireError` and nothing else. Only the few payload bytes that were read together with a head
pass through a decoder's buffer; the rest goes straight to where the caller wants it.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

PROTOCOL = 1
SHELF_BYTES = 16
GOSSIP_BYTES_MAX = 4096
RANGES_MAX = 4096
"""Ranges in one ASK."""
ANSWER_BYTES_MAX = 64 * 2**20
"""Payload bytes of one ANSWER."""
STATUS_BYTES_MAX = 2**20
SHELVES_MAX = 64
"""Shelves in one BEAT."""
WAIT_S_MAX = 600.0
"""The longest time that a server parks one request; a client may send it again."""
NUMBER_MAX = 2**62
"""Bound of every column of a range, so that the sum of two does not overflow."""
FEW = 16
"""Up to so many ranges, a loop is faster than NumPy."""
UNIT, UNIT_OFFSET, UNIT_LENGTH, INSIDE, LENGTH = range(5)
"""The columns of the ranges in an ASK."""

HELLO, CHALLENGE, PROOF, WELCOME, REFUSE = 1, 2, 3, 4, 5
ASK, PARKED, ANSWER, BEAT, STATUS_ASK, STATUS, BYE = 16, 17, 18, 19, 20, 21, 22

HEAD = struct.Struct("<B3xIQ")
_ASK = struct.Struct(f"<{SHELF_BYTES}sIHH")
_ANSWER = struct.Struct("<qIHH")
_MARK = struct.Struct(f"<{SHELF_BYTES}sq")
RANGE_BYTES = 5 * 8
HELLO_BYTES_MAX = 256
BODY_BYTES_MAX = {
    HELLO: HELLO_BYTES_MAX,
    CHALLENGE: HELLO_BYTES_MAX,
    PROOF: HELLO_BYTES_MAX,
    WELCOME: 0,
    REFUSE: 1,
    ASK: _ASK.size + GOSSIP_BYTES_MAX + RANGES_MAX * RANGE_BYTES,
    PARKED: 0,
    ANSWER: _ANSWER.size + GOSSIP_BYTES_MAX + RANGES_MAX * 9,
    BEAT: SHELVES_MAX * _MARK.size,
    STATUS_ASK: 0,
    STATUS: STATUS_BYTES_MAX,
    BYE: 0,
}
FROM_ASKERS = frozenset({ASK, STATUS_ASK, BYE})
FROM_SERVERS = frozenset({PARKED, ANSWER, BEAT, STATUS, BYE, REFUSE})


class WireError(Exception):
    """Bytes that no valid peer sends."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message without its payload."""

    kind: int
    number: int
    body: bytes


class Decoder:
    """Turns bytes into frames; keeps at most one frame and the bytes read together with it."""

    def __init__(self, allowed: Collection[int]) -> None:
        self.allowed = allowed
        """Kinds of frames that may come now; may be changed between frames."""
        self._buffer = bytearray()
        self._at = 0

    @property
    def missing_bytes(self) -> int:
        """How many bytes the current frame still needs; at least those of its head."""
        have = len(self._buffer) - self._at
        if have < HEAD.size:
            return HEAD.size - have
        _, length, _ = HEAD.unpack_from(self._buffer, self._at)
        return max(0, HEAD.size + int(length) - have)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes that have been received."""
        self._buffer += data

    def next(self) -> Frame | None:
        """Return the next whole frame; None until there is one."""
        at, buffer = self._at, self._buffer
        if len(buffer) - at < HEAD.size:
            return None
        kind, length, number = HEAD.unpack_from(buffer, at)
        # Both checks before the body has come: the sender must not make us keep more than that.
        if kind not in self.allowed:
            raise WireError(f"a frame of kind {kind} came where none may")
        if length > BODY_BYTES_MAX[kind]:
            raise WireError(
                f"a frame of kind {kind} with {length} bytes, at most {BODY_BYTES_MAX[kind]} fit"
            )
        begin, end = at + HEAD.size, at + HEAD.size + length
        if len(buffer) < end:
            return None
        frame = Frame(kind, number, bytes(memoryview(buffer)[begin:end]))
        self._advance(end)
        return frame

    def take(self, target: memoryview) -> int:
        """Move bytes that follow the last frame into `target`; return how many there were."""
        count = min(target.nbytes, len(self._buffer) - self._at)
        if count:
            target[:count] = memoryview(self._buffer)[self._at : self._at + count]
            self._advance(self._at + count)
        return count

    def _advance(self, at: int) -> None:
        if at == len(self._buffer):
            self._buffer, at = bytearray(), 0
        elif at > 2**16:  # seldom, because it moves the rest of the buffer
            del self._buffer[:at]
            at = 0
        self._at = at


def framed(kind: int, number: int = 0, body: bytes = b"") -> bytes:
    """Return a frame as bytes."""
    assert len(body) <= BODY_BYTES_MAX[kind], f"{kind=} {len(body)=}"
    return HEAD.pack(kind, len(body), number) + body


@dataclass(frozen=True, slots=True)
class AskFrame:
    """The contents of an ASK."""

    shelf: bytes
    wait_s: float
    gossip: bytes
    ranges: Ints


def pack_ask(number: int, shelf: bytes, ranges: Ints, wait_s: float, gossip: bytes) -> bytes:
    """Return an ASK frame."""
    assert len(gossip) <= GOSSIP_BYTES_MAX, len(gossip)
    fixed = _ASK.pack(shelf, round(min(wait_s, WAIT_S_MAX) * 1000), len(ranges), len(gossip))
    return framed(ASK, number, b"".join((fixed, gossip, ranges.tobytes())))


def parse_ask(body: bytes) -> AskFrame:
    """Return the contents of an ASK."""
    if len(body) < _ASK.size:
        raise WireError(f"an ask of {len(body)} bytes")
    shelf, wait_ms, num_ranges, num_gossip = _ASK.unpack_from(body)
    begin = _ASK.size + num_gossip
    if num_gossip > GOSSIP_BYTES_MAX or len(body) != begin + num_ranges * RANGE_BYTES:
        raise WireError(f"an ask of {len(body)} bytes for {num_ranges} ranges")
    if wait_ms > WAIT_S_MAX * 1000:
        raise WireError(f"an ask that would wait {wait_ms} ms")
    ranges = np.frombuffer(body, "<i8", offset=begin).reshape(num_ranges, 5)
    if fault := fault_in_ask(ranges):
        raise WireError(fault)
    return AskFrame(shelf, wait_ms / 1000, body[_ASK.size : begin], ranges)


def fault_in_ask(ranges: Ints) -> str:
    """Return what is wrong with the ranges of an ASK; empty if nothing is."""
    if len(ranges) > RANGES_MAX:
        return f"an ask of {len(ranges)} ranges, at most {RANGES_MAX} are answered"
    if len(ranges) <= FEW:
        return _fault_in_few(ranges.tolist())
    lowest, highest = int(ranges.min()), int(ranges.max())
    if lowest < 0 or highest > NUMBER_MAX:
        return f"a range with the number {lowest if lowest < 0 else highest}"
    lengths = ranges[:, LENGTH]
    if (ranges[:, INSIDE] + lengths > ranges[:, UNIT_LENGTH]).any():
        return "a range that reaches beyond its unit"
    # Integers as large as the bound could overflow in a sum; a sum of floats is close enough.
    total = float(lengths.sum(dtype=np.float64))
    return "" if total <= ANSWER_BYTES_MAX else _too_long(total)


def _fault_in_few(rows: list[list[int]]) -> str:
    """Return the same as `fault_in_ask`, faster for few ranges."""
    total = 0
    for row in rows:
        lowest, highest = min(row), max(row)
        if lowest < 0 or highest > NUMBER_MAX:
            return f"a range with the number {lowest if lowest < 0 else highest}"
        if row[INSIDE] + row[LENGTH] > row[UNIT_LENGTH]:
            return "a range that reaches beyond its unit"
        total += row[LENGTH]
    return "" if total <= ANSWER_BYTES_MAX else _too_long(total)


def _too_long(total: float) -> str:
    return f"an ask of {total:.0f} bytes, at most {ANSWER_BYTES_MAX} are answered"


@dataclass(frozen=True, slots=True)
class AnswerFrame:
    """The contents of an ANSWER; its payload follows."""

    progress_mark: int
    payload_bytes: int
    gossip: bytes
    is_here: bytes
    """By range: 1 where its bytes are in the payload, else 0."""
    sums: tuple[int, ...]


def pack_answer(
    number: int,
    *,
    progress_mark: int,
    payload_bytes: int,
    gossip: bytes,
    is_here: bytes,
    sums: Words,
) -> bytes:
    """Return an ANSWER frame, without its payload."""
    assert len(gossip) <= GOSSIP_BYTES_MAX, len(gossip)
    fixed = _ANSWER.pack(progress_mark, payload_bytes, len(is_here), len(gossip))
    return framed(ANSWER, number, b"".join((fixed, gossip, is_here, sums.tobytes())))


def parse_answer(body: bytes) -> AnswerFrame:
    """Return the contents of an ANSWER."""
    if len(body) < _ANSWER.size:
        raise WireError(f"an answer of {len(body)} bytes")
    progress_mark, payload_bytes, num_ranges, num_gossip = _ANSWER.unpack_from(body)
    begin = _ANSWER.size + num_gossip
    end = begin + num_ranges
    if num_gossip > GOSSIP_BYTES_MAX or len(body) != end + num_ranges * 8:
        raise WireError(f"an answer of {len(body)} bytes for {num_ranges} ranges")
    is_here = body[begin:end]
    if is_here.translate(None, b"\0\1"):
        raise WireError("an answer whose marks of ranges are neither 0 nor 1")
    sums = struct.unpack_from(f"<{num_ranges}Q", body, end)
    gossip = body[_ANSWER.size : begin]
    return AnswerFrame(progress_mark, payload_bytes, gossip, is_here, sums)


def fault_in_answer(answer: AnswerFrame, lengths: Sequence[int]) -> str:
    """Return why an answer does not match the requested lengths; empty if it does."""
    if len(answer.is_here) != len(lengths):
        return f"an answer of {len(answer.is_here)} ranges where {len(lengths)} were asked for"
    due = sum(lengths)
    if 0 in answer.is_here:
        due = sum(length for length, is_one in zip(lengths, answer.is_here, strict=True) if is_one)
    if due != answer.payload_bytes:
        return f"an answer of {answer.payload_bytes} bytes where {due} were due"
    return ""


def pack_beat(progress_marks: Mapping[bytes, int]) -> bytes:
    """Return a BEAT frame: the server is alive, and this is how far its shelves are filled."""
    some = list(progress_marks.items())[:SHELVES_MAX]
    return framed(
        BEAT, 0, b"".join(_MARK.pack(shelf, progress_mark) for shelf, progress_mark in some)
    )


def parse_beat(body: bytes) -> dict[bytes, int]:
    """Return the progress marks in a BEAT."""
    if len(body) % _MARK.size:
        raise WireError(f"a beat of {len(body)} bytes")
    return dict(_MARK.iter_unpack(body))


def pack_status(number: int, status: Mapping[str, Any]) -> bytes:
    """Return a STATUS frame; a status that is too long is replaced by an error text."""
    body = msgspec.msgpack.encode(dict(status))
    if len(body) > STATUS_BYTES_MAX:
        fault = f"the status has {len(body)} bytes, at most {STATUS_BYTES_MAX} are sent"
        body = msgspec.msgpack.encode({"error": fault})
    return framed(STATUS, number, body)


def parse_status(body: bytes) -> dict[str, Any]:
    """Return the contents of a STATUS: plain numbers, texts, lists and mappings."""
    try:
        return msgspec.msgpack.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise WireError(f"a status that cannot be read: {error}") from None
