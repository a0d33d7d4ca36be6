"""Calls: what each rank of a communicator is about to do, told to all ranks beforehand.

A rank writes its call into its segment and arrives; then all read all calls. If they are not the
same operation on the same amounts, every rank raises the same error, which names the first two that
differ. The calls also say where the tensors are, so that all ranks choose the same way.

There are two places, used in turns. A rank that writes the call after next has seen all ranks
arrive with the next one, and by then they have read this one.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from penstock.errors import OptionError
from penstock.step.comms.shm_flags import Flags
from penstock.step.comms.shm_memory import HostArena

__all__ = ["Calls", "ShmCall"]

_TEXT_BYTES = 112
_NOWHERE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmCall:
    """One rank's call of an operation."""

    text: str
    """The operation and its amounts; the same on all ranks."""
    offset: int | None = None
    """Where in the rank's segment its tensor is; None if it is elsewhere."""
    counts: tuple[int, ...] = ()
    """How many elements it gives to each rank, in an all_to_all."""


class Calls:
    """The calls of all ranks of a communicator."""

    def __init__(self, arena: HostArena, offset: int, flags: Flags) -> None:
        self._me, self._flags = arena.rank, flags
        self._format = _format(arena.size)
        num_words = self.words_of(arena.size)
        self._places = [
            arena.words(rank, offset, num_words).cast("B") for rank in range(arena.size)
        ]
        self._turn = 0

    @staticmethod
    def words_of(num_ranks: int) -> int:
        """Return how many words of 64 bits the calls of one rank need."""
        return 2 * _format(num_ranks).size // 8

    def agree(self, call: ShmCall) -> list[ShmCall]:
        """Publish this rank's call, wait for those of all ranks, and return them by rank.

        Raises:
            OptionError: the ranks call different things.
        """
        at = self._turn % 2 * self._format.size
        self._turn += 1
        counts = call.counts or (0,) * len(self._places)
        offset = _NOWHERE if call.offset is None else call.offset
        text = call.text.encode()[:_TEXT_BYTES]
        self._format.pack_into(self._places[self._me], at, text, offset, *counts)
        self._flags.sync()
        calls = [_call(self._format.unpack_from(place, at)) for place in self._places]
        mine = calls[self._me]
        for other, theirs in enumerate(calls):
            if theirs.text != mine.text:
                first, second = sorted([(self._me, mine.text), (other, theirs.text)])
                raise OptionError(
                    f"ranks call different things: rank {first[0]} {first[1]}, rank {second[0]} "
                    f"{second[1]}; all ranks must call the same operations in the same order"
                )
        return calls

    def close(self) -> None:
        """Release the arena's memory."""
        for place in self._places:
            place.release()


def _format(num_ranks: int) -> struct.Struct:
    return struct.Struct(f"<{_TEXT_BYTES}s{1 + num_ranks}q")


def _call(fields: tuple[bytes | int, ...]) -> ShmCall:
    text, offset, *counts = fields
    assert isinstance(text, bytes)
    return ShmCall(
        text=text.rstrip(b"\0").decode(errors="replace"),
        offset=None if offset == _NOWHERE else int(offset),
        counts=tuple(int(count) for count in counts),
    )
