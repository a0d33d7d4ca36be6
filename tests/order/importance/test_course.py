"""Windows of an epoch, the scores they are drawn from, and states between any two calls."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import OptionError, StateError
from penstock.order import GlobalOrder, MixtureOrder, Steps, order_hash
from penstock.order.importance import (
    Importance,
    ImportanceCourse,
    ImportanceOrder,
    ScoreTable,
    StepLosses,
)
from penstock.order.importance.order import DELAY

windows = st.one_of(st.integers(1, 400), st.floats(0.002, 1.0))


def order_of(num_samples: int, seed: int = 7, **options: Any) -> ImportanceOrder:
    plain = GlobalOrder(num_samples=num_samples, seed=seed)
    return ImportanceOrder(plain=plain, options=Importance(**options))


def loss_of(ids: Any) -> Any:
    """Losses that depend on nothing but the sample: a few are much harder."""
    return (1 + (ids * 37 % 101) / 20 + 9 * (ids % 11 == 0)).astype(np.float32)


def batches(course: Any, size: int, num_epochs: int) -> Iterator[tuple[int, int, Any]]:
    """Yield epoch, start and ids of each batch, and end windows as a loader does.

    A batch is planned before it is delivered, and the first of a window ends the one before.
    """
    for epoch in range(num_epochs):
        steps = Steps(num_samples=course.num_samples, global_batch_size=size)
        for step in range(steps.num_steps):
            start, stop = steps.bounds(step)
            assert course.is_known(epoch, stop)
            ids = course.ids(epoch, start, stop)
            yield epoch, start, ids
            while course.window < course.order.window_at(epoch, stop - 1):
                course.close_window()
            course.observe(StepLosses(ids, loss_of(ids)))


def train(
    course: ImportanceCourse,
    size: int,
    num_epochs: int,
    between: Callable[[ImportanceCourse], ImportanceCourse] = lambda course: course,
) -> list[tuple[Any, ...]]:
    """Return ids and weights of all batches; `between` is called between any two calls."""
    held = [course]

    class Held:
        def __getattr__(self, name: str) -> Any:
            held[0] = between(held[0])
            return getattr(held[0], name)

    out = []
    any_course: Any = Held()
    for epoch, start, ids in batches(any_course, size, num_epochs):
        weights = any_course.weights(epoch, start, start + len(ids))
        out.append((*ids.tolist(), *weights.tolist(), any_course.digest_at(epoch, start)))
    return out


# -- windows ---------------------------------------------------------------------------------


@given(num_samples=st.integers(1, 300), window=windows, data=st.data())
def test_windows_cut_an_epoch_into_parts_that_differ_by_one_at_most(
    num_samples: int, window: float, data: st.DataObject
) -> None:
    order = order_of(num_samples, window=window)
    epoch = data.draw(st.integers(0, 5))
    first = epoch * order.num_windows
    spans = [order.span(w) for w in range(first, first + order.num_windows)]
    assert {e for e, _, _ in spans} == {epoch}
    edges = [0, *(stop for _, _, stop in spans)]
    assert [start for _, start, _ in spans] == edges[:-1]
    assert edges[-1] == num_samples
    assert set(np.diff(edges)) <= {num_samples // order.num_windows} | {
        num_samples // order.num_windows + 1
    }
    position = data.draw(st.integers(0, num_samples - 1))
    _, start, stop = order.span(order.window_at(epoch, position))
    assert start <= position < stop


@pytest.mark.parametrize(
    ("window", "num_windows"),
    [(1, 1), (1.0, 1), (0.1, 10), (2, 500), (250, 4), (300, 3), (5000, 1), (np.int64(250), 4)],
)
def test_a_window_is_a_share_of_the_epoch_or_a_number_of_draws(
    window: Any, num_windows: int
) -> None:
    assert Importance(window=window).num_windows(1000) == num_windows


@pytest.mark.parametrize("window", [0, -3, 0.0, 1.5, True, "all", None, float("nan")])
def test_windows_that_make_no_sense_are_refused(window: Any) -> None:
    with pytest.raises(OptionError, match="window must be a share of the epoch"):
        Importance(window=window)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"floor": 0}, "floor must lie above 0"),
        ({"floor": 1.1}, "floor must lie above 0"),
        ({"score": "rank"}, "'loss-rank', 'loss', 'cost-aware', or a function"),
        ({"warmup": -1}, "warmup"),
        ({"miss_cost": 0.5}, "miss_cost must be at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(option: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Importance(**option)


# -- plain windows ---------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [GlobalOrder(num_samples=103, seed=3)])
def test_the_warm_up_is_the_plain_order_exactly(plain: GlobalOrder) -> None:
    course = ImportanceCourse(ImportanceOrder(plain=plain, options=Importance(warmup=2)))
    for epoch, start, ids in batches(course, 10, 2):
        stop = start + len(ids)
        assert ids.tolist() == plain.ids(epoch, start, stop).tolist()
        assert (course.weights(epoch, start, stop) == 1).all()
        assert course.draws(course.window).reason == "warm-up"
    assert (course.latest_table().num_seen == 2).all()


def test_a_run_that_never_observes_is_plain_for_ever() -> None:
    course = ImportanceCourse(order_of(60, window=0.25, warmup=0))
    for window in range(4 * course.order.num_windows):
        epoch, start, stop = course.order.span(window)
        expected = course.order.plain.ids(epoch, start, stop)
        assert course.ids(epoch, start, stop).tolist() == expected.tolist()
        assert course.draws(window).reason == "nothing is scored yet"
        course.close_window()


def table_of(score: list[int]) -> ScoreTable:
    table = ScoreTable(len(score))
    table.score[:] = score
    table.num_seen[:] = 1
    return table


def test_scores_that_are_alike_make_a_plain_window_that_says_why() -> None:
    order = order_of(100, window=0.5)
    alike = order.draws(6, table_of([1000 + i % 3 for i in range(100)]))
    assert alike.reason.startswith("its scores are alike: the gradient would vary 1.000 times less")
    assert alike.ids.tolist() == order.plain.ids(3, 0, 50).tolist()
    assert alike.chances is None
    unlike = order.draws(6, table_of([1000 + 100 * (i % 9) for i in range(100)]))
    assert unlike.reason == ""
    assert unlike.chances is not None


def test_draws_that_would_be_worth_little_make_a_plain_window_that_says_why() -> None:
    order = order_of(100, window=0.5, floor=0.05)
    draws = order.draws(6, table_of([1] * 99 + [100_000]))
    assert draws.reason == "its draws would be worth too little: 5% of uniform ones"
    assert draws.effective_share == 1


def test_unseen_samples_are_as_probable_as_the_hardest() -> None:
    order = order_of(100, window=0.5)
    table = table_of([100 + 10 * i for i in range(100)])
    table.num_seen[:50] = 0
    chances = order.draws(2, table).chances or order.draws(6, table).chances
    assert chances is not None
    assert abs(chances.points[:50] - chances.points[99]).max() <= 1
    assert (np.diff(chances.points[50:]) > 0).all()


def test_cost_aware_draws_prefer_what_is_cached() -> None:
    order = order_of(100, window=0.5, score="cost-aware", miss_cost=9.0, cached=0.3, floor=0.01)
    draws = order.draws(6, table_of([4100] * 30 + [4096] * 70))
    assert draws.chances is not None
    points = draws.chances.points
    assert points[0] / points[99] == pytest.approx(3, rel=0.05)
    mean = (points / draws.chances.total * draws.chances.weights).sum()
    assert mean == pytest.approx(1, abs=1e-6)


# -- the stream ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_samples", "options"),
    [
        (97, {"window": 0.3}),
        (97, {"window": 1}),
        (64, {"window": 16, "score": "loss"}),
        (41, {"window": 13, "warmup": 0}),
        (3, {"window": 2, "warmup": 0}),
        (1, {"window": 1}),
    ],
)
def test_states_between_any_two_calls_give_the_rest_exactly(
    num_samples: int, options: dict[str, Any]
) -> None:
    order = order_of(num_samples, **options)
    size = min(8, num_samples // order.num_windows)
    whole = train(ImportanceCourse(order), size, 5)

    def through_a_state(course: ImportanceCourse) -> ImportanceCourse:
        state = pickle.loads(pickle.dumps(course.to_state()))
        return ImportanceCourse.from_state(order, state)

    assert train(ImportanceCourse(order), size, 5, through_a_state) == whole


def test_a_window_is_drawn_from_scores_of_two_windows_before_and_no_later_ones() -> None:
    order = order_of(120, window=0.25, warmup=0)
    one = ImportanceCourse(order)
    for _, _, ids in batches(one, 10, 3):
        other = ImportanceCourse.from_state(order, one.to_state())
        other.observe(StepLosses(ids, np.zeros(len(ids), np.float32)))
        for window in one.known_windows:
            assert one.draws(window).digest == other.draws(window).digest
    assert one.known_windows == range(one.window, one.window + DELAY)


def test_known_means_that_ids_are_there() -> None:
    course = ImportanceCourse(order_of(100, window=0.25))
    assert course.is_known(0, 0)
    assert course.is_known(0, 50)
    assert not course.is_known(0, 51)
    assert len(course.ids(0, 13, 50)) == 37
    assert len(course.ids(0, 7, 7)) == 0
    course.close_window()
    assert course.is_known(0, 75)
    with pytest.raises(OptionError, match="window at a time"):
        course.order.ids(0, 0, 10)


def test_going_elsewhere_keeps_all_that_was_observed() -> None:
    course = ImportanceCourse(order_of(100, window=0.25, score="loss"))
    for _ in batches(course, 10, 2):
        pass
    digest = course.latest_table().digest()
    course.move_to(4)
    assert course.window == 4
    assert course.table.digest() == course.latest_table().digest() == digest
    assert course.draws(4).digest == course.draws(5).digest == digest


def test_losses_do_not_pile_up_where_nobody_draws() -> None:
    course = ImportanceCourse(order_of(100, window=0.25))
    for _ in range(50):
        course.observe(StepLosses(np.arange(5), np.ones(5, np.float32)))
        course.close_window()
    assert len(course._closed) <= course.order.num_windows
    assert course.latest_table().num_seen[0] == 50


def test_harder_samples_come_more_often_and_every_sample_comes() -> None:
    course = ImportanceCourse(order_of(220, window=0.25, score="loss", warmup=1))
    counts = np.zeros(220)
    for epoch, _, ids in batches(course, 11, 9):
        if epoch > 0:
            counts += np.bincount(ids, minlength=220)
    hard = np.arange(220) % 11 == 0
    assert counts[hard].mean() > 2 * counts[~hard].mean()
    assert counts.min() >= 1


# -- mixtures --------------------------------------------------------------------------------


def test_a_mixture_keeps_its_shares_and_its_weights_are_q_over_p() -> None:
    plain = MixtureOrder(sizes=(40, 100), weights=(3, 1), seed=5, num_samples=120, period=12)
    order = ImportanceOrder(plain=plain, options=Importance(window=0.5, warmup=1, score="loss"))
    course = ImportanceCourse(order)
    drawn = set()
    for _ in batches(course, 12, 6):
        draws = course.draws(course.window)
        if draws.chances is None:
            continue
        drawn.add(draws.window)
        assert abs(int((draws.ids < 40).sum()) - 45) <= 1
        share = np.where(draws.ids < 40, 0.75 / 40, 0.25 / 100)
        p = draws.chances.points[draws.ids] / draws.chances.total
        np.testing.assert_allclose(draws.weights, share / p, rtol=1e-5)
    assert len(drawn) > 5
    assert order.describe()["mode"] == "importance-mixture"


# -- identity --------------------------------------------------------------------------------


def test_a_run_is_pinned_by_value() -> None:
    course = ImportanceCourse(order_of(20, window=0.5, score="loss"))
    ids, weights = [], []
    for epoch, start, drawn in batches(course, 5, 3):
        ids.append(drawn)
        weights.append(course.weights(epoch, start, start + len(drawn)))
    drawn_ids = " ".join(map(str, np.concatenate(ids).tolist()[30:]))
    assert drawn_ids == (
        "11 8 4 0 9 10 1 15 3 19 11 16 8 3 10 1 0 7 6 12 2 13 11 4 0 16 18 11 1 10"
    )
    assert [float(w).hex() for w in np.concatenate(weights)[-5:]] == [
        "0x1.ae64980000000p-1",
        "0x1.105fe20000000p+0",
        "0x1.ecea7e0000000p-2",
        "0x1.600af80000000p+0",
        "0x1.fda2a00000000p-1",
    ]
    assert f"{course.digest_at(2, 19):016x}" == "e471768082f3d3d4"
    assert order_hash(course.order) == "d0d3b60c5320dd80"


def test_orders_of_other_options_are_other_orders() -> None:
    options: list[dict[str, Any]] = [
        {},
        {"window": 0.2},
        {"floor": 0.3},
        {"score": "loss"},
        {"score": np.sqrt},
        {"warmup": 2},
        {"score": "cost-aware"},
        {"score": "cost-aware", "miss_cost": 20},
    ]
    assert len({order_hash(order_of(100, **each)) for each in options}) == len(options)
    assert order_hash(order_of(100, window=0.1)) == order_hash(order_of(100, window=10))


@pytest.mark.parametrize("lacks", ["window", "score", "num_seen", "steps", "sizes", "losses"])
def test_a_state_that_lacks_something_is_refused(lacks: str) -> None:
    order = order_of(100)
    state = ImportanceCourse(order).to_state()
    del state[lacks]
    with pytest.raises(StateError, match="saved scores"):
        ImportanceCourse.from_state(order, state)


def test_a_state_whose_columns_do_not_fit_together_is_refused() -> None:
    order = order_of(100)
    course = ImportanceCourse(order)
    course.observe(StepLosses(np.arange(5), np.ones(5, np.float32)))
    for name, value in (("losses", np.ones(4, np.float32)), ("ids", np.arange(96, 101))):
        with pytest.raises(StateError, match="saved scores are damaged"):
            ImportanceCourse.from_state(order, {**course.to_state(), name: value})
    with pytest.raises(StateError, match=r"100 samples, this run needs format 1 and 50"):
        ImportanceCourse.from_state(order_of(50), course.to_state())
