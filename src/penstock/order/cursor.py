"""A cursor: where a run is, in a hundred bytes.

The position counts samples of the whole world in the current epoch, so it means the same on any
number of ranks and with any batch size. The data set's fingerprint and a hash of the order go with
it, because a position in another order is a silent repeat of some samples and loss of others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from penstock.arguments import count_of
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
        for name in ("epoch", "position"):
            object.__setattr__(self, name, count_of(name, getattr(self, name), least=0))

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
        if not isinstance(state, Mapping) or "format" not in state:
            has = list(state) if isinstance(state, Mapping) else type(state).__name__
            raise StateError(
                f"this is no state of a Penstock loader, which has a 'format'; it has {has}: give "
                "what state_dict() returned"
            )
        if state["format"] != cls.FORMAT:
            raise StateError(
                f"the saved state has format {state['format']!r}, this version of Penstock "
                f"reads format {cls.FORMAT}; load it with the version that saved it"
            )
        _check_same(state, cls.at(order, fingerprint=fingerprint))
        epoch, position = _count(state, "epoch"), _count(state, "position")
        if position > order.num_samples:
            raise StateError(
                f"the saved position {position} lies beyond an epoch of {order.num_samples} "
                "samples; load the state with the order that it was saved with"
            )
        return cls.at(order, fingerprint=fingerprint, epoch=epoch, position=position)


def _count(state: Mapping[str, Any], name: str) -> int:
    try:
        return count_of(name, state.get(name), least=0)
    except OptionError as error:
        raise StateError(f"the saved state is damaged: {error}") from error


def _check_same(state: Mapping[str, Any], expected: Cursor) -> None:
    """Refuse the state of another run, and say what to give instead.

    The kind of order comes first, because it explains what else differs: an order as stored, for
    one, has seed 0.
    """
    saved, current = str(state.get("order")), expected.order
    saved_mode, mode = saved.partition(":")[0], current.partition(":")[0]
    if saved_mode != mode:
        raise _other("order", _words(saved_mode), _words(mode), f"give it {_words(saved_mode)}")
    if state.get("fingerprint") != expected.fingerprint:
        way_out = "open the data set, version and view that it was saved with"
        raise _other("data set", state.get("fingerprint"), expected.fingerprint, way_out)
    if state.get("seed") != expected.seed:
        way_out = f"give seed={state.get('seed')}"
        raise _other("seed", state.get("seed"), expected.seed, way_out)
    if saved != current:
        raise _other("order", saved, current, _PARAMETERS.get(mode, "give what it was saved with"))


_PARAMETERS = {
    "importance": "give the window, floor, score and warmup that it was saved with",
    "mixture": "give the weights, samples_per_epoch and global_batch_size that it was saved with",
}
"""What an order of a kind has beside data set and seed."""


def _words(mode: str) -> str:
    """Return how a user asks for a kind of order."""
    if mode == "mixture":
        return "a Mixture"
    if mode == "importance":
        return "shuffle=penstock.Importance(…)"
    return "shuffle=None" if mode == "sequential" else f"shuffle={mode!r}"


def _other(what: str, saved: object, current: object, way_out: str) -> StateError:
    return StateError(
        f"the saved state is for {what} {saved}, this run has {current}; {way_out}, or begin a new "
        "run without the state"
    )
