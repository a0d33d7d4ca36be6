"""Sums (means, maxima, minima) of the same piece of several ranks, in cache-sized tiles.

The order is always that of the ranks, so every rank that adds gets the same bits. Types of 16 bits
are added in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TILE_BYTES", "Reducer", "tile_bytes"]

TILE_BYTES = 256 * 1024
"""A tile of sums stays in the second-level cache, beside what is read for it."""
DEVICE_TILE_BYTES = 64 * 1024 * 1024
"""On a device tiles only bound the scratch memory."""

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
_NARROW = (torch.bfloat16, torch.float16)


def tile_bytes(tensor: Tensor) -> int:
    """Return the size of a tile on the device of a tensor."""
    return TILE_BYTES if tensor.device.type == "cpu" else DEVICE_TILE_BYTES


class Reducer:
    """Reduces pieces of ranks into one of them or into another tensor.

    Args:
        op: sum, mean, max or min.
        dtype: of the result.
    """

    def __init__(self, op: str, dtype: torch.dtype) -> None:
        self.op, self.dtype = op, dtype
        self.sum_dtype = torch.float32 if dtype in _NARROW else dtype
        self._combine = _COMBINE[op]
        self._scratch = torch.empty(0, dtype=self.sum_dtype)

    def __call__(self, out: Tensor, pieces: Sequence[Tensor]) -> None:
        """Write the reduction of pieces, given in the order of ranks; `out` may be one of them."""
        length = out.numel()
        tile = max(1, tile_bytes(out) // self.sum_dtype.itemsize)
        for start in range(0, length, tile):
            stop = min(start + tile, length)
            self._tile(out[start:stop], [piece[start:stop] for piece in pieces])

    def _tile(self, out: Tensor, pieces: Sequence[Tensor]) -> None:
        # With two, `out` may be either of them: each element is read before it is written.
        in_place = len(pieces) <= 2 and all(p.dtype == out.dtype == self.sum_dtype for p in pieces)
        total = out if in_place else self._scratch_of(out)
        self.into(total, pieces)
        if total is not out:
            out.copy_(total)

    def into(self, total: Tensor, pieces: Sequence[Tensor]) -> None:
        """Reduce one tile into a tensor that is none of the pieces, or one of the first two."""
        if len(pieces) == 1:
            total.copy_(pieces[0])
        elif pieces[0].dtype == pieces[1].dtype == total.dtype:
            self._combine(pieces[0], pieces[1], out=total)
        else:
            total.copy_(pieces[0])
            self._combine(total, pieces[1].to(total.dtype), out=total)
        for piece in pieces[2:]:
            wide = piece if piece.dtype == total.dtype else piece.to(total.dtype)
            self._combine(total, wide, out=total)
        if self.op == "mean" and len(pieces) > 1:
            total.div_(len(pieces))

    def _scratch_of(self, out: Tensor) -> Tensor:
        if self._scratch.numel() < out.numel():
            self._scratch = torch.empty(out.numel(), dtype=self.sum_dtype, device=out.device)
        return self._scratch[: out.numel()]
