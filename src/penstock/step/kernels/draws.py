"""Random draws and positions of elements in torch, bit for bit those of `program.random`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.step.program.random import DRAW_BITS, MIX, threshold

__all__ = ["BlockPlace", "ElementSpan", "dropped", "dropped_into", "halves", "kept_factor"]

_GOLDEN = 0x9E3779B9
_LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """The position in the whole value of the block that a kernel works on."""

    block: tuple[int, ...]
    starts: tuple[int, ...]
    """The coordinates of its first element."""
    whole: tuple[int, ...]

    @property
    def row_length(self) -> int:
        """Elements of a row of the block."""
        return self.block[-1] if self.block else 1

    @property
    def whole_row_length(self) -> int:
        """Elements of a row of the whole."""
        return self.whole[-1] if self.whole else 1

    @property
    def first_row(self) -> int:
        """The row of the whole in which the block begins."""
        return _number(self.starts[:-1], self.whole[:-1])

    @property
    def first_column(self) -> int:
        """The column of the whole at which the block begins."""
        return self.starts[-1] if self.starts else 0

    @property
    def first(self) -> int:
        """The number of its first element in the whole."""
        return _number(self.starts, self.whole)

    @property
    def is_run(self) -> bool:
        """Whether its elements follow each other in the whole value."""
        return self.block[1:] == self.whole[1:]

    @property
    def is_plain(self) -> bool:
        """Whether its rows follow each other: only the first and the last dimension are cut."""
        return self.block[1:-1] == self.whole[1:-1]

    def numbers(self, begin: int, end: int, device: torch.device) -> Tensor:
        """Return the numbers that some elements of the block have in the whole value."""
        at = torch.arange(begin, end, dtype=torch.int64, device=device)
        if self.is_run:
            return at + self.first
        out = torch.zeros_like(at)
        stride = 1
        for dim in reversed(range(len(self.block))):
            out += (at % self.block[dim] + self.starts[dim]) * stride
            at = torch.div(at, self.block[dim], rounding_mode="floor")
            stride *= self.whole[dim]
        return out


def _number(at: tuple[int, ...], shape: tuple[int, ...]) -> int:
    out = 0
    for coordinate, length in zip(at, shape, strict=True):
        out = out * length + coordinate
    return out


def halves(seed: float) -> tuple[int, int]:
    """Return the low and the high half of a seed."""
    return int(seed) & _LOW, (int(seed) >> 32) & _LOW


def _mixed(x: Tensor) -> Tensor:
    for shift, factor in MIX:
        x = x ^ (x >> shift)
        if factor:
            # It overflows 64 bits; the low half, which is kept, is right.
            x = (x * factor) & _LOW
    return x


def draws(low: int | Tensor, high: int | Tensor, numbers: Tensor) -> Tensor:
    """Return a draw for each number, as `program.random.draws` does, from a seed in two halves."""
    mixed = _mixed((((numbers & _LOW) ^ low) + _GOLDEN) & _LOW)
    mixed = _mixed((mixed + (numbers >> 32) * _GOLDEN + high) & _LOW)
    return mixed >> (32 - DRAW_BITS)


@dataclass(frozen=True, slots=True)
class ElementSpan:
    """Some consecutive elements of a block; calling it returns their numbers."""

    place: BlockPlace
    begin: int
    end: int
    device: torch.device

    def __call__(self) -> Tensor:
        """Return the number of each element in the whole value."""
        return self.place.numbers(self.begin, self.end, self.device)

    def lost(self, low: int, high: int, share: float) -> Tensor:
        """Return for each element whether dropout sets it to zero."""
        first = self.place.first + self.begin
        last = max(first, first + self.end - self.begin - 1)
        if self.device.type != "cpu" or not self.place.is_run or first >> 32 != last >> 32:
            return draws(low, high, self()) < threshold(share)
        # The same with 32 bits: all elements have the same high half, so it adds one number.
        bits = np.arange(first & _LOW, (last & _LOW) + 1, dtype=np.uint32)[: self.end - self.begin]
        bits ^= np.uint32(low)
        bits += np.uint32(_GOLDEN)
        shifted = np.empty_like(bits)
        _mix_in_place(bits, shifted)
        bits += np.uint32(((first >> 32) * _GOLDEN + high) & _LOW)
        _mix_in_place(bits, shifted)
        bits >>= np.uint32(32 - DRAW_BITS)
        return torch.from_numpy(bits < np.uint32(threshold(share)))


def _mix_in_place(bits: Any, shifted: Any) -> None:
    for shift, factor in MIX:
        np.right_shift(bits, np.uint32(shift), out=shifted)
        bits ^= shifted
        if factor:
            bits *= np.uint32(factor)


def kept_factor(share: float) -> float:
    """Return the factor by which dropout scales the elements that it keeps."""
    return 1.0 / (1.0 - share)


def dropped(
    x: Tensor,
    low: int | Tensor,
    high: int | Tensor,
    share: float,
    numbers: ElementSpan | Callable[[Tensor], Tensor],
) -> Tensor:
    """Return x with a share of its elements set to zero and the others scaled to match."""
    if isinstance(numbers, ElementSpan):
        assert isinstance(low, int)
        assert isinstance(high, int)
        lost = numbers.lost(low, high, share)
    else:
        lost = draws(low, high, numbers(x)) < threshold(share)
    return torch.where(lost.view(x.shape), x.new_zeros(()), x * kept_factor(share))


def dropped_into(
    out: Tensor, x: Tensor, seed: tuple[int, int], share: float, span: ElementSpan
) -> None:
    """Write x with a share of its elements set to zero into another tensor."""
    torch.mul(x, kept_factor(share), out=out)
    out.masked_fill_(span.lost(*seed, share).view(out.shape), 0)
