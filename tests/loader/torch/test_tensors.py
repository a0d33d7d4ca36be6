"""Arrays as tensors, and batches in the hands of torch's own tools."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate, default_convert
from torch.utils.data._utils.pin_memory import pin_memory

from penstock import Batch
from penstock.loader.torch.tensors import tensor_of


@pytest.mark.parametrize("kind", ["?", "u1", "u2", "u4", "u8", "i1", "i8", "f2", "f4", "f8", "c8"])
def test_a_tensor_shares_the_memory_of_its_array(kind: str) -> None:
    array = np.zeros((2, 3), kind)
    tensor = tensor_of(array)
    array[1, 2] = 1
    assert tensor[1, 2] == 1
    assert tensor.shape == (2, 3)


@pytest.mark.parametrize("kind", ["U3", "M8[s]", ">f4", "O"])
def test_what_torch_does_not_know_stays_an_array(kind: str) -> None:
    array = np.zeros(2, kind)
    assert tensor_of(array) is array


@pytest.mark.filterwarnings("error")
def test_read_only_and_flipped_arrays_are_copied() -> None:
    fixed = np.arange(3)
    fixed.flags.writeable = False
    tensor_of(fixed)[0] = 9
    assert fixed.tolist() == [0, 1, 2]
    assert tensor_of(np.arange(6).reshape(2, 3)[:, ::-1]).tolist() == [[2, 1, 0], [5, 4, 3]]


class Pinnable:
    """Stands for a tensor where there is no device to pin memory for."""

    def __init__(self, name: str) -> None:
        self.name = name

    def pin_memory(self, device: Any = None) -> "Pinnable":
        return Pinnable(self.name + " pinned")


def batch_of(**fields: Any) -> Batch:
    return Batch.of(
        fields, ids=torch.tensor([4, 2]), mask=torch.tensor([True, True]), epoch=3, step=7
    )


def test_torch_pins_a_batch_and_keeps_what_belongs_to_it() -> None:
    batch = batch_of(x=Pinnable("x"), names=["a", "b"], y=[Pinnable("y")])
    batch.ids, batch.mask = Pinnable("ids"), Pinnable("mask")
    pinned = pin_memory(batch)
    assert isinstance(pinned, Batch)
    assert (pinned["x"].name, pinned["y"][0].name) == ("x pinned", "y pinned")
    assert (pinned.ids.name, pinned.mask.name) == ("ids pinned", "mask pinned")
    assert (pinned.epoch, pinned.step, pinned["names"]) == (3, 7, ["a", "b"])


def test_torch_converts_a_batch_and_keeps_what_belongs_to_it() -> None:
    converted = default_convert(batch_of(x=np.ones(2), names=["a", "b"]))
    assert isinstance(converted, Batch)
    assert isinstance(converted["x"], torch.Tensor)
    assert (converted.epoch, converted.step, converted.ids.tolist()) == (3, 7, [4, 2])


def test_a_batch_moves_with_all_that_can_move() -> None:
    moved = batch_of(x=torch.ones(2), names=["a", "b"]).to("meta", non_blocking=True)
    assert isinstance(moved, Batch)
    assert [t.device.type for t in (moved["x"], moved.ids, moved.mask)] == ["meta"] * 3
    assert moved["names"] == ["a", "b"]


def test_batches_can_be_collated_once_more() -> None:
    joined = default_collate([batch_of(x=torch.ones(2)), batch_of(x=torch.zeros(2))])
    assert joined["x"].tolist() == [[1, 1], [0, 0]]
