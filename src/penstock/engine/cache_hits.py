"""Hits of a cache whose units come and go, and the most hits that were possible.

Both shares are of the same uses: those of the latest batches. Sizes are those that units take up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.dataset.part import Ints
from penstock.flow.bound import belady_bytes

_NUM_PARTS = 8
_PART_USES = 1 << 15
"""Uses in a part; the latest parts are compared, which takes a microsecond or two for each use."""
_GROWN = 1.1
"""The comparison is made again when the number of uses has grown by this factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheHits:
    """Hits by bytes in the latest batches."""

    used_bytes: int
    """Bytes that batches of this rank have used."""
    hit_bytes: int
    """Bytes that lay in a tier, or were on their way there for an earlier batch."""
    most_share: float
    """Share of hits of a cache that knows the whole order beforehand."""
    num_evicted: int

    @property
    def share(self) -> float:
        """Share of bytes that were hits."""
        return self.hit_bytes / max(1, self.used_bytes)

    def __str__(self) -> str:
        return (
            f"{self.share:.1%} of the bytes were cache hits; the most that a cache of this size "
            f"could have had (byte-MIN) is {self.most_share:.1%}"
        )


@dataclass(slots=True)
class _UsePart:
    held: Ints
    """Units that lay there when it began."""
    string: list[Ints] = field(default_factory=list)
    """Units that the node has used, in order."""
    num_uses: int = 0
    used_bytes: int = 0
    hit_bytes: int = 0


class HitCounter:
    """Counts hits, and remembers the string of the latest uses."""

    def __init__(self) -> None:
        self.num_evicted = 0
        self._parts: deque[_UsePart] = deque(maxlen=_NUM_PARTS)
        self._num_uses = 0
        self._most = (0, 0.0)
        """The latest best possible share, and the number of uses that it was computed for."""

    def begin_step(self, string: Ints, held: Callable[[], Ints]) -> None:
        """Record the units that the node uses in a step; `held` returns the units in its tiers."""
        if not self._parts or self._parts[-1].num_uses >= _PART_USES:
            self._parts.append(_UsePart(held()))
        self._parts[-1].string.append(string)
        self._parts[-1].num_uses += len(string)
        self._num_uses += len(string)

    def count(self, sizes: Ints, is_hit: npt.NDArray[np.bool_]) -> None:
        """Record the uses of this rank in the step."""
        self._parts[-1].used_bytes += int(sizes.sum())
        self._parts[-1].hit_bytes += int(sizes[is_hit].sum())

    def hits(self, sizes: Ints, capacity_bytes: int) -> CacheHits:
        """Return the latest hits, for units of some sizes."""
        parts = list(self._parts)
        if self._num_uses > _GROWN * self._most[0]:
            self._most = self._num_uses, _most_share(parts, sizes, capacity_bytes)
        return CacheHits(
            used_bytes=sum(part.used_bytes for part in parts),
            hit_bytes=sum(part.hit_bytes for part in parts),
            most_share=self._most[1],
            num_evicted=self.num_evicted,
        )


def _most_share(parts: list[_UsePart], sizes: Ints, capacity_bytes: int) -> float:
    string = np.concatenate([units for part in parts for units in part.string])
    # Units that lay there at the beginning are uses in front of the string, not counted as reads.
    held = parts[0].held
    read_bytes = belady_bytes(np.concatenate([held, string]), sizes, capacity_bytes)
    read_bytes -= int(sizes[held].sum())
    return 1 - read_bytes / max(1, int(sizes[string].sum()))
