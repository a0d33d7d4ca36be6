"""Workers that never speak to each other agree on the epoch."""

import copy
import multiprocessing
import pickle

import pytest

from penstock.torch.turns import Turns


def begin(turns: Turns, worker: int, num_workers: int, tag: int) -> tuple[int, int]:
    place = turns.next(worker, tag)
    turns.begin(worker, num_workers, tag, place)
    return place


def test_each_iteration_is_the_next_epoch() -> None:
    turns = Turns(epochs=1)
    for iteration in range(4):
        for worker in (1, 0, 2):
            assert begin(turns, worker, 3, tag=100 + iteration) == (iteration, 0)


def test_an_iteration_of_several_epochs_ends_where_these_do() -> None:
    turns = Turns(epochs=3)
    turns.put(4, 17)
    assert [begin(turns, 0, 1, tag) for tag in (1, 2)] == [(4, 17), (6, 0)]


def test_a_stream_without_end_begins_where_it_did() -> None:
    turns = Turns(epochs=None)
    turns.put(4, 17)
    assert [begin(turns, 0, 1, tag) for tag in (1, 2)] == [(4, 17), (4, 17)]


@pytest.mark.parametrize("first", [0, 1])
def test_a_worker_that_ended_before_it_began_does_not_lag_behind(first: int) -> None:
    turns = Turns(epochs=1)
    begin(turns, 0, 2, tag=1)  # Worker 1 of this iteration never came to it.
    assert begin(turns, first, 2, tag=2) == (1, 0)
    assert begin(turns, 1 - first, 2, tag=2) == (1, 0)


def test_workers_that_stay_begin_anew_with_the_same_tag() -> None:
    turns = Turns(epochs=1)
    for iteration in range(3):
        assert [begin(turns, w, 2, tag=5) for w in (0, 1)] == [(iteration, 0)] * 2
    turns.put(7)
    assert [begin(turns, w, 2, tag=5) for w in (1, 0)] == [(7, 0)] * 2


def test_more_workers_may_come_even_with_the_same_tag() -> None:
    turns = Turns(epochs=1)
    assert [begin(turns, w, 2, tag=5) for w in (0, 1)] == [(0, 0)] * 2
    assert [begin(turns, w, 4, tag=5) for w in (0, 1, 2, 3)] == [(1, 0)] * 4


@pytest.mark.parametrize("remade", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_a_copy_shares_with_its_own_children(remade: object) -> None:
    assert callable(remade)
    turns = remade(Turns(epochs=1))
    child = multiprocessing.get_context("fork").Process(target=begin, args=(turns, 0, 1, 9))
    child.start()
    child.join()
    assert turns.next(0, tag=10) == (1, 0)
