"""A mixture of data sets in exact proportions.

The stream is an endless row of slots. `interleave` gives each slot a source, so that at every
period edge each source has had its share to within one sample; inside a period the slots are
shuffled, so that sources do not alternate in a visible pattern. Each source is drawn without
replacement through fresh permutations of its own: a sample returns only after all others of its
source were used.

Epochs cut the stream into runs of `num_samples` slots, and draws go on where the last epoch ended.
So an id may occur in an epoch several times, or never. Make the period the global batch size and
every global batch has its proportions: each source's count is within 2 of weight * period, and the
error does not add up from batch to batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from penstock.arguments import count_of
from penstock.errors import OptionError
from penstock.order.interleave import Interleave, interleave_of, shares_of
from penstock.order.keys import Ids, check_epoch, key_of, seed_of
from penstock.order.orders import Description, check_range, checked_ids, num_samples_of
from penstock.order.permutation import Permutation

PERIOD_DEFAULT = 256
_SLOTS_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOrder:
    """Several data sets drawn by weight; sample ids count through them one after the other.

    >>> order = MixtureOrder(sizes=(6, 100), weights=(0.75, 0.25), seed=7, period=4)
    >>> order.ids(0, 0, 12)
    array([ 2,  3, 57,  5,  0,  4,  1, 15,  1, 87,  4,  0])
    """

    mode: ClassVar[str] = "mixture"
    sizes: tuple[int, ...]
    """Samples of each source; ids of source j start at the sum of the sizes before it."""
    weights: tuple[float, ...]
    """Share of the stream that each source gets, up to a common factor."""
    seed: int
    """Picks all permutations."""
    num_samples: int = 0
    """Positions in one epoch; 0 stands for the sum of the sizes."""
    period: int = PERIOD_DEFAULT
    """Positions over which proportions are exact up to rounding: the global batch size."""
    shares: tuple[int, ...] = field(init=False, repr=False)
    """The weights as whole numbers: slots of each source until the interleave repeats."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(int(size) for size in self.sizes))
        object.__setattr__(self, "weights", tuple(self.weights))
        num_samples_of(sum(self.sizes))
        num_samples = num_samples_of(self.num_samples or sum(self.sizes))
        object.__setattr__(self, "num_samples", num_samples)
        object.__setattr__(self, "seed", seed_of(self.seed))
        if len(self.sizes) != len(self.weights) or min(self.sizes) < 1:
            raise OptionError(
                "a mixture has a size of at least 1 and a weight for each source; "
                f"got sizes {self.sizes} and weights {self.weights}"
            )
        object.__setattr__(self, "period", count_of("period", self.period))
        object.__setattr__(self, "shares", shares_of(self.weights))

    @property
    def offsets(self) -> Ids:
        """The first id of each source, then the number of ids."""
        return np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Return the sample ids at positions start to stop of an epoch."""
        check_range(self, epoch, start, stop)
        slots = self._slots_at(epoch, np.arange(start, stop))
        sources, draws = self._interleave().draws_at(slots)
        ids = np.empty(len(draws), dtype=np.int64)
        for source, here in _groups(sources):
            size = self.sizes[source]
            rounds = draws[here] // size
            local = self._family(source).forward(draws[here] - rounds * size, rounds)
            ids[here] = local.view(np.int64) + self.offsets[source]
        return ids

    def positions(self, epoch: int, ids: npt.ArrayLike) -> Ids:
        """Return the first position of each id in an epoch, or -1 where it does not occur."""
        check_epoch(epoch)
        offsets = self.offsets
        wanted = checked_ids(ids, int(offsets[-1]))
        sources = (np.searchsorted(offsets, wanted, side="right") - 1).astype(np.int16)
        positions = np.empty(len(wanted), dtype=np.int64)
        for source, here in _groups(sources):
            positions[here] = self._first_positions(epoch, source, wanted[here] - offsets[source])
        return positions

    def describe(self) -> Description:
        """Return mode and parameters, with the weights as whole numbers."""
        return {
            "mode": self.mode,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "period": self.period,
            "sizes": list(self.sizes),
            "shares": list(self.shares),
        }

    def _first_positions(self, epoch: int, source: int, local: Ids) -> Ids:
        """Return the first position of each local id of a source in an epoch, or -1."""
        interleave = self._interleave()
        size = self.sizes[source]
        begin, end = (
            interleave.num_draws(source, edge * self.num_samples) for edge in (epoch, epoch + 1)
        )
        first = np.full(len(local), _SLOTS_MAX)
        open_ = np.arange(len(local))
        for turn in range(begin // size, -(-end // size)):
            rounds = np.full(len(open_), turn)
            draws = self._family(source).inverse(local[open_], rounds).view(np.int64) + turn * size
            valid = (draws >= begin) & (draws < end)
            found = open_[valid]
            slots = interleave.slots_at(source, draws[valid])
            first[found] = np.minimum(first[found], self._positions_at(epoch, slots))
            # A later draw can only be earlier in the stream if it shares the period.
            next_slot = int(interleave.slots_at(source, np.array([(turn + 1) * size]))[0])
            next_period = (next_slot - epoch * self.num_samples) // self.period
            open_ = open_[first[open_] // self.period >= next_period]
            if not len(open_):
                break
        first[first == _SLOTS_MAX] = -1
        return first

    def _slots_at(self, epoch: int, positions: Ids) -> Ids:
        return self._shuffled(epoch, positions, inverse=False) + self._first_slot(epoch)

    def _positions_at(self, epoch: int, slots: Ids) -> Ids:
        return self._shuffled(epoch, slots - self._first_slot(epoch), inverse=True)

    def _first_slot(self, epoch: int) -> int:
        if (epoch + 1) * self.num_samples > _SLOTS_MAX:
            raise OptionError(f"epoch {epoch} of {self.num_samples} samples ends beyond 2**63")
        return epoch * self.num_samples

    def _shuffled(self, epoch: int, places: Ids, *, inverse: bool) -> Ids:
        """Return places permuted inside their periods; the last period may be shorter."""
        tail_size = self.num_samples % self.period
        is_tail = places >= self.num_samples - tail_size
        shuffled = np.empty_like(places)
        for size, part in ((self.period, ~is_tail), (tail_size, is_tail)):
            if not part.any():
                continue
            family = Permutation(size=size, key=key_of(self.seed, "period", epoch, size))
            periods = places[part] // self.period
            within = places[part] - periods * self.period
            shuffle = family.inverse if inverse else family.forward
            mapped = shuffle(within, periods)
            shuffled[part] = mapped.view(np.int64) + periods * self.period
        return shuffled

    def _interleave(self) -> Interleave:
        return interleave_of(self.shares)

    def _family(self, source: int) -> Permutation:
        key = key_of(self.seed, self.mode, source)
        return Permutation(size=self.sizes[source], key=key)


def _groups(sources: npt.NDArray[np.int16]) -> list[tuple[int, npt.NDArray[np.intp]]]:
    """Return each source that occurs, with the indices where it does."""
    # NumPy sorts 16-bit numbers by radix, which takes the same time for any number of sources.
    by_source = np.argsort(sources, kind="stable")
    counts = np.bincount(sources)
    parts = np.split(by_source, np.cumsum(counts)[:-1])
    return [(source, parts[source]) for source in np.flatnonzero(counts).tolist()]
