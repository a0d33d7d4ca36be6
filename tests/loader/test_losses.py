"""Losses on their way to the scores, without ranks and without a GPU."""

import numpy as np
import pytest

from penstock.errors import StateError
from penstock.loader.losses import SingleRankExchange, StepMark, as_floats, check_marks


def test_marks_of_one_batch_and_one_draw_pass() -> None:
    check_marks([StepMark(1, 2, 3)] * 4)


def test_marks_of_several_batches_name_the_ranks() -> None:
    with pytest.raises(StateError, match=r"rank 0: 2 of epoch 1, rank 1: 3 of epoch 1"):
        check_marks([StepMark(1, 2, 3), StepMark(1, 3, 3)])


def test_marks_of_several_scores_name_the_ranks() -> None:
    with pytest.raises(StateError, match=r"rank 0 0{15}3, rank 1 0{15}4"):
        check_marks([StepMark(1, 2, 3), StepMark(1, 2, 4)])


def test_losses_of_one_rank_are_a_copy() -> None:
    losses = np.array([1.0, 2.0])
    pending = SingleRankExchange().begin(np.array([7, 8]), losses, StepMark(0, 0, 0))
    losses[0] = 9
    assert pending.is_here()
    assert pending.result().ids.tolist() == [7, 8]
    assert pending.result().losses.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("losses", [[1, 2.5], np.array([1, 2.5]), (1, 2.5)])
def test_losses_become_single_precision(losses: object) -> None:
    assert as_floats(losses).dtype == np.float32
    assert as_floats(losses).tolist() == [1.0, 2.5]
