"""Stages: the bytes of samples, copied to their places in a batch."""

from collections.abc import Callable

import numpy as np
import pytest

import penstock
from penstock.engine.job import GroupPiece, SampleGroup
from penstock.engine.stages import GroupStage, RangesStage

RowsOf = Callable[[int], penstock.Dataset]
PIECE = GroupPiece(group=0, start=1, stop=3)
WIDTH = 16


class Bytes(GroupStage):
    """Sample j is `WIDTH` bytes of value j."""

    def raw(self, table: int, j: int) -> memoryview:
        return memoryview(bytes([j]) * WIDTH)


def group_of(dataset: penstock.Dataset) -> SampleGroup:
    return SampleGroup(
        bound=dataset.bound[0], where=np.array([2, 0, 1]), local_ids=np.array([5, 3, 4])
    )


def test_samples_are_copied_to_their_starts_and_rows(rows_of: RowsOf) -> None:
    stage = Bytes(None, group_of(rows_of(8)))  # type: ignore[arg-type]  # It asks no stager.
    flat = np.zeros(3 * WIDTH, np.uint8)
    stage.copy_into(0, PIECE, flat, [2 * WIDTH, 0])
    assert flat.reshape(3, WIDTH)[:, 0].tolist() == [2, 0, 1]
    rows = np.zeros((3, WIDTH), np.uint8)
    stage.copy_rows(0, PIECE, rows, np.array([0, 2]))
    assert rows[:, 0].tolist() == [1, 0, 2]


def test_ranges_of_one_buffer_are_the_samples(rows_of: RowsOf) -> None:
    stage = RangesStage(None, group_of(rows_of(8)))  # type: ignore[arg-type]
    stage.buffers.append(memoryview(bytes(range(100))))
    stage.starts.append([10, 50, 30])
    stage.lengths.append([1, 2, 3])
    assert [bytes(stage.raw(0, j)) for j in range(3)] == [
        b"\x0a", b"\x32\x33", b"\x1e\x1f\x20",
    ]  # fmt: skip


def test_a_stage_without_blocks_refuses_to_unpack_some(rows_of: RowsOf) -> None:
    stage = RangesStage(None, group_of(rows_of(8)))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="does not lie in blocks"):
        list(stage.samples(PIECE))
