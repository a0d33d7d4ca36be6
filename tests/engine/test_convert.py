"""Values that are arrays, and values that are not."""

from typing import Any

import numpy as np
import pytest

from penstock.engine.convert import array_of, converter, special_of
from penstock.engine.cuts import Cuts


class Image:
    """What Pillow's images say of themselves."""

    def __init__(self, array: np.ndarray) -> None:
        self.__array_interface__ = array.__array_interface__
        self._array = array


def test_an_array_is_itself() -> None:
    array = np.arange(3)
    found = array_of(array, "x")
    assert found is not None
    assert found[0] is array
    assert found[1] is None


@pytest.mark.parametrize(
    "value", [1, 2.5, "a", b"a", None, [1], {"a": 1}, np.float32(1), np.array([{}], object)]
)
def test_other_values_are_no_arrays(value: Any) -> None:
    assert array_of(value, "x") is None


def test_an_image_is_an_array_of_its_pixels() -> None:
    found = array_of(Image(np.arange(6).reshape(2, 3)), "x")
    assert found is not None
    assert found[0].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_tensor_is_an_array_over_its_memory() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(3)
    found = array_of(tensor, "x")
    assert found is not None
    found[0][0] = 7
    assert tensor[0] == 7


def test_a_type_that_numpy_lacks_comes_with_the_array() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    found = array_of(tensor, "x")
    assert found is not None
    array, special = found
    assert (array.dtype, special) == (np.int16, torch.bfloat16)
    assert torch.equal(special_of(array, special), tensor)


def test_numpy_output_cuts_ragged_values() -> None:
    cuts = Cuts(np.arange(4, dtype=np.uint8), np.array([0, 1]), np.array([1, 3]))
    values = converter("numpy")(cuts)
    assert [value.tolist() for value in values] == [[0], [1, 2, 3]]
    assert converter("numpy")("text") == "text"
