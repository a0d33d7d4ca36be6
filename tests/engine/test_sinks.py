"""Fields of a batch from values that arrive one by one, in any order."""

import numpy as np
import pytest

from penstock.engine.buffers import BufferPool
from penstock.engine.cuts import Cuts
from penstock.engine.sinks import FieldPiece, Sinks
from penstock.errors import DatasetError, OptionError


def sinks_of(*samples: dict[str, object]) -> Sinks:
    sinks = Sinks(len(samples), BufferPool(1 << 20))
    for i in reversed(range(len(samples))):
        sinks.put(i, samples[i])
    return sinks


def test_arrays_of_one_shape_and_type_become_one_array() -> None:
    fields = sinks_of({"x": np.array([1, 2])}, {"x": np.array([3, 4])}).fields({})
    assert fields["x"].tolist() == [[1, 2], [3, 4]]


def test_arrays_of_several_shapes_become_a_list_in_order() -> None:
    fields = sinks_of({"x": np.zeros(1)}, {"x": np.zeros(2)}, {"x": np.zeros(1)}).fields({})
    assert [value.shape for value in fields["x"]] == [(1,), (2,), (1,)]


def test_numbers_become_an_array_unless_it_would_change_them() -> None:
    assert sinks_of({"x": 1}, {"x": 2.5}).fields({})["x"].tolist() == [1, 2.5]
    assert sinks_of({"x": -1}, {"x": 2**63}).fields({})["x"] == [-1, 2**63]


def test_bytes_become_cuts_of_one_buffer() -> None:
    cuts = sinks_of({"x": b"ab"}, {"y": 1}, {"x": b""}).fields({})["x"]
    assert isinstance(cuts, Cuts)
    assert [None if a is None else a.tobytes() for a in cuts.arrays()] == [b"ab", None, b""]


def test_other_values_stay_a_list_with_none_for_absent_ones() -> None:
    assert sinks_of({"x": "a"}, {}, {"x": ["b"]}).fields({})["x"] == ["a", None, ["b"]]


def test_padding_fills_up_to_the_longest_sample() -> None:
    fields = sinks_of({"x": np.array([1])}, {"x": np.array([2, 3])}).fields({"x": 9})
    assert fields["x"].tolist() == [[1, 9], [2, 3]]


def test_padding_refuses_what_it_cannot_do() -> None:
    with pytest.raises(DatasetError, match="samples have: x"):
        sinks_of({"x": 1}).fields({"y": 0})
    with pytest.raises(DatasetError, match="no value in one sample"):
        sinks_of({"x": np.array([1])}, {}).fields({"x": 0})
    with pytest.raises(OptionError, match="holds int64 numbers"):
        sinks_of({"x": np.array([1])}, {"x": np.array([1, 2])}).fields({"x": 0.5})


def test_a_layout_of_one_batch_is_expected_of_the_next() -> None:
    layout = sinks_of({"x": np.zeros(3, np.float32), "t": "a"}).layout()
    assert set(layout) == {"x"}
    sinks = Sinks(2, BufferPool(1 << 20))
    sinks.expect(layout)
    array, special = sinks.arrays()["x"]
    assert (array.shape, array.dtype, special) == ((2, 3), np.float32, None)
    assert sinks.fields({}) == {}  # Expected, but no sample has come.


def test_pieces_of_another_process_are_taken() -> None:
    sinks = sinks_of(*[{}] * 4)
    sinks.take([2, 0], {"x": FieldPiece(stacked=np.array([[5], [6]]))})
    array, _ = sinks.arrays()["x"]
    array[1] = 7
    sinks.take([1, 3], {"x": FieldPiece(in_place=b"\1\0", values={1: np.array([8])})})
    assert sinks.fields({})["x"].tolist() == [[6], [7], [5], [8]]
