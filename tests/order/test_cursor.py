"""A cursor is small, comes back as it was, and is refused where it does not belong."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import OptionError, StateError
from penstock.order import Cursor, GlobalOrder, Order, SequentialOrder

ORDER = GlobalOrder(num_samples=1_281_167, seed=7)
PRINT = "0123456789abcdef"


def saved(**changes: object) -> dict[str, object]:
    cursor = Cursor.at(ORDER, fingerprint=PRINT, epoch=89, position=1_281_000)
    return {**cursor.to_state(), **changes}


@given(epoch=st.integers(0, 10**6), position=st.integers(0, 1_281_167))
def test_a_cursor_survives_json(epoch: int, position: int) -> None:
    cursor = Cursor.at(ORDER, fingerprint=PRINT, epoch=epoch, position=position)
    state = msgspec.json.decode(msgspec.json.encode(cursor.to_state()))
    assert Cursor.from_state(state, order=ORDER, fingerprint=PRINT) == cursor


def test_a_state_takes_at_most_150_bytes() -> None:
    order = GlobalOrder(num_samples=10**10, seed=2**32)
    cursor = Cursor.at(order, fingerprint=PRINT, epoch=1000, position=10**10)
    assert len(msgspec.json.encode(cursor.to_state())) <= 150
    assert len(msgspec.json.encode(saved())) <= 125


def test_a_state_is_pinned_by_value() -> None:
    assert saved() == {
        "format": 1,
        "fingerprint": "0123456789abcdef",
        "order": "global:ef3835bc8e4bf1a2",
        "seed": 7,
        "epoch": 89,
        "position": 1281000,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format 2.*reads format 1"),
        ({"format": None}, "format None"),
        ({"fingerprint": "beef"}, f"data set beef, this run has {PRINT}"),
        ({"seed": 8}, "seed 8, this run has 7"),
        ({"order": "blocks:00"}, "order shuffle='blocks', this run has shuffle='global'"),
        ({"position": 1_281_168}, "1281168 lies beyond an epoch of 1281167"),
        ({"position": -1}, "position must be at least 0, got -1"),
        ({"epoch": "3"}, "epoch must be a whole number, got '3'"),
        ({"epoch": None}, "epoch must be a whole number, got None"),
    ],
)
def test_a_state_of_something_else_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(StateError, match=message):
        Cursor.from_state(saved(**changes), order=ORDER, fingerprint=PRINT)


@pytest.mark.parametrize(
    "order", [SequentialOrder(num_samples=1_281_167), GlobalOrder(num_samples=1_281_168, seed=7)]
)
def test_a_state_does_not_load_into_another_order(order: Order) -> None:
    with pytest.raises(StateError, match="this run has"):
        Cursor.from_state(saved(), order=order, fingerprint=PRINT)


def test_a_cursor_outside_the_epoch_is_refused() -> None:
    with pytest.raises(OptionError, match="beyond"):
        Cursor.at(ORDER, fingerprint=PRINT, position=1_281_168)
    with pytest.raises(OptionError, match="epoch must be at least 0, got -1"):
        Cursor.at(ORDER, fingerprint=PRINT, epoch=-1)
