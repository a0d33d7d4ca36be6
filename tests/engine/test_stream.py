"""The stream of batches: parts, ranks and jobs are cuts of one order."""

from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest

import penstock
from penstock.engine.options import LoaderOptions
from penstock.engine.stream import jobs_of, stream_of
from penstock.world import World

RowsOf = Callable[[int], penstock.Dataset]


def ids_of(dataset: penstock.Dataset, world: World, *, part: tuple[int, int] = (0, 1)) -> list:
    stream = stream_of(LoaderOptions(dataset=dataset, global_batch_size=12, seed=3), world)
    return [slot.ids.tolist() for slot in stream.slots(0, 0, 2, part)]


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7, 20])
def test_parts_of_a_stream_are_all_of_it(rows_of: RowsOf, num_parts: int) -> None:
    dataset = rows_of(100)
    whole = ids_of(dataset, World())
    parts = [ids_of(dataset, World(), part=(k, num_parts)) for k in range(num_parts)]
    assert [parts[n % num_parts][n // num_parts] for n in range(len(whole))] == whole


@pytest.mark.parametrize("num_ranks", [2, 3, 12])
def test_ranks_share_the_same_global_batches(rows_of: RowsOf, num_ranks: int) -> None:
    dataset = rows_of(120)
    whole = ids_of(dataset, World())
    ranks = [ids_of(dataset, World(rank=r, num_ranks=num_ranks)) for r in range(num_ranks)]
    assert [np.concatenate(batches).tolist() for batches in zip(*ranks, strict=True)] == whole


def test_samples_that_an_assignment_moves_stay_in_their_global_batch(rows_of: RowsOf) -> None:
    options = LoaderOptions(dataset=rows_of(100), global_batch_size=12)

    def odd_ones_first(ids: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        return np.argsort(ids % 2 == 0, kind="stable")

    ranks = [
        list(stream_of(options, World(rank=r, num_ranks=2), odd_ones_first).slots(0, 0, 1))
        for r in range(2)
    ]
    whole = list(stream_of(options, World()).slots(0, 0, 1))
    for slot, *shares in zip(whole, *ranks, strict=True):
        assert sorted(np.concatenate([s.ids for s in shares])) == sorted(slot.ids)
        assert sum(s.num_counted for s in shares) == slot.num_counted
        assert {s.cursor_after for s in shares} == {slot.cursor_after}


def test_the_first_job_is_one_batch_and_later_ones_are_several(rows_of: RowsOf) -> None:
    stream = stream_of(LoaderOptions(dataset=rows_of(100), batch_size=10), World())
    jobs = list(jobs_of(stream, stream.slots(0, 0, 1), 4))
    assert [len(job.slots) for job in jobs] == [1, 4, 4, 1]
    assert [job.num_samples for job in jobs] == [10, 40, 40, 10]


def test_a_stream_without_end_goes_on(rows_of: RowsOf) -> None:
    stream = stream_of(LoaderOptions(dataset=rows_of(10), batch_size=10), World())
    assert [slot.epoch for slot in islice(stream.slots(5, 0, None), 3)] == [5, 6, 7]
