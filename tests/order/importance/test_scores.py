"""Scores: whole numbers that do not depend on who computed a loss, nor in which order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import OptionError
from penstock.order import GlobalOrder
from penstock.order.importance import Importance, ImportanceOrder, ScoreTable, StepLosses
from penstock.order.importance.scores import LOG_RANK_POINTS

NUM_SAMPLES = 40
kinds = st.sampled_from(["loss-rank", "loss", "cost-aware"])
pairs = st.tuples(st.integers(0, NUM_SAMPLES - 1), st.floats(-1, 100, width=32))
steps = st.lists(pairs, min_size=1, max_size=20)


def step_of(pairs: list[tuple[int, float]]) -> StepLosses:
    ids, losses = zip(*pairs, strict=True)
    return StepLosses(np.array(ids, np.int64), np.array(losses, np.float32))


def learnt(several: list[list[tuple[int, float]]], kind: object = "loss-rank") -> ScoreTable:
    table = ScoreTable(NUM_SAMPLES)
    table.learn([step_of(step) for step in several], Importance(score=kind))  # type: ignore[arg-type]
    return table


@given(several=st.lists(steps, max_size=5), kind=kinds, data=st.data())
def test_a_table_does_not_depend_on_the_order_of_samples_inside_a_step(
    several: list[list[tuple[int, float]]], kind: str, data: st.DataObject
) -> None:
    mixed = [data.draw(st.permutations(step)) for step in several]
    assert learnt(mixed, kind).digest() == learnt(several, kind).digest()


@given(step=steps, bad=st.sampled_from([np.nan, np.inf, -np.inf]), kind=kinds, data=st.data())
def test_losses_that_are_no_numbers_change_no_other_sample(
    step: list[tuple[int, float]], bad: float, kind: str, data: st.DataObject
) -> None:
    others = data.draw(st.lists(st.integers(0, NUM_SAMPLES - 1), max_size=9))
    with_bad = data.draw(st.permutations([*step, *((i, bad) for i in others)]))
    found, expected = learnt([with_bad], kind), learnt([step], kind)
    assert found.score.tolist() == expected.score.tolist()
    known = sorted({i for i, _ in step})
    assert found.hardness[known].tolist() == expected.hardness[known].tolist()
    broken = sorted(set(others) - set(known))
    assert (found.hardness[broken] == 65535).all()
    assert (found.num_seen[broken] == 1).all()
    # An overflow of a whole step says nothing.
    assert learnt([[(i, bad) for i in others]] if others else [], kind).num_seen.sum() == 0


def test_a_sample_that_never_has_a_finite_loss_is_drawn_as_often_as_the_average() -> None:
    order = ImportanceOrder(
        plain=GlobalOrder(num_samples=NUM_SAMPLES, seed=1), options=Importance(warmup=0, window=1)
    )
    table = ScoreTable(NUM_SAMPLES)
    losses = np.linspace(1, 2, NUM_SAMPLES, dtype=np.float32)
    losses[7] = np.inf
    for _ in range(4):
        table.learn([StepLosses(np.arange(NUM_SAMPLES), losses)], order.options)
    draws = order.draws(5, table)
    assert draws.chances is not None
    points = np.delete(draws.chances.points, 7)
    assert abs(draws.chances.points[7] / points.mean() - 1) < 0.01
    assert table.difficulty(order.options)[7] == table.difficulty(order.options).max()


def test_a_rank_is_one_in_its_step_and_its_score_the_logarithm_of_it() -> None:
    """In a batch of fewer than 64 samples, ranks are spread to as many."""
    table = ScoreTable(100)
    losses = np.arange(100, 0, -1, dtype=np.float32)
    table.learn([StepLosses(np.arange(100), losses)], Importance())
    expected = np.rint(np.log(10 + np.arange(100)[::-1]) * LOG_RANK_POINTS)
    assert table.score.tolist() == expected.tolist()
    table = learnt([[(5, 2.0), (7, 0.5), (9, 1.0)]])
    expected = np.rint(np.log([10, 41, 73]) * LOG_RANK_POINTS)
    assert table.score[[7, 9, 5]].tolist() == expected.tolist()
    assert table.hardness[[7, 9, 5]].tolist() == [0, 32767, 65535]
    assert table.num_seen.sum() == 3


def test_no_logarithm_of_a_rank_lies_where_another_processor_could_round_it_otherwise() -> None:
    points = np.log(10.0 + np.arange(1 << 20)) * LOG_RANK_POINTS
    assert np.abs(points - np.floor(points) - 0.5).min() > 1e-9


def test_the_average_of_losses_follows_them_and_stays_above_zero() -> None:
    table = learnt([[(1, 4.0), (2, 0.0)], [(1, 2.0), (2, -3.0)]], "loss")
    assert table.score[[0, 1, 2]].tolist() == [0, 3 * 4096, 1]
    assert learnt([[(1, 1e30)]], "loss").score[1] == 2**31 - 1


def test_hardness_is_a_moving_average_of_the_place() -> None:
    table = learnt([[(1, 1.0), (2, 0.0)], [(1, 0.0), (2, 1.0)]])
    assert table.hardness[[1, 2]].tolist() == [3 * 65535 // 4, 65535 // 4]


def test_how_often_a_sample_was_scored_is_counted_up_to_255() -> None:
    assert learnt([[(3, 1.0)]] * 300).num_seen[3] == 255


def test_a_function_scores_the_losses_of_a_step() -> None:
    table = learnt([[(4, 9.0), (2, 4.0)]], np.sqrt)
    assert table.score[[2, 4]].tolist() == [2 * 4096, 3 * 4096]


@pytest.mark.parametrize(
    "score",
    [lambda losses: losses[:1], lambda losses: -losses, lambda losses: losses * np.nan],
    ids=["too few", "negative", "no numbers"],
)
def test_what_a_function_returns_is_checked(score: object) -> None:
    with pytest.raises(OptionError, match="one finite number from 0 on for each of the 2 losses"):
        learnt([[(4, 9.0), (2, 4.0)]], score)


def test_a_copy_changes_by_itself_and_digests_tell_tables_apart() -> None:
    table = learnt([[(1, 1.0), (2, 2.0)]])
    copy = table.copy()
    assert copy.digest() == table.digest()
    copy.learn([step_of([(1, 3.0)])], Importance())
    assert copy.digest() != table.digest()


def test_tables_are_pinned_by_value() -> None:
    several = [[(i, float((i * 7 + s) % 11)) for i in range(s, s + 6)] for s in range(3)]
    assert learnt(several).score[:8].tolist() == PINNED["loss-rank"]
    assert learnt(several, "loss").score[:8].tolist() == PINNED["loss"]
    assert learnt(several).hardness[:8].tolist() == PINNED["hardness"]
    assert f"{learnt(several).digest():016x}" == PINNED["digest"]


PINNED: dict[str, object] = {
    "loss-rank": [4716, 8385, 7885, 6330, 8787, 7281, 4716, 8385],
    "loss": [1, 30720, 17408, 12288, 29696, 13312, 20480, 28672],
    "hardness": [0, 52428, 29490, 40140, 45874, 16383, 49151, 52428],
    "digest": "0078e884ebadf58b",
}
