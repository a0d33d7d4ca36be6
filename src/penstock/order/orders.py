"""What an order is, and the two that need no more than a number of samples.

An order maps (epoch, position) to a sample id and back. It is a value: two processes that hold
equal orders agree on every sample of every epoch without exchanging anything. The world size never
enters it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.arguments import count_of
from penstock.errors import OptionError
from penstock.order.keys import Ids, check_epoch, key_of, seed_of
from penstock.order.permutation import SIZE_MAX, Permutation

Description: TypeAlias = dict[str, int | str | list[int]]


class Order(Protocol):
    """Which sample is used when. Frozen, picklable, the same on every platform."""

    @property
    def mode(self) -> str:
        """The name of the kind of order."""
        ...

    @property
    def num_samples(self) -> int:
        """Positions in one epoch."""
        ...

    @property
    def seed(self) -> int:
        """What the order was drawn with; 0 where nothing is drawn."""
        ...

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Return the sample ids at positions start to stop of an epoch; start may be anywhere."""
        ...

    def positions(self, epoch: int, ids: npt.ArrayLike) -> Ids:
        """Return the position of each id in an epoch: the inverse of `ids`."""
        ...

    def describe(self) -> Description:
        """Return mode and parameters as plain values; equal orders describe themselves equally."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialOrder:
    """The samples as they are stored, in every epoch.

    >>> SequentialOrder(num_samples=5).ids(3, 1, 4)
    array([1, 2, 3])
    """

    mode: ClassVar[str] = "sequential"
    num_samples: int
    """Samples in the data set."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_samples", num_samples_of(self.num_samples))

    @property
    def seed(self) -> int:
        """0: nothing is drawn."""
        return 0

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Return start, start + 1, … stop - 1."""
        check_range(self, epoch, start, stop)
        return np.arange(start, stop, dtype=np.int64)

    def positions(self, epoch: int, ids: npt.ArrayLike) -> Ids:
        """Return the ids: a sample's position is its id."""
        check_epoch(epoch)
        return checked_ids(ids, self.num_samples).copy()

    def describe(self) -> Description:
        """Return mode and size."""
        return {"mode": self.mode, "num_samples": self.num_samples}


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalOrder:
    """A fresh uniform permutation of all samples in each epoch.

    >>> order = GlobalOrder(num_samples=8, seed=7)
    >>> order.ids(0, 0, 8), order.ids(1, 0, 8)
    (array([4, 3, 2, 7, 0, 5, 6, 1]), array([4, 6, 7, 5, 1, 0, 3, 2]))
    >>> order.positions(0, [3])
    array([1])
    """

    mode: ClassVar[str] = "global"
    num_samples: int
    """Samples in the data set."""
    seed: int
    """Picks the permutations of all epochs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_samples", num_samples_of(self.num_samples))
        object.__setattr__(self, "seed", seed_of(self.seed))

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Return the sample ids at positions start to stop of an epoch."""
        check_range(self, epoch, start, stop)
        positions = np.arange(start, stop, dtype=np.uint64)
        return self._permutation(epoch).forward(positions).view(np.int64)

    def positions(self, epoch: int, ids: npt.ArrayLike) -> Ids:
        """Return the position of each id in an epoch."""
        check_epoch(epoch)
        return self._permutation(epoch).inverse(checked_ids(ids, self.num_samples)).view(np.int64)

    def describe(self) -> Description:
        """Return mode, size and seed."""
        return {"mode": self.mode, "num_samples": self.num_samples, "seed": self.seed}

    def _permutation(self, epoch: int) -> Permutation:
        return Permutation(size=self.num_samples, key=key_of(self.seed, self.mode, epoch))


def order_hash(order: Order) -> str:
    """Return 16 hex digits that stand for an order's description."""
    text = json.dumps(order.describe(), sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())


def num_samples_of(num_samples: int) -> int:
    """Return a number of samples, or raise unless an order of so many can be made."""
    number = count_of("the number of samples of an order", num_samples)
    if number > SIZE_MAX - 1:
        raise OptionError(f"an order has between 1 and 2**63 - 1 samples, got {number}")
    return number


def check_range(order: Order, epoch: int, start: int, stop: int) -> None:
    """Raise unless the positions start to stop lie in the epoch."""
    check_epoch(epoch)
    if not 0 <= start <= stop <= order.num_samples:
        raise OptionError(
            f"positions {start} to {stop} do not lie in an epoch of {order.num_samples} samples"
        )


def checked_ids(ids: npt.ArrayLike, num_ids: int) -> Ids:
    """Return the ids as an array, or raise if one is not below `num_ids`."""
    checked = np.atleast_1d(np.asarray(ids, dtype=np.int64))
    if checked.size and not 0 <= int(checked.min()) <= int(checked.max()) < num_ids:
        raise OptionError(
            f"sample ids lie between 0 and {num_ids - 1}, "
            f"got {int(checked.min())} to {int(checked.max())}"
        )
    return checked
