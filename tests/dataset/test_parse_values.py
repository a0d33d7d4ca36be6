"""Values leave a parser process as what they were there."""

from __future__ import annotations

import datetime
import uuid
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from penstock.dataset.parse_values import UnsendableError, pack_value, unpack_value

TYPES = st.one_of(
    nps.scalar_dtypes(),
    nps.array_dtypes(nps.integer_dtypes() | nps.floating_dtypes(), max_size=3),
)
ARRAYS = nps.arrays(TYPES, nps.array_shapes(min_dims=0, min_side=0, max_side=4))
OFFSETS = st.integers(-1439, 1439).map(
    lambda minutes: datetime.timezone(datetime.timedelta(minutes=minutes))
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters()),
    st.binary(),
    st.decimals(allow_nan=False),
    st.datetimes(timezones=st.none() | OFFSETS),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.uuids(),
    ARRAYS,
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(st.characters(), max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(one: Any, two: Any) -> bool:
    if type(one) is not type(two):
        return False
    if isinstance(one, np.ndarray | np.generic):
        is_same = one.dtype == two.dtype and one.shape == two.shape
        return is_same and one.tobytes() == two.tobytes()
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    return one == two or (np.isnan(one) and np.isnan(two))


@settings(max_examples=50)
@given(VALUES)
@example({-(2**63) - 1: None})
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert same(unpack_value(pack_value(value)), value)


def test_a_view_comes_back_as_bytes() -> None:
    assert unpack_value(pack_value(memoryview(b"abcd")[1:3])) == b"bc"


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([object()]), [uuid]])
def test_a_value_of_another_class_does_not_travel(value: Any) -> None:
    with pytest.raises(UnsendableError):
        pack_value(value)
