"""Importance sampling as people use it: mistakes, summaries, single calls."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Importance, World
from penstock.engine.job import BatchSlot
from penstock.errors import OptionError, StateError
from penstock.loader.losses import NUM_QUEUED, ObservedLosses, SingleRankExchange
from penstock.order import GlobalOrder
from penstock.order.importance import ImportanceCourse, ImportanceOrder

from .conftest import MakeRows
from .importance_loops import (
    BATCH,
    NUM_SAMPLES,
    loader_of,
    loss_of,
    stream_of,
    trained,
)


@pytest.fixture
def rows(make_rows: MakeRows) -> penstock.Dataset:
    return make_rows(NUM_SAMPLES)


# -- what people do wrong --------------------------------------------------------------------


def test_observe_says_what_is_wrong_with_a_call(rows: penstock.Dataset) -> None:
    with loader_of(rows) as loader:
        iteration = iter(loader)
        batch = next(iteration)
        for wrong in (3.5, np.float32(1.0), np.ones(5), np.ones((BATCH, 2)), [1.0] * 11):
            with pytest.raises(StateError, match=r"one loss for each of the 12 samples.*'none'"):
                loader.observe(batch, wrong)
        with pytest.raises(StateError, match="observe the batch that the loader gave"):
            loader.observe(dict(batch), loss_of(batch.ids))
        with pytest.raises(StateError, match="observe the batch that the loader gave"):
            loader.observe(penstock.Batch(batch), loss_of(batch.ids))
        loader.observe(batch, loss_of(batch.ids).tolist())
        with pytest.raises(StateError, match="batch 0 of epoch 0 was observed before"):
            loader.observe(batch, loss_of(batch.ids))
    with loader_of(rows, shuffle="global") as plain:
        assert plain.importance is None
        with pytest.raises(OptionError, match=r"shuffle=penstock\.Importance"):
            plain.observe(next(iter(plain)), loss_of(batch.ids))


def test_a_window_smaller_than_a_batch_is_refused_with_a_size_that_works(
    rows: penstock.Dataset,
) -> None:
    with (
        loader_of(rows, shuffle=Importance(window=10)) as loader,
        pytest.raises(OptionError, match=r"10 draws .* 12; give window=48") as caught,
    ):
        next(iter(loader))
    window = int(str(caught.value).partition("window=")[2].partition(",")[0])
    stream_of(loader_of(rows, shuffle=Importance(window=window)))


def test_parts_of_the_stream_are_refused(rows: penstock.Dataset) -> None:
    with (
        loader_of(rows) as loader,
        pytest.raises(OptionError, match=r"iterate over the penstock\.Loader itself"),
    ):
        loader.part(0, 2)


@pytest.mark.parametrize("workers", ["here", 1])
def test_a_score_function_that_fails_ends_the_loop_with_its_error(
    rows: penstock.Dataset, workers: Any
) -> None:
    shuffle = Importance(window=60, score=negative)
    with (
        loader_of(rows, shuffle=shuffle, workers=workers) as loader,
        pytest.raises(OptionError, match="one finite number from 0 on"),
    ):
        list(trained(loader))


def negative(losses: Any) -> Any:
    return -losses


@pytest.mark.parametrize("workers", ["here", 1])
def test_a_collate_of_the_user_has_weights_if_it_returns_a_mapping(
    rows: penstock.Dataset, workers: Any
) -> None:
    expected = stream_of(loader_of(rows))
    assert stream_of(loader_of(rows, collate=in_a_mapping, workers=workers)) == expected
    with (
        loader_of(rows, collate=in_a_tuple, workers=workers) as loader,
        pytest.raises(OptionError, match="collate= has made a tuple; return a mapping"),
    ):
        next(iter(loader))


def in_a_mapping(samples: list[Any]) -> dict[str, Any]:
    return {"rows": np.stack([sample["data"] for sample in samples])}


def in_a_tuple(samples: list[Any]) -> tuple[Any, ...]:
    return (np.stack([sample["data"] for sample in samples]), len(samples))


# -- what people see -------------------------------------------------------------------------


def test_the_hardest_samples_and_those_that_stay_hardest_are_named(rows: penstock.Dataset) -> None:
    with loader_of(rows, epochs=8) as loader:
        for batch in loader:
            loader.observe(batch, np.where(batch.ids == 77, 50, loss_of(batch.ids)))
        assert loader.importance is not None
        assert loader.importance.hardest(1).tolist() == [77]
        assert loader.importance.suspects()[0] == 77
        assert (loader.importance.suspects() % 11 == 0).all()
        assert len(loader.importance.hardest(1000)) == NUM_SAMPLES
        assert "100% of 240 samples scored" in repr(loader.importance)


@pytest.mark.parametrize("workers", ["here", 1])
def test_a_summary_says_what_importance_did(rows: penstock.Dataset, workers: Any) -> None:
    with loader_of(rows, workers=workers) as loader:
        assert "importance" not in str(loader.stats())
        seen = list(trained(loader))
        stats = loader.stats()
        loader.close()
        assert str(loader.stats()).splitlines()[-2:] == str(stats).splitlines()[-2:]
    assert stats.draws is not None
    assert (stats.draws.num_windows, stats.draws.num_plain) == (12, 4)
    distinct = len({i for epoch, _, ids, _ in seen for i in ids if epoch == 2})
    assert distinct < NUM_SAMPLES
    weights = np.array([w for epoch, *_, weights in seen for w in weights if epoch == 2])
    parts = weights.reshape(4, 60)
    share = np.mean(parts.sum(axis=1) ** 2 / (60 * (parts**2).sum(axis=1)))
    first, second = str(stats).splitlines()[-2:]
    assert first == ("  importance: 8 of 12 windows were drawn by importance, 4 plain (4: warm-up)")
    assert second == (
        f"  epoch 2 has drawn {distinct} of 240 samples so far; its draws are worth {share:.0%} "
        "of as many uniform ones (effective sample size)"
    )


def test_a_summary_says_why_windows_are_plain(rows: penstock.Dataset) -> None:
    with loader_of(rows, epochs=2) as loader:
        for batch in loader:
            loader.observe(batch, np.ones(BATCH))
        assert "4: warm-up, 4: its scores are alike)" in str(loader.stats())
    with loader_of(rows, epochs=2) as loader:
        plain = GlobalOrder(num_samples=NUM_SAMPLES, seed=3)
        for batch in loader:
            first = batch.step * BATCH
            expected = plain.ids(batch.epoch, first, first + BATCH)
            assert batch.ids.tolist() == expected.tolist()
            assert (batch.weights == 1).all()
        said = str(loader.stats())
    assert "no losses were observed, so all 8 windows were plain" in said
    assert "call loader.observe(batch, losses) after each step" in said


def test_windows_of_an_iteration_that_begins_again_are_counted_again(
    rows: penstock.Dataset,
) -> None:
    with loader_of(rows, epochs=1) as loader:
        list(itertools.islice(trained(loader), 12))
        list(trained(loader))
        draws = loader.stats().draws
    assert draws is not None
    assert [each.window for each in draws.windows] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert draws.windows[-1].num_distinct_so_far == NUM_SAMPLES


# -- single calls ----------------------------------------------------------------------------


def test_padding_is_found_by_the_mask_wherever_it_stands() -> None:
    """With `assignment="locality"` it is not always last."""
    plain = GlobalOrder(num_samples=10, seed=1)
    course = ImportanceCourse(ImportanceOrder(plain=plain, options=Importance(score="loss")))
    observed = ObservedLosses(course, SingleRankExchange)
    mask = np.array([False, True, False, True])
    slot = BatchSlot(
        epoch=0,
        step=0,
        ids=np.array([9, 4, 9, 7]),
        positions=np.arange(4),
        mask=mask,
        num_counted=2,
        cursor_after=(0, 1),
    )
    observed.delivered(slot)
    batch = penstock.Batch.of({}, ids=slot.ids, mask=mask, epoch=0, step=0)
    observed.observe(batch, np.array([1, 2, 3, 4]))
    [step] = observed.queued()
    assert (step.ids.tolist(), step.losses.tolist()) == ([4, 7], [2.0, 4.0])


def test_losses_of_loops_that_are_left_early_do_not_pile_up(
    rows: penstock.Dataset, meeting_place: Path
) -> None:
    def rank_of(rank: int) -> int:
        with loader_of(rows, world=World(rank=rank, num_ranks=2)) as loader:
            for _ in range(12):
                list(itertools.islice(trained(loader), 4))
            assert loader.importance is not None
            return len(loader.importance._observed._queue)

    with ThreadPoolExecutor(2) as pool:
        assert max(pool.map(rank_of, range(2))) <= NUM_QUEUED + 4
