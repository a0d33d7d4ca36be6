"""Arenas: the parameters of a model side by side in flat memory, and so are their gradients.

What is scattered over hundreds of tensors has to be copied before it can be sent. So parameters are
moved once, into one flat tensor for each element type and group of the optimizer, and are views of
it from then on; their gradients are views of a second one.

An arena is cut in *units*: what is reduced, updated and gathered in one go. A unit has W slices of
equal length, one for each rank. Small parameters share a unit, a large one has several; between
units there is room for padding, which is zero and stays so.

    parameters   | a      | b | c |..| d                              |.|
    units        | 0             |   | 1        | 2        | 3          |
    slices       | r0    | r1        | r0 | r1  | r0 | r1  | r0   | r1  |

The slices of one rank, put side by side, are its *share*: optimizer state, sums of gradients and,
where weights are sent rounded, the weights themselves live there, in 1/W of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from penstock.step.attached.fit import moved

__all__ = [
    "ALIGN_ELEMENTS",
    "Arena",
    "ArenaLayout",
    "Segment",
    "Take",
    "ArenaUnit",
    "dense_strides",
    "laid_out",
]

ALIGN_ELEMENTS = 16
"""Slices begin at multiples of this: 64 bytes of float32."""
Take = Callable[..., torch.Tensor]
"""Gives flat memory: `take(length, dtype=...)`."""
_SLACK = 1.25
"""Times its usual length a unit may have, before it is cut."""


class Segment(NamedTuple):
    """The part of a parameter in one rank's slice of a unit."""

    param: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaUnit:
    """A run of an arena, a multiple of the number of ranks long."""

    start: int
    stop: int
    params: tuple[int, ...]
    """Parameters that lie in it, whole or in part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaLayout:
    """Where parameters and units lie in an arena."""

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    units: tuple[ArenaUnit, ...]
    num_parts: int

    @property
    def length(self) -> int:
        """Length of the arena, padding included."""
        return self.units[-1].stop if self.units else 0

    def slice_of(self, unit: ArenaUnit, rank: int) -> tuple[int, int]:
        """Return where a rank's slice of a unit lies in the arena."""
        length = (unit.stop - unit.start) // self.num_parts
        return unit.start + rank * length, unit.start + (rank + 1) * length

    def share_of(self, unit: ArenaUnit) -> tuple[int, int]:
        """Return where a unit's slice lies in the share of any rank."""
        return unit.start // self.num_parts, unit.stop // self.num_parts

    def segments(self, unit: ArenaUnit, rank: int) -> Iterator[Segment]:
        """Yield what a rank has of each parameter in a unit, in order, by place in the arena."""
        start, stop = self.slice_of(unit, rank)
        for param in unit.params:
            low = max(start, self.starts[param])
            high = min(stop, self.starts[param] + self.lengths[param])
            if low < high:
                yield Segment(param, low, high)


def laid_out(lengths: Sequence[int], *, num_parts: int, unit_length: int) -> ArenaLayout:
    """Return where parameters of these lengths lie, in their order, with units of about a length.

    >>> layout = laid_out([40, 300, 8], num_parts=2, unit_length=128)
    >>> [(unit.start, unit.stop, unit.params) for unit in layout.units]
    [(0, 128, (0, 1)), (128, 256, (1,)), (256, 352, (1, 2))]
    """
    quantum = num_parts * ALIGN_ELEMENTS
    starts, cuts, at = [], [0], 0

    def close() -> None:
        nonlocal at
        at = _rounded(at, quantum)
        cuts.append(at)

    for length in lengths:
        # Less than half a unit is not worth messages of its own: it goes with what follows.
        if 2 * (at - cuts[-1]) >= unit_length and at - cuts[-1] + length > _SLACK * unit_length:
            close()
        starts.append(at)
        at += length
        # What is left of a large one stays open for small ones that follow, as biases do.
        pieces = round((at - cuts[-1]) / unit_length)
        piece = _rounded(-(-(at - cuts[-1]) // max(1, pieces)), quantum)
        while at - cuts[-1] > max(piece, _SLACK * unit_length):
            cuts.append(cuts[-1] + piece)
    if at > cuts[-1]:
        close()
    units = tuple(
        ArenaUnit(start=low, stop=high, params=_lying_in(low, high, starts, lengths))
        for low, high in pairwise(cuts)
    )
    return ArenaLayout(
        lengths=tuple(lengths), starts=tuple(starts), units=units, num_parts=num_parts
    )


def _rounded(length: int, quantum: int) -> int:
    return -(-length // quantum) * quantum


def _lying_in(
    low: int, high: int, starts: Sequence[int], lengths: Sequence[int]
) -> tuple[int, ...]:
    spans = enumerate(zip(starts, lengths, strict=True))
    return tuple(i for i, (start, n) in spans if n and start < high and start + n > low)


class Arena:
    """Parameters of one type as views of one tensor, and room for their gradients."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        layout: ArenaLayout,
        *,
        take: Take = torch.zeros,
        is_one: bool = True,
    ) -> None:
        """Copy parameters side by side, into memory that `take` gives; it is zero.

        Parameters share its storage if it is to be `is_one`, and have storages of their own over
        the same memory otherwise: torch.save would write the whole of a shared storage.
        """
        self.layout, self.is_one = layout, is_one
        self.shapes = [param.shape for param in params]
        self.strides = [dense_strides(param) for param in params]
        self.data = take(layout.length, dtype=params[0].dtype)
        self.grads = take(layout.length, dtype=params[0].dtype)
        for index, param in enumerate(params):
            self.view(self.data, index).copy_(param.detach())
        # Each with a counter of its own changes: views of one tensor would share theirs.
        self.grad_views = [self.view(self.grads, index).data for index in range(len(params))]

    def move_in(self, params: Sequence[torch.Tensor]) -> None:
        """Make the parameters views of this arena."""
        for index, param in enumerate(params):
            param.data = self.home(index)

    def move_apart(self, params: Sequence[torch.Tensor]) -> None:
        """Give the parameters storages of their own from now on, over the same memory."""
        self.is_one = False
        self.move_in(params)

    def home(self, index: int) -> torch.Tensor:
        """Return a parameter's place."""
        view = self.view(self.data, index)
        return view if self.is_one else _apart(view)

    def bring_home(self, params: Sequence[torch.Tensor]) -> None:
        """Move parameters back that were set to other memory, with their values."""
        size_bytes, start = self.data.itemsize, self.data.data_ptr()
        for index, param in enumerate(params):
            place = start + size_bytes * self.layout.starts[index]
            is_home = param.data_ptr() == place and param.stride() == self.strides[index]
            if (is_home and param.shape == self.shapes[index]) or not param.numel():
                continue
            was = self.grad_views[index]
            if (param.shape, param.dtype, param.device) != (was.shape, was.dtype, was.device):
                raise moved(was, param)
            with torch.no_grad():
                self.view(self.data, index).copy_(param.clone())
            param.data = self.home(index)

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Return a parameter's place in a flat tensor of the arena's length, in its shape.

        The order of its elements in memory stays what it was, as for channels_last.
        """
        start = flat.storage_offset() + self.layout.starts[index]
        return flat.as_strided(self.shapes[index], self.strides[index], start)

    def share(self, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros for one rank's slices of all units."""
        length = self.layout.length // self.layout.num_parts
        return self.data.new_zeros(length, dtype=dtype)


def _apart(view: torch.Tensor) -> torch.Tensor:
    """Return a view that fills some memory with a storage that ends where it ends."""
    if not view.numel():
        return view
    start, size_bytes = view.storage_offset() * view.itemsize, view.numel() * view.itemsize
    storage = view.untyped_storage()[start : start + size_bytes]
    return view.new_empty(0).set_(storage, 0, view.shape, view.stride())


def dense_strides(param: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor that fills its memory, and those of its copy otherwise."""
    return tuple(torch.empty_like(param, memory_format=torch.preserve_format).stride())
