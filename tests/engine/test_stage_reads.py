"""Runs of an order that goes block by block."""

import numpy as np
import pytest

from penstock.engine.stage_reads import BlockRuns


def runs(*, first_epoch_only: bool = False, reads_whole: bool = True) -> BlockRuns:
    return BlockRuns(
        starts=np.array([0, 3, 7, 8]),
        first_epoch_only=first_epoch_only,
        read_whole=lambda: reads_whole,
    )


def test_each_sample_lies_in_one_run() -> None:
    assert runs().numbers(np.arange(8)).tolist() == [0, 0, 0, 1, 1, 1, 1, 2]


def test_ends_are_those_of_the_runs_of_some_samples() -> None:
    first, stop = runs().ends(np.array([7, 1, 0]))
    assert (first.tolist(), stop.tolist()) == ([0, 7], [3, 8])


@pytest.mark.parametrize(
    ("epoch", "first_epoch_only", "reads_whole", "expected"),
    [
        (0, True, True, True),
        (1, True, True, False),
        (1, False, True, True),
        (0, False, False, False),
    ],
)
def test_runs_are_read_whole_where_the_order_goes_by_them_and_it_pays(
    epoch: int, first_epoch_only: bool, reads_whole: bool, expected: bool
) -> None:
    found = runs(first_epoch_only=first_epoch_only, reads_whole=reads_whole)
    assert found.are_read_whole(epoch) is expected
