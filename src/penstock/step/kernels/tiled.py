"""Carrying out a kernel tile by tile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.step.dtypes import torch_dtype
from penstock.step.kernels.body import KernelBody
from penstock.step.kernels.call import KernelCall
from penstock.step.kernels.draws import ElementSpan, dropped_into
from penstock.step.kernels.eager import expression_function, root
from penstock.step.kernels.names import code_of
from penstock.step.kernels.stages import Stage, stages_of
from penstock.step.kernels.tiles import TileText, one_values, tile_text
from penstock.step.program.nodes import Node

__all__ = ["TILE_ELEMENTS", "Tiled"]

TILE_ELEMENTS = 32 * 1024
"""Of a tile, for each thread of torch: a handful of them fit in a core's own cache."""

_REDUCED: dict[str, Callable[..., Tensor]] = {
    "sum": lambda x: x.sum(dtype=torch.float64),
    "max": torch.amax,
    "min": torch.amin,
}


class Tiled:
    """A flat or row-wise body, carried out in pieces of a few thousand elements."""

    def __init__(self, body: KernelBody) -> None:
        self._body = body
        self._stages = stages_of(body)
        self._host = body.numbers
        self._texts: dict[tuple[int, tuple[tuple[str, str], ...]], _Tile] = {}
        self._ones = ones_of(body, self._stages)
        self._scratch = threading.local()

    def __call__(self, call: KernelCall) -> None:
        """Write what leaves into its tensors."""
        values: dict[str, Any] = dict(call.inputs)
        ones: dict[str, Tensor] = {}
        for stage in self._stages:
            for node in stage.ones:
                ones[node.name] = self._one(node, call, values | ones)
            self._run(stage, call, values, ones)
            for name, value in stage.stores:
                out = call.outs[name]
                if self._body.reach[value] == "one":
                    assert isinstance(out, Tensor)
                    out.copy_(ones[value] if value in ones else values[value])
                values[name] = out

    def _one(self, node: Node, call: KernelCall, known: dict[str, Any]) -> Tensor:
        host = self._body.host_names
        args = [call.numbers[n] if n in host else known[n] for n in node.inputs]
        return self._ones[node.name](*args).to(_dtype(self._body, node))

    def _run(
        self, stage: Stage, call: KernelCall, values: dict[str, Any], ones: dict[str, Tensor]
    ) -> None:
        body = self._body
        tensors = [n for n, v in stage.stores if body.reach[v] != "one"]
        if not tensors and not stage.totals and not stage.kept:
            return
        tile = self._tile(stage, call.aliases)
        cut = _Cut(body, call)
        kept = {v: cut.room(body, v) for v in stage.kept}
        totals = [torch.empty(cut.num_tiles, dtype=_dtype(body, n)) for n in stage.totals]
        loads = [cut.cut(values[n], _reach(body, n)) for n in stage.loads]
        reaches = dict(body.stores)
        outs = [cut.cut(call.outs[n], body.reach[reaches[n]]) for n in tensors]
        outs += [cut.cut(one, body.reach[v]) for v, one in kept.items()]
        outs += [one.unbind() for one in totals]
        host = [call.numbers[name] for name in self._host]
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
        values |= kept
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
        total = 1
        for length in call.place.block:
            total *= length
        self._length = total // max(1, self._row)
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
        """Return room for a value that is handed over to a later stage."""
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


def _reach(body: KernelBody, load: str) -> str:
    return body.reach[load] if load in body.reach else body.reach[dict(body.stores)[load]]


def _dtype(body: KernelBody, node: Node) -> torch.dtype:
    return torch_dtype(body.dtype(node.name))


def _wrapped(number: float, body: KernelBody) -> Tensor:
    wide = torch.float64 if body.is_wide else torch.float32
    return torch.scalar_tensor(number, dtype=wide if isinstance(number, float) else torch.int64)


def _together(out: Tensor, addends: Sequence[Tensor] | Tensor, op: str) -> None:
    """Write the reduction of what ranks have, in their order."""
    several = [addends] if isinstance(addends, Tensor) else addends
    out.copy_(several[0])
    for one in several[1:]:
        if op == "max":
            torch.maximum(out, one.to(out.dtype), out=out)
        elif op == "min":
            torch.minimum(out, one.to(out.dtype), out=out)
        else:
            out.add_(one)
    if op == "mean" and len(several) > 1:
        out.div_(len(several))


def ones_of(body: KernelBody, stages: Sequence[Stage]) -> dict[str, Callable[..., Tensor]]:
    """Return the operations on single values as functions."""
    return {n.name: expression_function(n, body) for stage in stages for n in stage.ones}
