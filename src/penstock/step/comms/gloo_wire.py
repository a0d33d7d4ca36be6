"""Messages between two ranks over gloo: posted at once, waited for later, named when they fail.

Gloo matches a message by sender and tag, and ends the process if one is longer than the buffer that
waits for it. So a tag holds the number of the operation on its lane, the number of the message in
it, and a checksum of the operation's facts and the message's length. Ranks that begin different
operations wait for each other until the group's timeout, and the error says so. Bytes move once
both sides have posted; until then a message costs a few bytes of notice.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import distributed

from penstock.errors import PeerError
from penstock.step.comms.timeouts import ADVICE

__all__ = ["GlooWire", "Lease", "Message", "Staging", "WireOperation"]

STAGED_BYTES_MAX = 64 << 20
"""Of one lane, for what has arrived but is not added yet and for what is sent in another type."""
MESSAGES_MAX = 4096
"""Messages of one operation between two ranks, before their numbers repeat."""


class Message:
    """A send or a receive that was posted. It keeps its bytes alive."""

    __slots__ = ("_bytes", "_is_send", "_operation", "_peer", "_work")

    def __init__(
        self,
        operation: WireOperation,
        post: Callable[[], distributed.Work],
        data: torch.Tensor | None,
        *,
        peer: int | None,
        is_send: bool,
    ) -> None:
        self._operation, self._bytes = operation, data
        self._peer, self._is_send = peer, is_send
        try:
            self._work = post()
        except RuntimeError as error:
            raise self._named(error) from error

    def wait(self) -> None:
        """Return when the bytes have arrived, or left; Python's lock is released meanwhile."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._named(error) from error

    def _named(self, error: RuntimeError) -> PeerError:
        """Return an error that names the operation, the axis and the peer."""
        operation, axis = self._operation, self._operation.wire.axis
        said = str(error).rpartition("] ")[2] or str(error)
        is_late = "imed out" in said
        to = "to" if self._is_send else "from"
        who = "one of its ranks" if self._peer is None else f"rank {self._peer} of it"
        hint = (
            "it is stuck, far behind, or has asked for something else here (another operation, "
            f"length or type); compare what the ranks do, or set a longer time-out by {ADVICE}"
            if is_late
            else "its process has ended or the network has failed; see its own output"
        )
        return PeerError(
            f"{operation.name} (number {operation.number} on axis {axis!r}): nothing {to} {who}: "
            f"{said.splitlines()[0]}; {hint}",
            peer=f"{axis}:{self._peer}",
            kind="stuck" if is_late else "lost",
        )


class GlooWire:
    """A lane's private group, seen from one rank."""

    def __init__(self, group: distributed.ProcessGroup, axis: str) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.axis = axis
        self.group = group
        self.sent_bytes = 0
        self._number = 0
        # Guards the counts: the caller's thread and the lane's both send.
        self._lock = threading.Lock()

    def begin(self, name: str, *facts: object, sent: torch.dtype, op: str = "sum") -> WireOperation:
        """Begin an operation: all ranks must give the same name and the same facts."""
        signature = _signature(name, facts)
        with self._lock:
            self._number += 1
            number = self._number
        return WireOperation(
            wire=self, name=name, number=number, signature=signature, sent=sent, op=op
        )

    def count(self, size_bytes: int) -> None:
        """Count bytes that are sent."""
        with self._lock:
            self.sent_bytes += size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WireOperation:
    """One operation of a lane, and its messages."""

    wire: GlooWire
    name: str
    number: int
    signature: int
    sent: torch.dtype
    """The type of elements on the wire."""
    op: str

    @property
    def others(self) -> list[int]:
        """All other ranks, from the next one on, so that not all ranks send to one at first."""
        return [(self.wire.rank + step) % self.wire.size for step in range(1, self.wire.size)]

    def packed(self, lease: Lease, data: torch.Tensor) -> torch.Tensor:
        """Return elements in the type that is sent."""
        if data.dtype == self.sent:
            return data
        return lease.take(data.numel(), self.sent).copy_(data)

    def place(self, lease: Lease, out: torch.Tensor) -> torch.Tensor:
        """Return where elements of `out` can arrive: there, or in a buffer of the type sent."""
        return out if out.dtype == self.sent else lease.take(out.numel(), self.sent)

    def send(self, lease: Lease, index: int, peer: int, data: torch.Tensor) -> Message:
        """Post a message, in the type that is sent."""
        row, group = self.packed(lease, data), self.wire.group
        tag = self._tag(index, row.nbytes)
        sent = Message(self, lambda: group.send([row], peer, tag), row, peer=peer, is_send=True)
        self.wire.count(row.nbytes)
        return sent

    def receive(self, index: int, peer: int, into: torch.Tensor) -> Message:
        """Post the place of a message."""
        tag, group = self._tag(index, into.nbytes), self.wire.group
        return Message(self, lambda: group.recv([into], peer, tag), into, peer=peer, is_send=False)

    def native(self, post: Callable[[], distributed.Work]) -> Message:
        """Post a collective of gloo's own; its errors do not say which peer is missing."""
        return Message(self, post, None, peer=None, is_send=False)

    def _tag(self, index: int, size_bytes: int) -> int:
        """Return the tag of one message: 31 bits, distinct among all that are under way."""
        facts = zlib.crc32(size_bytes.to_bytes(8, "little"), self.signature) % 512
        return (self.number % 1024) << 21 | facts << 12 | index % MESSAGES_MAX


@lru_cache(maxsize=1024)
def _signature(name: str, facts: tuple[object, ...]) -> int:
    return zlib.crc32(repr((name, facts)).encode())


class Staging:
    """Buffers of a lane, reused, up to a bound in all.

    They are kept by length and type: a training step asks for the same ones each time.
    """

    def __init__(self, limit_bytes: int = STAGED_BYTES_MAX) -> None:
        self._limit_bytes = limit_bytes
        self._leased_bytes = 0
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._free_bytes = 0
        # The caller's thread begins waves while the lane's thread ends others.
        self._lock = threading.Lock()

    def lease(self, size_bytes: int, *, is_forced: bool) -> Lease | None:
        """Return a lease of the bytes of one wave; None if that is too much and not forced."""
        with self._lock:
            if self._leased_bytes + size_bytes > self._limit_bytes and not is_forced:
                return None
            self._leased_bytes += size_bytes
        return Lease(self, size_bytes)

    def take(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer of some elements."""
        with self._lock:
            if free := self._free.get((length, dtype)):
                self._free_bytes -= length * dtype.itemsize
                return free.pop()
        return torch.empty(length, dtype=dtype)

    def give_back(self, buffers: list[torch.Tensor], leased_bytes: int) -> None:
        """Keep buffers for the next wave; if they are too many, drop those kept before."""
        with self._lock:
            self._leased_bytes -= leased_bytes
            for buffer in buffers:
                self._free_bytes += buffer.nbytes
                if self._free_bytes > self._limit_bytes:
                    self._free, self._free_bytes = {}, buffer.nbytes
                self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)


class Lease:
    """The buffers of one wave; they go back together."""

    __slots__ = ("_size_bytes", "_staging", "_taken")

    def __init__(self, staging: Staging, size_bytes: int) -> None:
        self._staging = staging
        self._size_bytes = size_bytes
        self._taken: list[torch.Tensor] = []

    def take(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer of some elements."""
        buffer = self._staging.take(length, dtype)
        self._taken.append(buffer)
        return buffer

    def end(self) -> None:
        """Give everything back."""
        self._staging.give_back(self._taken, self._size_bytes)
        self._taken = []
