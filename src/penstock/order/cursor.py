"""A cursor: where a run is, in a hundred bytes.

The position counts samples of the whole world in the current epoch, so it means the same on any
number of ranks and with any batch size. The data set's fingerprint and a hash of the order go with
it, because a position in another order is a silent repeat of some samples and loss of others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from penstock.errors import OptionError, StateError
from penstock.order.orders import Order, order_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A saved place in an order.

    >>> from penstock.order.orders import GlobalOrder
    >>> order = GlobalOrder(num_samples=1000, seed=7)
    >>> state = Cursor.at(order, fingerprint="c0ffee", epoch=2, position=640).to_state()
    >>> state["order"], state["epoch"], state["position"]
    ('global:baa36b6fda8c749e', 2, 640)
    >>> Cursor.from_state(state, order=order, fingerprint="c0ffee").position
    640
    """

    FORMAT: ClassVar[int] = 1

    fingerprint: str
    """Stands for the data set, down to the version."""
    order: str
    """Mode of the order, and the hash of its description."""
    seed: int
    """The order's seed, apart from the hash so that a message can name it."""
    epoch: int
    """Epochs completed."""
    position: int
    """Samples that the whole world has been given in this epoch."""

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.position < 0:
            raise OptionError(
                f"a cursor counts from 0, got epoch {self.epoch} and position {self.position}"
            )

    @classmethod
    def at(cls, order: Order, *, fingerprint: str, epoch: int = 0, position: int = 0) -> Cursor:
        """Return the cursor for a place in an order."""
        if position > order.num_samples:
            raise OptionError(
                f"position {position} lies beyond an epoch of {order.num_samples} samples"
            )
        return cls(
            fingerprint=fingerprint,
            order=f"{order.mode}:{order_hash(order)}",
            seed=order.seed,
            epoch=epoch,
            position=position,
        )

    def to_state(self) -> dict[str, int | str]:
        """Return the cursor as plain values, for any serializer."""
        return {"format": self.FORMAT, **asdict(self)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], *, order: Order, fingerprint: str) -> Cursor:
        """Return the cursor of a saved state, or raise if it belongs to something else."""
        if state.get("format") != cls.FORMAT:
            raise StateError(
                f"the saved state has format {state.get('format')!r}, this version of Penstock "
                f"reads format {cls.FORMAT}; load it with the version that saved it"
            )
        epoch, position = _count(state, "epoch"), _count(state, "position")
        if position > order.num_samples:
            raise StateError(
                f"the saved position {position} lies beyond an epoch of {order.num_samples} "
                "samples; load the state with the order that it was saved with"
            )
        expected = cls.at(order, fingerprint=fingerprint, epoch=epoch, position=position)
        _check_same(state, expected)
        return expected


def _count(state: Mapping[str, Any], name: str) -> int:
    value = state.get(name)
    if not isinstance(value, int) or value < 0:
        raise StateError(f"the saved state has {name} {value!r}, where a count from 0 is needed")
    return value


def _check_same(state: Mapping[str, Any], expected: Cursor) -> None:
    reasons = {
        "fingerprint": ("data set", "open the version that it was saved with, or start a new run"),
        "seed": ("seed", "give that seed, or start a new run"),
        "order": ("order", "give the mode and parameters that it was saved with"),
    }
    for name, (what, way_out) in reasons.items():
        saved, current = state.get(name), getattr(expected, name)
        if saved != current:
            raise StateError(
                f"the saved state is for {what} {saved!r}, this run has {current!r}; {way_out}"
            )
