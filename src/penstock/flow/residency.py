"""Which units a cache holds, decided by when each is used next.

For orders that are known some windows ahead. Belady's rule evicts what is used furthest in the
future. Here the future is known to the end of the next window. Beyond it there is only an
expectation: a unit that is drawn with probability p comes back after 1/p draws on average. So a
unit's *key* is its next use if that is known, else the end of what is known plus 1/p.

    a unit that is not cached is admitted if there is room, or if enough cached units have larger
    keys; those are evicted. Else it is used and not kept.

SHADE's rule, which evicts the least important sample, is the second half of this one. The decisions
of a window are a value: the same string of uses gives the same decisions on every rank.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.dataset.part import Ints

Flags: TypeAlias = npt.NDArray[np.bool_]
Gaps: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowResidency:
    """What happens to a cache in one window, access by access."""

    is_hit: Flags
    is_admitted: Flags
    """Accesses that miss, and after which the unit is kept."""
    evicted: Ints
    """Units in the order in which they are evicted; one may be admitted and evicted again."""
    evicted_at: Ints
    """The access that each makes room for."""


class Residency:
    """The units that a cache of some bytes holds, window after window."""

    def __init__(self, lengths: Ints, capacity_bytes: int) -> None:
        self._lengths = lengths
        self.capacity_bytes = capacity_bytes
        self.held_bytes = 0
        self._keys: dict[int, float] = {}
        """By unit that is held: when it is used next."""

    @property
    def held(self) -> Ints:
        """The units that are held."""
        return np.fromiter(self._keys, np.int64, len(self._keys))

    def hold(self, units: Ints) -> Flags:
        """Take note of units that are there already; return for which of them there is room."""
        is_new = np.array([unit not in self._keys for unit in units.tolist()], bool)
        ends = self.held_bytes + np.cumsum(self._lengths[units] * is_new)
        fits: Flags = is_new & (ends <= self.capacity_bytes)
        self._keys.update(dict.fromkeys(units[fits].tolist(), 0.0))
        self.held_bytes += int(self._lengths[units[fits]].sum())
        return fits

    def forget(self, unit: int) -> None:
        """Take note that a unit could not be kept."""
        if self._keys.pop(unit, None) is not None:
            self.held_bytes -= int(self._lengths[unit])

    def window(self, used: Ints, used_next: Ints, gaps: Gaps) -> WindowResidency:
        """Go through a window.

        `used` are its units in the order of use, `used_next` those of the next window. `gaps` is by
        unit how many uses are expected until it comes again, behind these two.
        """
        string = np.concatenate([used, used_next])
        keys = _next_uses(string, gaps)
        furthest = self._furthest(string, gaps)
        is_hit, is_admitted = np.zeros(len(used), bool), np.zeros(len(used), bool)
        evicted: list[int] = []
        evicted_at: list[int] = []
        lengths = self._lengths[used].tolist()
        for i, (unit, key) in enumerate(zip(used.tolist(), keys.tolist(), strict=False)):
            if unit in self._keys:
                is_hit[i] = True
            else:
                victims = self._victims(furthest, lengths[i], key)
                if victims is None:
                    continue
                is_admitted[i] = True
                for victim in victims:
                    del self._keys[victim]
                    self.held_bytes -= int(self._lengths[victim])
                evicted += victims
                evicted_at += [i] * len(victims)
                self.held_bytes += lengths[i]
            self._keys[unit] = key
            heapq.heappush(furthest, (-key, unit))
        return WindowResidency(
            is_hit=is_hit,
            is_admitted=is_admitted,
            evicted=np.array(evicted, np.int64),
            evicted_at=np.array(evicted_at, np.int64),
        )

    def _furthest(self, string: Ints, gaps: Gaps) -> list[tuple[float, int]]:
        """Return a heap of what is held, furthest use first; the keys are those of this window."""
        held = self.held
        units, first = np.unique(string, return_index=True)
        at = np.searchsorted(units, held)
        at[at == len(units)] = 0
        is_used = units[at] == held if len(units) else np.zeros(len(held), bool)
        keys = np.where(is_used, first[at] if len(units) else 0, len(string) + gaps[held])
        self._keys = dict(zip(held.tolist(), keys.tolist(), strict=True))
        heap = [(-key, unit) for unit, key in self._keys.items()]
        heapq.heapify(heap)
        return heap

    def _victims(
        self, furthest: list[tuple[float, int]], length: int, key: float
    ) -> list[int] | None:
        """Return what has to go so that a unit fits; None if it is not worth that."""
        room, victims, taken = self.capacity_bytes - self.held_bytes, [], []
        while room < length and furthest:
            entry = heapq.heappop(furthest)
            if self._keys.get(entry[1]) != -entry[0]:
                continue  # It was used or evicted since.
            taken.append(entry)
            if -entry[0] <= key:
                break
            victims.append(entry[1])
            room += int(self._lengths[entry[1]])
        if room >= length:
            return victims
        for entry in taken:
            heapq.heappush(furthest, entry)
        return None


def _next_uses(string: Ints, gaps: Gaps) -> Gaps:
    """Return for each use when its unit is used next: known, or expected behind the end."""
    by_unit = np.argsort(string, kind="stable")
    keys = len(string) + gaps[string]
    is_same = string[by_unit[1:]] == string[by_unit[:-1]]
    keys[by_unit[:-1][is_same]] = by_unit[1:][is_same]
    return keys
