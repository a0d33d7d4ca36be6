"""How well a cache does whose units come and go, against the most that was possible."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.dataset.part import Ints
from penstock.plan.bound import belady_bytes
from penstock.plan.placement import paged

_STRING_MAX = 1 << 18
"""Uses that are remembered: the comparison takes a microsecond or two for each."""
_GROWN = 1.1
"""The comparison is made again when so many times as many uses are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheHits:
    """Hits by bytes."""

    used_bytes: int
    """Bytes that batches of this rank have used."""
    hit_bytes: int
    """Those that lay in a tier, or were on their way there for an earlier batch."""
    most_share: float
    """Share of hits that a cache could have had that knows the whole order beforehand."""
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


class HitCounter:
    """Counts hits, and remembers the string of uses as long as it is short."""

    def __init__(self) -> None:
        self._used_bytes = self._hit_bytes = self.num_evicted = 0
        self._parts: list[Ints] = []
        self._num_remembered = 0
        self._most = (0, 0.0)
        """The most that was possible, and for how many uses."""

    @property
    def is_full(self) -> bool:
        """Whether no more is counted, so that both shares are of the same uses."""
        return self._num_remembered >= _STRING_MAX

    def remember(self, used: Ints) -> None:
        """Take note of the units that the node uses next."""
        if not self.is_full:
            self._parts.append(used)
            self._num_remembered += len(used)

    def count(self, lengths: Ints, is_hit: npt.NDArray[np.bool_]) -> None:
        """Take note of what a batch uses."""
        if not self.is_full:
            self._used_bytes += int(lengths.sum())
            self._hit_bytes += int(lengths[is_hit].sum())

    def hits(self, lengths: Ints, capacity_bytes: int) -> CacheHits:
        """Return the hits so far, for units of some lengths."""
        if self._num_remembered > _GROWN * self._most[0]:
            self._most = self._num_remembered, self._most_share(lengths, capacity_bytes)
        return CacheHits(
            used_bytes=self._used_bytes,
            hit_bytes=self._hit_bytes,
            most_share=self._most[1],
            num_evicted=self.num_evicted,
        )

    def _most_share(self, lengths: Ints, capacity_bytes: int) -> float:
        string, sizes = np.concatenate(self._parts), paged(lengths)
        return 1 - belady_bytes(string, sizes, capacity_bytes) / max(1, int(sizes[string].sum()))
