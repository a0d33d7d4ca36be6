"""`blocks` in the first epoch, `global` in all later ones.

In the first epoch nothing is held yet, and every byte has to come from the store. In the order of
its blocks it comes in large reads; once tiers hold it, a uniform shuffle costs no more than any
other. The price is that the first epoch mixes only inside its windows. The name of the mode says so
wherever it is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy.typing as npt

from penstock.errors import OptionError
from penstock.order.blocks import BlocksOrder
from penstock.order.keys import Ids
from penstock.order.orders import Description, GlobalOrder, order_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdOrder:
    """One order for epoch 0, another from epoch 1 on."""

    mode: ClassVar[str] = "blocks-first"
    first: BlocksOrder
    later: GlobalOrder

    def __post_init__(self) -> None:
        if self.first.num_samples != self.later.num_samples or self.first.seed != self.later.seed:
            raise OptionError(
                "both orders of a cold start have the same samples and seed, got "
                f"{self.first.num_samples} and {self.later.num_samples}, seeds {self.first.seed} "
                f"and {self.later.seed}"
            )

    @property
    def num_samples(self) -> int:
        """Positions in one epoch."""
        return self.first.num_samples

    @property
    def seed(self) -> int:
        """What both orders were drawn with."""
        return self.first.seed

    def of(self, epoch: int) -> BlocksOrder | GlobalOrder:
        """Return the order of an epoch."""
        return self.first if epoch == 0 else self.later

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Return the sample ids at positions start to stop of an epoch."""
        return self.of(epoch).ids(epoch, start, stop)

    def positions(self, epoch: int, ids: npt.ArrayLike) -> Ids:
        """Return the position of each id in an epoch."""
        return self.of(epoch).positions(epoch, ids)

    def describe(self) -> Description:
        """Return the mode, and a hash for each of the two orders."""
        return {
            "mode": self.mode,
            "first": order_hash(self.first),
            "later": order_hash(self.later),
        }
