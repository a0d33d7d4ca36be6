"""Carrying out a kernel tile by tile, with the text of `tiles`."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.step.dtypes import torch_dtype
from penstock.step.kernels.body import KernelBody
from penstock.step.kernels.call import KernelCall, several
from penstock.step.kernels.draws import ElementSpan, dropped_into
from penstock.step.kernels.eager import root
from penstock.step.kernels.names import code_of
from penstock.step.kernels.staged import StagedKernel
from penstock.step.kernels.stages import Stage
from penstock.step.kernels.tiles import TileText, one_values, tile_text
from penstock.step.program.nodes import Node

__all__ = ["TILE_ELEMENTS", "Tiled"]

TILE_ELEMENTS = 32 * 1024
"""Elements of a tile for each thread of torch: several tiles fit in a core's own cache."""

_REDUCED: dict[str, Callable[..., Tensor]] = {
    "sum": lambda x: x.sum(dtype=torch.float64),
    "max": torch.amax,
    "min": torch.amin,
}


class Tiled(StagedKernel):
    """A flat or row-wise body, carried out in pieces of a few thousand elements."""

    def __init__(self, body: KernelBody) -> None:
        super().__init__(body)
        self._texts: dict[tuple[int, tuple[tuple[str, str], ...]], _Tile] = {}
        # By thread: lanes may run kernels at the same time as the caller.
        self._scratch = threading.local()

    def _prepare(self, stage: Stage, call: KernelCall) -> None:
        """Nothing: tiles are calls of torch."""

    def _run(
        self, stage: Stage, call: KernelCall, values: dict[str, Any], ones: dict[str, Tensor]
    ) -> None:
        body = self._body
        tile = self._tile(stage, call.aliases)
        cut = _Cut(body, call)
        kept = {f"kept {v}": cut.room(body, v) for v in stage.kept}
        totals = [torch.empty(cut.num_tiles, dtype=_dtype(body, n)) for n in stage.totals]
        loads = [cut.cut(values[n], body.reach[body.value_of(n)]) for n in stage.loads]
        rooms = dict(call.outs) | kept
        outs = [cut.cut(rooms[n], body.reach[v]) for n, v in stage.writes]
        outs += [one.unbind() for one in totals]
        host = [call.numbers[name] for name in body.numbers]
        wrapped = [_wrapped(call.numbers[name], body) for name in tile.text.wrapped]
        given = [ones[name] for name in one_values(body, stage)]
        scratch = self._scratch_of(tile, cut)
        for index in range(cut.num_tiles):
            if index == cut.num_tiles - 1:
                scratch = cut.last(scratch, tile.text.scratch)
            tile.run(
                [load[index] for load in loads],
                [out[index] for out in outs],
                scratch,
                host,
                wrapped,
                given,
                cut.numbers(index),
            )
        values |= {name.removeprefix("kept "): room for name, room in kept.items()}
        for node, parts in zip(stage.totals, totals, strict=True):
            ones[node.name] = _REDUCED[node.op](parts).to(parts.dtype)

    def _tile(self, stage: Stage, aliases: dict[str, str]) -> _Tile:
        key = stage.index, tuple(sorted(aliases.items()))
        found = self._texts.get(key)
        if found is None:
            found = self._texts[key] = _Tile(tile_text(self._body, stage, aliases), self._body)
        return found

    def _scratch_of(self, tile: _Tile, cut: _Cut) -> list[Tensor]:
        known: dict[Any, list[Tensor]] = self._scratch.__dict__
        key = f"{id(tile)} {cut.tile_shape}"
        found = known.get(key)
        if found is None:
            shapes = {"full": cut.tile_shape, "row": (cut.tile_shape[0], 1)}
            shapes["col"] = cut.tile_shape[-1:]
            found = known[key] = [
                torch.empty(shapes[reach], dtype=torch_dtype(dtype))
                for reach, dtype in tile.text.scratch
            ]
        return found


class _Tile:
    """The function of a stage."""

    def __init__(self, text: TileText, body: KernelBody) -> None:
        self.text = text
        given = {"torch": torch, "together": _together, "dropped": dropped_into, "root": root}
        self.run: Callable[..., None] = code_of(text.text, f"{body.name} tile", **given)["tile"]


class _Cut:
    """How a block is cut: into runs of elements, or of rows."""

    def __init__(self, body: KernelBody, call: KernelCall) -> None:
        self._call = call
        self._is_rows = body.kind == "rows"
        self._row = call.place.row_length if self._is_rows else 1
        self._length = math.prod(call.place.block) // max(1, self._row)
        tile = TILE_ELEMENTS * torch.get_num_threads()
        self._step = min(max(1, tile // max(1, self._row)), max(1, self._length))
        self.num_tiles = -(-self._length // self._step)
        self.tile_shape = (self._step, self._row) if self._is_rows else (self._step,)

    def cut(self, given: Any, reach: str) -> Sequence[Any]:
        """Return a tensor's tiles."""
        if not isinstance(given, Tensor):
            each = [self.cut(one, reach) for one in given]
            return [list(tiles) for tiles in zip(*each, strict=True)]
        if reach in ("col", "one"):
            return [given.view(-1) if reach == "col" else given] * self.num_tiles
        shape = (-1,) if not self._is_rows else (self._length, self._row if reach == "full" else 1)
        tiles: Sequence[Any] = given.view(shape).split(self._step)  # type: ignore[no-untyped-call]
        return tiles

    def room(self, body: KernelBody, value: str) -> Tensor:
        """Return memory for a value that is kept for a later stage."""
        return torch.empty(self._call.place.block, dtype=torch_dtype(body.dtype(value)))

    def last(self, scratch: list[Tensor], kinds: Sequence[tuple[str, str]]) -> list[Tensor]:
        """Return scratch tensors as short as the last tile."""
        length = self._length - (self.num_tiles - 1) * self._step
        return [
            one if reach == "col" else one[:length]
            for one, (reach, _) in zip(scratch, kinds, strict=True)
        ]

    def numbers(self, index: int) -> ElementSpan:
        """Return which elements of the block a tile has."""
        begin = index * self._step * self._row
        end = min(begin + self._step * self._row, self._length * self._row)
        return ElementSpan(self._call.place, begin, end, self._call.device)


def _dtype(body: KernelBody, node: Node) -> torch.dtype:
    return torch_dtype(body.dtype(node.name))


def _wrapped(number: float, body: KernelBody) -> Tensor:
    wide = torch.float64 if body.is_wide else torch.float32
    return torch.scalar_tensor(number, dtype=wide if isinstance(number, float) else torch.int64)


def _together(out: Tensor, addends: Sequence[Tensor] | Tensor, op: str) -> None:
    """Write the reduction over ranks, in their order."""
    tensors = several(addends)
    out.copy_(tensors[0])
    for one in tensors[1:]:
        if op == "max":
            torch.maximum(out, one.to(out.dtype), out=out)
        elif op == "min":
            torch.minimum(out, one.to(out.dtype), out=out)
        else:
            out.add_(one)
    if op == "mean" and len(tensors) > 1:
        out.div_(len(tensors))
