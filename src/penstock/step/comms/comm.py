"""Communication: what the ranks of one mesh axis say to each other, whatever carries it.

A `Comm` belongs to one axis and one lane. Its methods return at once with a `Handle`; all ranks of
the axis call the same ones in the same order, and orders of different lanes have nothing to do with
each other. Tensors are contiguous and seen flat. Where W ranks have parts of one tensor, the parts
are cut as `penstock.step.program.layouts.part` cuts them: the last ones may be shorter, or empty. A
Comm that is `in_parts` also takes them one by one, wherever they lie and as long as all ranks say.

    all_reduce       everyone ends with the sum of all
    reduce_scatter   everyone ends with its part of the sum
    all_gather       everyone has a part and ends with all of them
    all_to_all       everyone sends a run of elements to each
    reduce           the root ends with the sum; what others have left in theirs is not defined
    broadcast        everyone ends with what the root had
    shift            along a pipeline: what rank i has arrives at rank i + by

`wire="bf16"` sends half the bytes of float32 and adds in float32: approximate, so only where
someone asked for it. `algo` is "direct" (one exchange with each), "ring" (neighbours only),
"native" (the library's own) or None (chosen by size). What each rank sends is a number that can be
known beforehand, `payload_bytes`, and that each Comm counts, `sent_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from penstock.step.program.layouts import part

__all__ = ["OneRankComm", "Comm", "Done", "Handle", "InParts", "parts_of", "payload_bytes"]


class Handle(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Return when its tensors can be used again, or raise what went wrong."""

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def then(self, work: Callable[[], None]) -> None:
        """Have something called once it is done: by the thread that completes it, or now."""


class Comm(Protocol):
    """What the ranks of one axis can do together on one lane."""

    axis: str
    rank: int
    size: int

    @property
    def in_parts(self) -> InParts | None:
        """Itself, if parts need not lie in a row."""
        ...

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent so far, without headers."""
        ...

    def all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        op: str = "sum",
        wire: str | None = None,
        algo: str | None = None,
    ) -> Handle:
        """Put the sum (mean, max, min) of all ranks' tensors in the place of each."""
        ...

    def reduce_scatter(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        *,
        op: str = "sum",
        wire: str | None = None,
        algo: str | None = None,
    ) -> Handle:
        """Put this rank's part of the sum in `out`, which may be that part of the tensor."""
        ...

    def all_gather(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        *,
        wire: str | None = None,
        algo: str | None = None,
    ) -> Handle:
        """Put all ranks' parts in `out`; the tensor may be this rank's part of it."""
        ...

    def all_to_all(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        *,
        out_counts: Sequence[int],
        counts: Sequence[int],
    ) -> Handle:
        """Send each rank its run of elements; put what came from each in a row."""
        ...

    def reduce(self, tensor: torch.Tensor, *, root: int, op: str = "sum") -> Handle:
        """Put the sum of all in the root's tensor; those of others may be written over."""
        ...

    def broadcast(self, tensor: torch.Tensor, *, root: int) -> Handle:
        """Put the root's tensor in all."""
        ...

    def shift(
        self,
        out: torch.Tensor | None,
        tensor: torch.Tensor | None,
        *,
        by: int = 1,
        wrap: bool = False,
    ) -> Handle:
        """Send to the rank `by` further, receive from the one `by` before; ends are left alone."""
        ...

    def barrier(self) -> None:
        """Return when all ranks have come here and all that was asked on this lane is done."""

    def close(self) -> None:
        """Wait for what is under way and end the lane's thread."""


class InParts(Protocol):
    """What a Comm can do with parts that lie apart, one for each rank."""

    def scatter_parts(
        self,
        out: torch.Tensor,
        parts: Sequence[torch.Tensor],
        *,
        op: str = "sum",
        wire: str | None = None,
        algo: str | None = None,
    ) -> Handle:
        """Put this rank's part of the sum in `out`, which may be that part."""
        ...

    def gather_parts(
        self,
        outs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        *,
        wire: str | None = None,
        algo: str | None = None,
    ) -> Handle:
        """Put each rank's part in its place; the tensor may lie in its own."""
        ...


def parts_of(tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Return the parts of a flat tensor as views, by rank."""
    flat = tensor if tensor.dim() == 1 else tensor.view(-1)
    parts = list(torch.chunk(flat, size))  # one call for all; it leaves empty ones out
    if len(parts) < size:
        parts += [flat[flat.numel() :]] * (size - len(parts))
    return parts


def payload_bytes(
    kind: str, length: int, item_bytes: int, *, size: int, rank: int, algo: str = "direct"
) -> int:
    """Return what one rank sends for a collective over `length` elements in all.

    Summed over ranks it is the same for "direct" and "ring"; one rank's share of it differs only
    where parts are uneven. For `reduce` and `broadcast` the rank is counted from the root.

    >>> [payload_bytes("reduce_scatter", 10, 4, size=4, rank=r) for r in range(4)]
    [28, 28, 28, 36]
    """
    lengths = [stop - start for start, stop in (part(length, size, i) for i in range(size))]
    scatter = length - lengths[rank]
    gather = (size - 1) * lengths[rank]
    if algo == "ring":  # a ring passes on every part but the one its neighbour began with
        gather = length - lengths[(rank + 1) % size]
    elements = {
        "reduce_scatter": scatter,
        "all_gather": gather,
        "all_reduce": scatter + gather,
        "reduce": length if rank != 0 else 0,
        "broadcast": length if (rank + 1) % size != 0 else 0,
    }
    return elements[kind] * item_bytes if size > 1 else 0


class Done:
    """The handle of what was done before the call returned."""

    def wait(self) -> None:
        """Return."""

    def is_done(self) -> bool:
        """Return True."""
        return True

    def then(self, work: Callable[[], None]) -> None:
        """Call it."""
        work()


class OneRankComm:
    """The Comm of an axis with one rank: everything is a copy, and nothing is sent."""

    rank, size, sent_bytes = 0, 1, 0
    in_parts = None

    def __init__(self, axis: str) -> None:
        self.axis = axis

    def all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        op: str = "sum",
        wire: str | None = None,
        algo: str | None = None,
    ) -> Handle:
        """Leave it as it is."""
        return Done()

    def reduce_scatter(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        *,
        op: str = "sum",
        wire: str | None = None,
        algo: str | None = None,
    ) -> Handle:
        """Copy."""
        return _copied(out, tensor)

    def all_gather(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        *,
        wire: str | None = None,
        algo: str | None = None,
    ) -> Handle:
        """Copy."""
        return _copied(out, tensor)

    def all_to_all(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        *,
        out_counts: Sequence[int],
        counts: Sequence[int],
    ) -> Handle:
        """Copy."""
        return _copied(out, tensor)

    def reduce(self, tensor: torch.Tensor, *, root: int, op: str = "sum") -> Handle:
        """Leave it as it is."""
        return Done()

    def broadcast(self, tensor: torch.Tensor, *, root: int) -> Handle:
        """Leave it as it is."""
        return Done()

    def shift(
        self,
        out: torch.Tensor | None,
        tensor: torch.Tensor | None,
        *,
        by: int = 1,
        wrap: bool = False,
    ) -> Handle:
        """Copy if the ends are joined; otherwise nobody is there."""
        if wrap and out is not None and tensor is not None:
            return _copied(out, tensor)
        return Done()

    def barrier(self) -> None:
        """Return."""

    def close(self) -> None:
        """Return."""


def _copied(out: torch.Tensor, tensor: torch.Tensor) -> Handle:
    if out.data_ptr() != tensor.data_ptr():
        out.view(-1).copy_(tensor.view(-1))
    return Done()
