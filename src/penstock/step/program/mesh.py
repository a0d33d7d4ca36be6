"""The mesh: ranks in a grid whose axes have names.

Ranks are numbered row by row, the last axis fastest, as in torch's DeviceMesh. A group of an axis
is the ranks that differ in that axis only; they communicate with each other along it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from penstock.errors import ProgramError

__all__ = ["Mesh", "mesh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Named axes and their sizes."""

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        if len(set(self.names)) < len(self.axes):
            raise ProgramError(f"a mesh needs axes of different names, got {list(self.names)}")
        for name, size in self.axes:
            if not hasattr(size, "__index__"):
                raise ProgramError(f"axis {name!r} has {size!r} ranks; write mesh({name}=2)")
            if size < 1:
                raise ProgramError(f"axis {name!r} has {size} ranks; 1 or more make sense")

    def __str__(self) -> str:
        return " × ".join(f"{name}={size}" for name, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """The axes, slowest first."""
        return tuple(name for name, _ in self.axes)

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return math.prod(size for _, size in self.axes)

    def size(self, *axes: str) -> int:
        """Return how many ranks a group of some axes has."""
        sizes = dict(self.axes)
        for axis in axes:
            if axis not in sizes:
                raise ProgramError(
                    f"there is no axis {axis!r} in this mesh ({self}); name one of its axes"
                )
        return math.prod(sizes[axis] for axis in axes)

    def coordinate(self, rank: int, *axes: str) -> int:
        """Return where a rank stands along some axes together, the first one slowest.

        >>> mesh(dp=2, tp=3).coordinate(4, "tp")
        1
        """
        at = self._coordinates(rank)
        out = 0
        for axis in axes:
            out = out * self.size(axis) + at[self.names.index(axis)]
        return out

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from one in these axes only, itself among them.

        >>> mesh(dp=2, tp=3).group(4, "dp")
        (1, 4)
        """
        at = dict(zip(self.names, self._coordinates(rank), strict=True))
        grid = product(*(range(self.size(axis)) for axis in axes))
        return tuple(
            self._rank(at | dict(zip(axes, coordinates, strict=True))) for coordinates in grid
        )

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups of some axes, each once, in the order of their first ranks."""
        return tuple(dict.fromkeys(self.group(rank, *axes) for rank in range(self.num_ranks)))

    def _coordinates(self, rank: int) -> tuple[int, ...]:
        assert 0 <= rank < self.num_ranks, f"{rank=} {self.num_ranks=}"
        out = []
        for _, size in reversed(self.axes):
            rank, at = divmod(rank, size)
            out.append(at)
        return tuple(reversed(out))

    def _rank(self, at: dict[str, int]) -> int:
        rank = 0
        for name, size in self.axes:
            rank = rank * size + at[name]
        return rank


def mesh(**sizes: int) -> Mesh:
    """Return a mesh of named axes, slowest first: `mesh(dp=2, tp=4)`."""
    return Mesh(axes=tuple(sizes.items()))
