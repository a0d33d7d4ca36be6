"""Moves: how elements get from rank to rank, through stages or directly from memory to memory.

Staged, for any tensor: a rank copies a chunk into its stage, all arrive, each takes what it needs
from the stages of the others. There are two stages, used in turns, so one arrival a chunk is
enough: a rank that arrives with chunk k+1 has finished with chunk k, whose stage may then be
overwritten. Chunks are small enough to pass from cache to cache.

Direct, for tensors that live in the arena: `views` are the tensors of all ranks, by rank. Before a
direct move all ranks have arrived with their tensors ready (they have published their calls), and
after it they arrive once more, because only then may an owner overwrite what others have read. In
between, an element is written only by the rank whose part it is in.

Tensors are flat and contiguous here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch

from penstock.step.comms.shm_flags import Flags
from penstock.step.comms.shm_reduce import Reducer, tile_bytes
from penstock.step.program.layouts import part

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Moves"]

Views = Sequence["Tensor"]
Fill = Callable[[int, int, "Tensor"], None]
"""Puts the elements of this rank from `lo` to `hi` into its stage."""
Drain = Callable[[int, int, Views], None]
"""Takes the elements from `lo` to `hi` from the stages of all ranks."""


class Moves:
    """The moves of one communicator.

    Args:
        rank: which of them this is.
        stages: two for each rank: first all ranks' first ones, then their second ones.
        flags: by which ranks wait for each other.
    """

    def __init__(self, rank: int, stages: Sequence[Views], flags: Flags) -> None:
        self._rank, self._stages, self._flags = rank, stages, flags
        self._size, self._turn = len(stages[0]), 0
        self._stage_bytes = stages[0][0].numel()

    def close(self) -> None:
        """Release the stages."""
        self._stages = ()

    # -- direct ------------------------------------------------------------------------------

    def reduce_direct(self, views: Views, reducer: Reducer) -> None:
        """Reduce in place on all ranks: each rank its part, written into the memory of all."""
        start, stop = part(views[0].numel(), self._size, self._rank)
        for lo, hi in _tiles(start, stop, views[0]):
            tiles = [view[lo:hi] for view in views]
            mine = tiles[self._rank]
            reducer(mine, tiles)
            for tile in tiles[: self._rank] + tiles[self._rank + 1 :]:
                tile.copy_(mine)
        self._flags.sync()

    def scatter_direct(self, out: Tensor, views: Views, reducer: Reducer) -> None:
        """Reduce the part of this rank from the memory of all."""
        start, stop = part(views[0].numel(), self._size, self._rank)
        reducer(out, [view[start:stop] for view in views])
        self._flags.sync()

    def give_direct(self, views: Views, tensor: Tensor) -> None:
        """Write the part of this rank into the tensors of all ranks."""
        start, stop = part(views[0].numel(), self._size, self._rank)
        for lo, hi in _tiles(0, stop - start, tensor):
            for view in views:
                _copy(view[start + lo : start + hi], tensor[lo:hi])
        self._flags.sync()

    def take_direct(self, out: Sequence[Tensor], views: Sequence[Tensor]) -> None:
        """Copy pieces out of the memory of others."""
        for into, view in zip(out, views, strict=True):
            _copy(into, view)
        self._flags.sync()

    # -- staged ------------------------------------------------------------------------------

    def chunks(
        self, length: int, dtype: torch.dtype, fill: Fill, drain: Drain, *, pieces: int = 1
    ) -> None:
        """Pass elements through the stages; each has room for some pieces of a chunk."""
        chunk = self.room(dtype, pieces)
        for lo in range(0, length, chunk):
            hi = min(lo + chunk, length)
            stages = [stage.view(dtype) for stage in self._stages[self._turn % 2]]
            self._turn += 1
            fill(lo, hi, stages[self._rank])
            self._flags.sync()
            drain(lo, hi, stages)

    def room(self, dtype: torch.dtype, pieces: int) -> int:
        """Return how many elements a piece of a stage has room for."""
        return max(1, self._stage_bytes // dtype.itemsize // pieces)

    def reduce_whole(self, tensor: Tensor, reducer: Reducer, root: int | None = None) -> None:
        """Add whole chunks on the root, while the others keep their tensors, or on every rank.

        On both of two ranks that is one arrival less than parts, and a + b is b + a to the bit.
        """

        def fill(lo: int, hi: int, stage: Tensor) -> None:
            if self._rank != root:
                stage[: hi - lo].copy_(tensor[lo:hi])

        def drain(lo: int, hi: int, stages: Views) -> None:
            if root in (None, self._rank):
                pieces = [stage[: hi - lo] for stage in stages]
                pieces[self._rank] = tensor[lo:hi]
                reducer(tensor[lo:hi], pieces)

        self.chunks(tensor.numel(), tensor.dtype, fill, drain)

    def reduce_staged(self, tensor: Tensor, reducer: Reducer, dtype: torch.dtype) -> None:
        """Each rank adds its part of a chunk and leaves it in its stage for all to take."""

        def fill(lo: int, hi: int, stage: Tensor) -> None:
            stage[: hi - lo].copy_(tensor[lo:hi])

        def drain(lo: int, hi: int, stages: Views) -> None:
            start, stop = part(hi - lo, self._size, self._rank)
            reducer(stages[self._rank][start:stop], [stage[start:stop] for stage in stages])
            self._flags.sync()
            for peer, stage in enumerate(stages):
                start, stop = part(hi - lo, self._size, peer)
                tensor[lo + start : lo + stop].copy_(stage[start:stop])

        self.chunks(tensor.numel(), dtype, fill, drain)

    def scatter_staged(
        self, out: Tensor, tensor: Tensor, reducer: Reducer, dtype: torch.dtype
    ) -> None:
        """A stage has a piece of each other rank's part; this rank's own is read in place."""
        spans = [part(tensor.numel(), self._size, peer) for peer in range(self._size)]
        room, (mine, end) = self.room(dtype, self._size), spans[self._rank]

        def fill(lo: int, hi: int, stage: Tensor) -> None:
            for peer, (start, stop) in enumerate(spans):
                if peer != self._rank:
                    piece = tensor[min(start + lo, stop) : min(start + hi, stop)]
                    stage[peer * room :][: piece.numel()].copy_(piece)

        def drain(lo: int, hi: int, stages: Views) -> None:
            into = out[lo : max(lo, min(hi, end - mine))]
            pieces = [stage[self._rank * room :][: into.numel()] for stage in stages]
            pieces[self._rank] = tensor[mine + lo :][: into.numel()]
            reducer(into, pieces)

        self.chunks(_longest(spans), dtype, fill, drain, pieces=self._size)

    def gather_staged(self, out: Tensor, tensor: Tensor, dtype: torch.dtype) -> None:
        """A stage has a piece of this rank's part, for all to take."""
        spans = [part(out.numel(), self._size, peer) for peer in range(self._size)]
        mine, _ = spans[self._rank]

        def fill(lo: int, hi: int, stage: Tensor) -> None:
            piece = tensor[lo:hi]
            staged = stage[: piece.numel()]
            staged.copy_(piece)
            # If the wire rounds, this rank keeps the rounded values that the others get.
            _copy(out[mine + lo :][: piece.numel()], piece if dtype == tensor.dtype else staged)

        def drain(lo: int, hi: int, stages: Views) -> None:
            for peer, ((start, stop), stage) in enumerate(zip(spans, stages, strict=True)):
                if peer != self._rank:
                    into = out[min(start + lo, stop) : min(start + hi, stop)]
                    into.copy_(stage[: into.numel()])

        self.chunks(_longest(spans), dtype, fill, drain)

    def exchange_staged(
        self,
        out: Tensor,
        tensor: Tensor,
        *,
        counts: Sequence[int],
        out_counts: Sequence[int],
        most: int,
    ) -> None:
        """A stage has a piece for each rank; the longest run of any rank sets how many chunks."""
        given, got = spans_of(counts), spans_of(out_counts)
        room = self.room(tensor.dtype, self._size)

        def fill(lo: int, hi: int, stage: Tensor) -> None:
            for peer, (start, stop) in enumerate(given):
                piece = tensor[min(start + lo, stop) : min(start + hi, stop)]
                stage[peer * room :][: piece.numel()].copy_(piece)

        def drain(lo: int, hi: int, stages: Views) -> None:
            for (start, stop), stage in zip(got, stages, strict=True):
                into = out[min(start + lo, stop) : min(start + hi, stop)]
                into.copy_(stage[self._rank * room :][: into.numel()])

        self.chunks(most, tensor.dtype, fill, drain, pieces=self._size)

    def pass_staged(
        self, taken: tuple[Tensor, int] | None, gift: Tensor | None, length: int
    ) -> None:
        """Give a row of bytes and take one from a rank, either of which may be nothing."""

        def fill(lo: int, hi: int, stage: Tensor) -> None:
            if gift is not None:
                stage[: hi - lo].copy_(gift[lo:hi])

        def drain(lo: int, hi: int, stages: Views) -> None:
            if taken is not None:
                into, source = taken
                into[lo:hi].copy_(stages[source][: hi - lo])

        self.chunks(length, torch.uint8, fill, drain)


def spans_of(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return where pieces of so many elements begin and end.

    >>> spans_of([2, 0, 3])
    [(0, 2), (2, 2), (2, 5)]
    """
    return list(pairwise(accumulate(counts, initial=0)))


def _longest(spans: Sequence[tuple[int, int]]) -> int:
    return max(stop - start for start, stop in spans)


def _tiles(start: int, stop: int, tensor: Tensor) -> Iterator[tuple[int, int]]:
    step = tile_bytes(tensor) // tensor.element_size()
    for lo in range(start, stop, step):
        yield lo, min(lo + step, stop)


def _copy(into: Tensor, tensor: Tensor) -> None:
    if into.data_ptr() != tensor.data_ptr():
        into.copy_(tensor)
