"""Workers that never speak to each other agree on the epoch."""

import copy
import multiprocessing
import pickle

import pytest

from penstock.loader.torch.shared_epochs import SharedEpochTable


def begin(
    epoch_table: SharedEpochTable, worker: int, num_workers: int, tag: int
) -> tuple[int, int]:
    place = epoch_table.next(worker, tag)
    epoch_table.begin(worker, num_workers, tag, place)
    return place


def test_each_iteration_is_the_next_epoch() -> None:
    epoch_table = SharedEpochTable(epochs=1)
    for iteration in range(4):
        for worker in (1, 0, 2):
            assert begin(epoch_table, worker, 3, tag=100 + iteration) == (iteration, 0)


def test_an_iteration_of_several_epochs_ends_where_these_do() -> None:
    epoch_table = SharedEpochTable(epochs=3)
    epoch_table.put(4, 17)
    assert [begin(epoch_table, 0, 1, tag) for tag in (1, 2)] == [(4, 17), (6, 0)]


def test_a_stream_without_end_begins_where_it_did() -> None:
    epoch_table = SharedEpochTable(epochs=None)
    epoch_table.put(4, 17)
    assert [begin(epoch_table, 0, 1, tag) for tag in (1, 2)] == [(4, 17), (4, 17)]


@pytest.mark.parametrize("first", [0, 1])
def test_a_worker_that_ended_before_it_began_does_not_lag_behind(first: int) -> None:
    epoch_table = SharedEpochTable(epochs=1)
    begin(epoch_table, 0, 2, tag=1)  # Worker 1 of this iteration never came to it.
    assert begin(epoch_table, first, 2, tag=2) == (1, 0)
    assert begin(epoch_table, 1 - first, 2, tag=2) == (1, 0)


def test_workers_that_stay_begin_anew_with_the_same_tag() -> None:
    epoch_table = SharedEpochTable(epochs=1)
    for iteration in range(3):
        assert [begin(epoch_table, w, 2, tag=5) for w in (0, 1)] == [(iteration, 0)] * 2
    epoch_table.put(7)
    assert [begin(epoch_table, w, 2, tag=5) for w in (1, 0)] == [(7, 0)] * 2


def test_more_workers_may_come_even_with_the_same_tag() -> None:
    epoch_table = SharedEpochTable(epochs=1)
    assert [begin(epoch_table, w, 2, tag=5) for w in (0, 1)] == [(0, 0)] * 2
    assert [begin(epoch_table, w, 4, tag=5) for w in (0, 1, 2, 3)] == [(1, 0)] * 4


@pytest.mark.parametrize("remade", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_a_copy_shares_with_its_own_children(remade: object) -> None:
    assert callable(remade)
    epoch_table = remade(SharedEpochTable(epochs=1))
    child = multiprocessing.get_context("fork").Process(target=begin, args=(epoch_table, 0, 1, 9))
    child.start()
    child.join()
    assert epoch_table.next(0, tag=10) == (1, 0)
