"""Filling tiers ahead of the batches: in which order, and how far it has come.

A batch that is being made takes memory; a unit in its tier takes none. So the tiers are filled in
the order of first use, as far ahead as the store allows, until every sample was seen once. A rank
goes over the batches

* from the start of the run, for what is its own to fetch;
* again from the batches that are planned by now, whenever homes have moved to this node;
* once more from the start, if it is the first rank of a node with several, for what the other ranks
  of its node should have fetched and have not.

The *progress mark* of a node is a number that changes while the node makes progress. Nodes that
wait for it compare the number with the last one they saw, and know nothing else of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from penstock.flow.planning import FILL_SAMPLES

_DONE_BITS = 20
"""The low bits of a progress mark count finished fetches, and seconds while fetches are under way,
so that it changes inside of a step, too."""

Place = TypeVar("Place")
Item = TypeVar("Item")


class FillCourse(Generic[Place, Item]):
    """The batches that are looked through for what is to be filled, one after the other."""

    def __init__(
        self,
        batches_from: Callable[[Place], Iterator[Item]],
        start: Place,
        *,
        version: int = 0,
        samples_at_once: int = FILL_SAMPLES,
    ) -> None:
        """`batches_from` returns the batches from a place in the order on; each sample once.

        `version` is that of the homes.
        """
        self._samples_at_once = samples_at_once
        self._batches_from = batches_from
        self._start = start
        self._batches = batches_from(start)
        self._number = 0
        self._version = version
        self._is_over = False
        self.is_for_others = False
        """Whether it looks for what other ranks of this node have left undone."""

    def is_over(self, version: int) -> bool:
        """Return whether everything was seen, with the homes of a version."""
        return self._is_over and self._version == version

    def has_moved(self, version: int, place: Place | None, number: int) -> bool:
        """Begin again if homes have moved since; return whether that is so.

        `place` is where the batches that are planned by now end: those have their own reads. It
        has a number as a batch. Without a place it begins from the start.
        """
        if version == self._version:
            return False
        self._version = version
        self._begin(place, number, for_others=False)
        return True

    def next(
        self, num_samples: Callable[[Item], int], *, for_others: bool
    ) -> list[tuple[int, Item]]:
        """Return the next batches with their numbers, enough for a look to pay; none at the end.

        `for_others` says that this rank also sees to what other ranks of its node leave undone.
        """
        found = self._some(num_samples)
        if not found and for_others and not self.is_for_others:
            # From the start: our own batches are planned far ahead of what others still wait for.
            self._begin(None, 0, for_others=True)
            found = self._some(num_samples)
        self._is_over = not found
        return found

    def _begin(self, place: Place | None, number: int, *, for_others: bool) -> None:
        self._batches = self._batches_from(self._start if place is None else place)
        self._number = 0 if place is None else number
        self._is_over = False
        self.is_for_others = for_others

    def _some(self, num_samples: Callable[[Item], int]) -> list[tuple[int, Item]]:
        found: list[tuple[int, Item]] = []
        seen = 0
        while seen < self._samples_at_once:
            item = next(self._batches, None)
            if item is None:
                break
            found.append((self._number, item))
            self._number += 1
            seen += max(1, num_samples(item))
        return found


class FillProgress:
    """How far a node has filled what is at home there."""

    def __init__(self) -> None:
        self._begun: list[tuple[tuple[int, int], set[Hashable]]] = []
        """Fetches under way, by the place in the order that is reached once they are done."""
        self._reached = (0, 0)
        self._has_ended = False
        self._num_done = 0

    def began(self, fetches: Iterable[Hashable], epoch: int, position: int) -> None:
        """Take note of the fetches of everything up to a place in the order."""
        self._begun.append(((epoch, position), set(fetches)))
        self._advance()

    def done(self, fetch: Hashable) -> None:
        """Take note that a fetch is over."""
        self._num_done += 1
        # Batches of two epochs may need the same unit: it is under way for both of them.
        for _, fetches in self._begun:
            fetches.discard(fetch)
        self._advance()

    def end(self) -> None:
        """Take note that no more will begin."""
        self._has_ended = True

    def stop(self) -> None:
        """Take note that the fetches under way will not arrive either."""
        self._has_ended = True
        self._begun.clear()

    def _advance(self) -> None:
        while self._begun and not self._begun[0][1]:
            self._reached = self._begun.pop(0)[0]

    @property
    def is_over(self) -> bool:
        """Whether filling has ended: units that are still missing will not come."""
        return self._has_ended and not self._begun

    @property
    def reached(self) -> tuple[int, int]:
        """Epoch and position before which everything is there."""
        return self._reached

    def progress_mark(self, samples_per_epoch: int, now_s: float) -> int:
        """Return a number that changes as long as something moves.

        While fetches are under way the passing of time counts as movement: if this node waits for
        the store, others gain nothing by asking the same store themselves.
        """
        epoch, position = self._reached
        moved = self._num_done + (int(now_s) if self._begun else 0)
        moved &= (1 << _DONE_BITS) - 1
        return (epoch * samples_per_epoch + position) << _DONE_BITS | moved
