"""The memory of a step on one rank: where each value lies, and how to reach a piece of it.

A *block* names, for each dimension, some runs of the whole value, in its coordinates. A rank has
the block that its layouts give it; a chunk is a smaller one. A piece with a single run along each
dimension is a view; runs that lie apart are copied.
"""

from __future__ import annotations

from itertools import accumulate, pairwise, product
from typing import Any

import torch

from penstock.step.dtypes import torch_dtype
from penstock.step.program.layouts import S, part
from penstock.step.program.nodes import Program, Region
from penstock.step.program.types import Type

__all__ = ["Block", "RankMemory", "Run", "block_of", "both", "chunk_of", "shape_of"]

Run = tuple[int, int]
Block = tuple[tuple[Run, ...], ...]


def block_of(made: Type, program: Program, rank: int) -> Block:
    """Return the block that a rank has of a value."""
    return tuple((bound,) for bound in made.bounds(program.mesh, rank))


def chunk_of(region: Region, name: str, program: Program, rank: int, chunk: int) -> Block:
    """Return one chunk of the block that a rank has of a value."""
    made = program[name].type
    whole = block_of(made, program, rank)
    dim = region.dim(name)
    if dim is None:
        return whole
    ((first, last),) = whole[dim]
    is_mine = region.axis is not None and made.layout(region.axis) == S(dim)
    parts = 1 if is_mine or region.axis is None else program.mesh.size(region.axis)
    runs = []
    for index in range(parts):
        begin, end = part(last - first, parts, index)
        start, stop = part(end - begin, region.num_chunks, chunk)
        runs.append((first + begin + start, first + begin + stop))
    return (*whole[:dim], tuple(runs), *whole[dim + 1 :])


def both(one: Block, other: Block) -> Block:
    """Return the intersection of two blocks of one value."""
    out = []
    for mine, theirs in zip(one, other, strict=True):
        met = [(max(a, c), min(b, d)) for a, b in mine for c, d in theirs]
        runs = tuple(run for run in met if run[0] < run[1])
        out.append(runs or ((mine[0][0], mine[0][0]),))
    return tuple(out)


def shape_of(block: Block) -> tuple[int, ...]:
    """Return the shape of a piece."""
    return tuple(sum(stop - start for start, stop in runs) for runs in block)


class _Beside(dict[str, torch.Tensor]):
    """The tensors of another memory, except for one value."""

    def __init__(self, name: str, others: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._name, self._others = name, others

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name) if name == self._name else self._others.get(name, default)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) if name == self._name else name in self._others


class RankMemory:
    """What one rank has of each value."""

    def __init__(self, program: Program, rank: int, device: torch.device) -> None:
        self.program = program
        self.rank = rank
        self.device = device
        self._tensors: dict[str, torch.Tensor] = {}
        self._places: dict[str, str] = {}
        """Values that lie in the place of another one, and of which."""
        self._known_bounds: dict[str, tuple[Run, ...]] = {}

    def beside(self, name: str) -> RankMemory:
        """Return the same memory with another place for one value, for its next iteration."""
        other = RankMemory(self.program, self.rank, self.device)
        other._tensors = _Beside(name, self._tensors)
        other._places = {n: at for n, at in self._places.items() if n != name}
        return other

    def give(self, name: str, tensor: torch.Tensor) -> None:
        """Let a value be this tensor."""
        self._tensors[name] = tensor

    def share(self, name: str, with_: str) -> None:
        """Let a value lie in the place of another one; a slice, in its part of that place."""
        self._places[name] = with_

    def give_away(self, name: str) -> None:
        """Let the caller keep a value: the next one has new memory, unless it is an input's."""
        place = self._place_of(name)
        if self.program[place].op != "input":
            self._tensors.pop(place, None)

    def whole(self, name: str) -> torch.Tensor:
        """Return everything the rank has of a value."""
        place = self._place_of(name)
        found = self._tensors.get(place)
        if found is None:
            made = self.program[place].type
            shape = made.local_shape(self.program.mesh, self.rank)
            found = torch.empty(shape, dtype=torch_dtype(made.dtype), device=self.device)
            self._tensors[place] = found
        if place == name or (mine := self._bounds(name)) == (all_of := self._bounds(place)):
            return found
        for dim, ((start, stop), (first, _)) in enumerate(zip(mine, all_of, strict=True)):
            found = found.narrow(dim, start - first, stop - start)
        return found

    def are_one(self, one: str, other: str) -> bool:
        """Whether two values lie in the same place."""
        return self._place_of(one) == self._place_of(other)

    def piece(self, name: str, block: Block) -> torch.Tensor:
        """Return a piece of a value: a view of it where it is in one run, else a copy."""
        out = self.whole(name)
        for dim, (runs, (first, last)) in enumerate(zip(block, self._bounds(name), strict=True)):
            if runs == ((first, last),):
                continue
            views = [out.narrow(dim, start - first, stop - start) for start, stop in runs]
            out = views[0] if len(views) == 1 else torch.cat(views, dim)
        return out

    def parts(
        self, name: str, block: Block, dim: int, lengths: list[int]
    ) -> list[torch.Tensor] | None:
        """Return a piece cut along a dimension, as views; None if that takes copies.

        Either its runs are the parts, or it is one run.
        """
        runs = block[dim]
        if len(runs) == 1:
            ends = list(accumulate(lengths, initial=runs[0][0]))
            runs = tuple(pairwise(ends))
        if [stop - start for start, stop in runs] != lengths or runs[-1][1] != block[dim][-1][1]:
            return None
        cut = [(*block[:dim], (run,), *block[dim + 1 :]) for run in runs]
        return [self.piece(name, each) for each in cut] if self.is_view(cut[0]) else None

    def is_view(self, block: Block) -> bool:
        """Whether a piece is a view."""
        return all(len(runs) == 1 for runs in block)

    def put(self, name: str, block: Block, piece: torch.Tensor) -> None:
        """Write a piece of a value."""
        places = []
        for runs, (first, _) in zip(block, self._bounds(name), strict=True):
            ends = list(accumulate((stop - start for start, stop in runs), initial=0))
            places.append(
                [
                    (at, start - first, stop - start)
                    for at, (start, stop) in zip(ends, runs, strict=False)
                ]
            )
        target = self.whole(name)
        for each in product(*places):
            if not all(length for _, _, length in each):
                continue
            to, of = target, piece
            for dim, (at, start, length) in enumerate(each):
                to, of = to.narrow(dim, start, length), of.narrow(dim, at, length)
            to.copy_(of)

    def _bounds(self, name: str) -> tuple[Run, ...]:
        if (known := self._known_bounds.get(name)) is None:
            known = self.program[name].type.bounds(self.program.mesh, self.rank)
            self._known_bounds[name] = known
        return known

    def _place_of(self, name: str) -> str:
        while name in self._places:
            name = self._places[name]
        return name
