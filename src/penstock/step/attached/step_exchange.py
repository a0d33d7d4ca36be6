"""The exchange of a step: a few numbers that ranks send each other before they go on together.

A rank that makes a step sends which gradients it has, which of them have changed since they were
sent, and the options by which it updates its slice. Ranks that clip, load or close exchange the
same numbers with another name of the call. So ranks that do different things see it here, all of
them, and raise before anything is sent that the others do not expect.

The exchange is an all-reduce that takes the maximum. A number and its negative show whether all
ranks have sent the same one.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import OptionError, StateError
from penstock.step.comms.comm import Comm
from penstock.step.comms.shm_memory import Meet

__all__ = [
    "CLIP_NORM",
    "CLIP_VALUE",
    "CLOSE",
    "HEAD_LENGTH",
    "LOAD",
    "READ",
    "SAVE",
    "STEP",
    "UNSCALE",
    "StepMessage",
    "exchange",
    "meeting_of",
]

STEP = "optimizer.step()"
CLIP_NORM = "attached.clip_grad_norm_()"
CLIP_VALUE = "attached.clip_grad_value_()"
UNSCALE = "GradScaler.unscale_()"
READ = "for the values of param.grad (which it reads after backward)"
CLOSE = "attached.close()"
LOAD = "optimizer.load_state_dict()"
SAVE = "get_optimizer_state_dict()"
_CALLS = (STEP, CLIP_NORM, CLIP_VALUE, UNSCALE, READ, CLOSE, LOAD, SAVE)
"""The calls at which ranks come together, as users know them."""
HEAD_LENGTH = len(_CALLS) + 2
"""Numbers of a message before its rows."""
_ROW_BYTES = 1 << 14
"""Longest text that a rank sends about itself in an error, or about its shared memory."""
_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMessage:
    """The call that one rank makes."""

    call: str
    options: Sequence[Mapping[str, Any]]
    """Its arguments, or groups of the optimizer; the same on all ranks that make the call."""


def exchange(control: Comm, mine: StepMessage, rows: Sequence[Sequence[bool]]) -> list[set[int]]:
    """Send a message with rows of flags; return for each row which flags any rank has set.

    Rows have the same lengths on all ranks.

    Raises:
        StateError: on all ranks, if they have come for different things.
        OptionError: on all ranks, if they have different options.
    """
    number = float(zlib.crc32(repr(mine.options).encode()))
    head = [*(float(call == mine.call) for call in _CALLS), number, -number]
    # One tensor of one list is made faster than several; float64 has all numbers of 32 bits.
    flat = torch.tensor([*head, *(each for row in rows for each in row)], dtype=torch.float64)
    control.all_reduce(flat, op="max").wait()
    said = flat.tolist()
    *calls, highest, lowest = said[: len(head)]
    if sum(calls) > 1 or highest != -lowest:
        _refuse(control, mine)
    found, at = [], len(head)
    for row in rows:
        found.append({k for k, is_set in enumerate(said[at : at + len(row)]) if is_set})
        at += len(row)
    return found


def _refuse(control: Comm, mine: StepMessage) -> None:
    """Raise what differs; all ranks have seen that something does."""
    lines = [mine.call, *_lines(mine.options)]
    texts = meeting_of(control)("\n".join(lines).encode())
    every = [text.decode(errors="ignore").split("\n") for text in texts]
    rank, theirs = next(
        (rank, each) for rank, each in enumerate(every) if each != every[control.rank]
    )
    if theirs[0] != mine.call:
        raise StateError(
            f"rank {control.rank} calls {mine.call} while rank {rank} calls {theirs[0]}; all ranks "
            "make the same calls, as often and in the same order. Where some have fewer batches, "
            "stop all of them at the same step"
        )
    ours, other = next((a, b) for a, b in zip(lines, theirs, strict=False) if a != b)
    raise OptionError(
        f"{mine.call} has other options on two ranks: {ours} on rank {control.rank}, {other} on "
        f"rank {rank}. Each rank updates a slice of every weight, so all ranks need the same; "
        "send all ranks what one has found out for itself, such as a loss that a scheduler follows"
    )


def _lines(options: Sequence[Mapping[str, Any]]) -> list[str]:
    one = len(options) == 1
    return [
        f"{name}={value!r}" + ("" if one else f" in group {number}")
        for number, each in enumerate(options)
        for name, value in each.items()
    ]


def meeting_of(control: Comm) -> Meet:
    """Return how the ranks of a lane exchange a few bytes; what is longer is cut off."""

    def meet(said: bytes) -> list[bytes]:
        every = torch.zeros(control.size, _ROW_BYTES, dtype=torch.uint8)
        said = said[: _ROW_BYTES - _LENGTH_BYTES]
        row = len(said).to_bytes(_LENGTH_BYTES, "little") + said
        every[control.rank, : len(row)] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        control.all_gather(every.view(-1), every[control.rank].clone()).wait()
        return [_said(bytes(each.tolist())) for each in every]

    return meet


def _said(row: bytes) -> bytes:
    length = int.from_bytes(row[:_LENGTH_BYTES], "little")
    return row[_LENGTH_BYTES : _LENGTH_BYTES + length]
