"""The word that ranks exchange where they come together: a few numbers, once a step.

Whoever makes a step says which gradients it has, which of them have changed since they were sent,
and by which options it updates its slice. What else ranks have to do together is said in the same
place and costs no exchange of its own. So ranks that do different things are told at once, all of
them, before anything is sent that the others do not expect.

What is exchanged is the maximum of what all say; whether all say the same is asked with a number
and its negative.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import OptionError, StateError
from penstock.step.comms.comm import Comm

__all__ = [
    "CLIP_NORM",
    "CLIP_VALUE",
    "HEAD_LENGTH",
    "STEP",
    "UNSCALE",
    "StepWord",
    "StepWords",
    "exchange",
    "texts_of_all",
]

STEP = "optimizer.step()"
CLIP_NORM = "attached.clip_grad_norm_()"
CLIP_VALUE = "attached.clip_grad_value_()"
UNSCALE = "GradScaler.unscale_()"
_CALLS = (STEP, CLIP_NORM, CLIP_VALUE, UNSCALE)
"""What ranks come together for, as users know it."""
HEAD_LENGTH = len(_CALLS) + 2
"""Of what is said beside rows."""
_TEXT_BYTES = 1 << 13
"""Of what a rank says about itself in an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWord:
    """What one rank says."""

    call: str
    options: Sequence[Mapping[str, Any]]
    """The same on all ranks that make the call: its arguments, or groups of the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWords:
    """What all ranks say."""

    calls: frozenset[str]
    is_same: bool
    """Whether options are."""
    rows: tuple[tuple[float, ...], ...]
    """The maxima of rows of numbers."""


def exchange(word: Comm, mine: StepWord, rows: Sequence[Sequence[float]]) -> StepWords:
    """Say something, with rows of numbers that are as long on all ranks; return what all say.

    Raises:
        StateError: on all ranks, if they have come for different things.
        OptionError: on all ranks, if they have different options.
    """
    number = float(zlib.crc32(repr(mine.options).encode()))
    head = [*(float(call == mine.call) for call in _CALLS), number, -number]
    # One tensor of one list is made faster than several; float64 has all numbers of 32 bits.
    flat = torch.tensor([*head, *(each for row in rows for each in row)], dtype=torch.float64)
    word.all_reduce(flat, op="max").wait()
    said = flat.tolist()
    *calls, highest, lowest = said[: len(head)]
    heard, at = [], len(head)
    for row in rows:
        heard.append(tuple(said[at : at + len(row)]))
        at += len(row)
    words = StepWords(
        calls=frozenset(call for call, is_said in zip(_CALLS, calls, strict=True) if is_said),
        is_same=highest == -lowest,
        rows=tuple(heard),
    )
    if len(words.calls) > 1 or not words.is_same:
        _refuse(word, mine)
    return words


def _refuse(word: Comm, mine: StepWord) -> None:
    """Say what differs; all ranks have seen that something does."""
    lines = [mine.call, *_lines(mine.options)]
    every = [each.split("\n") for each in texts_of_all(word, "\n".join(lines))]
    rank, theirs = next((rank, each) for rank, each in enumerate(every) if each != every[word.rank])
    if theirs[0] != mine.call:
        raise StateError(
            f"rank {word.rank} calls {mine.call} while rank {rank} calls {theirs[0]}; all ranks "
            "make the same calls, as often and in the same order"
        )
    ours, other = next((a, b) for a, b in zip(lines, theirs, strict=False) if a != b)
    raise OptionError(
        f"{mine.call} has other options on two ranks: {ours} on rank {word.rank}, {other} on rank "
        f"{rank}. Each rank updates a slice of every weight, so all ranks need the same; what a "
        "rank finds out for itself, as a loss that a scheduler follows, has to be sent to all first"
    )


def _lines(options: Sequence[Mapping[str, Any]]) -> list[str]:
    one = len(options) == 1
    return [
        f"{name}={value!r}" + ("" if one else f" in group {number}")
        for number, each in enumerate(options)
        for name, value in each.items()
    ]


def texts_of_all(word: Comm, text: str) -> list[str]:
    """Return what each rank has to say, by rank; all call it."""
    every = torch.zeros(word.size, _TEXT_BYTES, dtype=torch.uint8)
    said = text.encode()[:_TEXT_BYTES]
    every[word.rank, : len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    word.all_gather(every.view(-1), every[word.rank].clone()).wait()
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in every]
