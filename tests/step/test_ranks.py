"""The kit that runs ranks tells the truth about them."""

import os

import pytest
import torch
from tests.step.ranks import RankError, run_ranks
from torch import distributed


def summed(rank: int, size: int, scale: float) -> torch.Tensor:
    tensor = torch.full((3,), scale * rank)
    distributed.all_reduce(tensor)
    return tensor


def fails_on_one(rank: int, size: int) -> None:
    if rank == 1:
        raise ValueError("one has had enough")
    distributed.all_reduce(torch.ones(1))


def dies_on_one(rank: int, size: int) -> int:
    if rank == 1:
        distributed.recv(torch.ones(1), 0)  # so the other one has all its connections
        os._exit(3)
    distributed.send(torch.ones(1), 1)
    return rank


def test_results_come_home_by_rank() -> None:
    results = run_ranks(summed, 3, 2.0)
    assert all(torch.equal(each, torch.full((3,), 6.0)) for each in results)


def test_the_first_rank_that_fails_is_the_one_told_about() -> None:
    with pytest.raises(RankError, match=r"rank 1(.|\n)*one has had enough") as caught:
        run_ranks(fails_on_one, 2)
    assert caught.value.rank == 1


def test_a_rank_that_ends_without_a_word_is_an_error_unless_it_may() -> None:
    with pytest.raises(RankError, match="without a word, exit code 3"):
        run_ranks(dies_on_one, 2)
    assert run_ranks(dies_on_one, 2, dies={1}) == [0, None]
