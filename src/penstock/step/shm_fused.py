"""The fused pass: gradients of all ranks in, new weights of all ranks out, in one go over memory.

    arena      one for the ranks of the host
    grads      of each rank, in the arena: read by all
    weights    one copy for all ranks, or one of each rank: written by all
    state      of my part only, anywhere: 1/W of it

A rank takes its part of the elements in tiles. Of each it adds all ranks' gradients into a scratch
tile, gives that to the region (Adam, say) with the weights and the state of the tile, and copies
the new weights into the other ranks' replicas, if there are such. What is between the gradients and
the weights never leaves the second cache: all_reduce, optimizer and gather together cost one look
at each gradient and at the state, and ranks meet twice, before it and after it.

    grad, weight = arena.take(n), arena.take(n)
    start, stop = part(n, comm.size, comm.rank)
    update = FusedPass(
        comm, FusedAdam(lr=1e-3), grads=comm.everyones(grad), weights=comm.everyones(weight)[:1],
        state=[torch.zeros(stop - start) for _ in range(2)], op="mean",
    )
    ...                      # backward writes grad
    update()                 # now all ranks see the new weights

Pages of the shared copy lie near the cores of the ranks that first wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from penstock.errors import OptionError
from penstock.program.layouts import part
from penstock.step.shm import ShmComm
from penstock.step.shm_lane import Task
from penstock.step.shm_reduce import Reducer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TILE_ELEMENTS", "FusedPass", "Region", "fused_pass"]

TILE_ELEMENTS = 128 * 1024
"""512 KB of sums, half of a common second cache; much less and calls cost more than memory."""

Region = Callable[..., None]
"""`region(grad, weight, *state)`: changes the weight and the state of a tile in place.

The gradient is reduced, in float32 where it was narrower, and must be left as it is. If the region
has a method `begin`, it is called before each pass (Adam counts its steps there). With
`sums=True` the gradients of all ranks are given instead of the reduced one, as a tuple: a compiled
region adds them in registers.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """The views of one tile."""

    grads: tuple[Tensor, ...]
    """Of all ranks."""
    grad: Tensor
    """Where the reduced one goes."""
    mine: tuple[Tensor, ...]
    """The weight and the state that this rank changes."""
    replicas: tuple[Tensor, ...]
    """Of the weight, of other ranks."""


class FusedPass:
    """One step's reduction, update and gather of a flat run of elements. All ranks make it alike.

    Args:
        comm: of the ranks that take part.
        region: what to do with a tile.
        grads: the gradients of each rank, by rank, as this rank sees them.
        weights: one tensor that all ranks share, or one of each rank, by rank.
        state: tensors of the part of this rank, `part(n, W, rank)` elements each.
        op: how gradients are reduced, sum or mean.
        tile_elements: of a tile.
        sums: whether the region reduces the gradients itself.
    """

    def __init__(
        self,
        comm: ShmComm,
        region: Region,
        *,
        grads: Sequence[Tensor],
        weights: Sequence[Tensor],
        state: Sequence[Tensor] = (),
        op: str = "sum",
        tile_elements: int = TILE_ELEMENTS,
        sums: bool = False,
    ) -> None:
        self.comm, self.region, self.op = comm, region, op
        self._begin: Callable[[], None] | None = getattr(region, "begin", None)
        self.length = grads[0].numel()
        self.start_element, self.stop_element = part(self.length, comm.size, comm.rank)
        self._check(grads, weights, state)
        self._text = f"fused pass {op} of {self.length} {grads[0].dtype}, {len(weights)} weights"
        self._reducer = Reducer(op, grads[0].dtype)
        self._sums, self._reduces = sums, not sums and comm.size > 1
        tile_elements = max(1, min(tile_elements, self.stop_element - self.start_element))
        self._scratch = torch.empty(tile_elements, dtype=self._reducer.sum_dtype)
        self._tiles = self._cut(grads, weights, state, tile_elements)

    def __call__(self) -> None:
        """Run the pass, after all that was called on the communicator; return when all are done.

        Raises:
            PeerError: a rank is gone, has given up, or does not come.
        """
        self.start().wait()

    def start(self) -> Task:
        """Run the pass in the communicator's lane; return its handle."""
        return self.comm.start(self._work)

    def _work(self) -> None:
        self.comm.meet(self._text)
        if self._begin is not None:
            self._begin()
        region, reduce, reduces, sums = self.region, self._reducer.into, self._reduces, self._sums
        for tile in self._tiles:
            if reduces:
                reduce(tile.grad, tile.grads)
            region(tile.grads if sums else tile.grad, *tile.mine)
            for replica in tile.replicas:
                replica.copy_(tile.mine[0])
        self.comm.flags.sync()

    def _cut(
        self,
        grads: Sequence[Tensor],
        weights: Sequence[Tensor],
        state: Sequence[Tensor],
        tile_elements: int,
    ) -> list[_Tile]:
        """Return the views of all tiles: made once, since making them costs as much as adding."""
        start, stop = self.start_element, self.stop_element
        mine = self.comm.rank if len(weights) > 1 else 0
        others = [weight for index, weight in enumerate(weights) if index != mine]
        tiles = []
        for lo in range(start, stop, tile_elements):
            hi = min(lo + tile_elements, stop)
            parts = tuple(grad[lo:hi] for grad in grads)
            tile = _Tile(
                grads=parts,
                # With one rank there is nothing to reduce: the region has the gradient itself.
                grad=parts[0] if self.comm.size == 1 else self._scratch[: hi - lo],
                mine=(weights[mine][lo:hi], *(each[lo - start : hi - start] for each in state)),
                replicas=tuple(weight[lo:hi] for weight in others),
            )
            tiles.append(tile)
        return tiles

    def _check(
        self, grads: Sequence[Tensor], weights: Sequence[Tensor], state: Sequence[Tensor]
    ) -> None:
        size, count = self.comm.size, self.stop_element - self.start_element
        if self.op not in ("sum", "mean"):
            raise OptionError(f"gradients are reduced by sum or mean, not by {self.op!r}")
        if len(grads) != size or len(weights) not in (1, size):
            raise OptionError(
                f"{len(grads)} gradients and {len(weights)} weights for {size} ranks; give one "
                f"gradient of each rank, and one weight of each or one for all"
            )
        for name, length, tensors in (
            ("gradients", self.length, grads),
            ("weights", self.length, weights),
            ("state", count, state),
        ):
            for tensor in tensors:
                if tensor.numel() != length or not tensor.is_contiguous():
                    raise OptionError(
                        f"{name} of rank {self.comm.rank} must be contiguous and have {length} "
                        f"elements, got {tensor.numel()} with strides {tensor.stride()}"
                    )


def fused_pass(
    region: Region,
    comm: ShmComm,
    *,
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    state: Sequence[Tensor] = (),
    op: str = "sum",
) -> None:
    """Run one fused pass; for many, make a `FusedPass` once and call it."""
    FusedPass(comm, region, grads=grads, weights=weights, state=state, op=op)()
