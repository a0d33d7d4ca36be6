"""Draws of one window: unbiased, in exact numbers, repeats far apart."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import OptionError
from penstock.order.importance import Probabilities, draw, probabilities
from penstock.order.importance.draws import counts_in_row

seeds = st.integers(0, 2**64 - 1)
floors = st.floats(0.01, 1.0)
preferences = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=60)


def chances_of(
    preference: list[int],
    *,
    draws: int,
    floor: float = 0.2,
    sizes: tuple[int, ...] | None = None,
    shares: tuple[int, ...] = (1,),
) -> Probabilities:
    return probabilities(
        np.array(preference, np.int64),
        sizes=sizes or (len(preference),),
        shares=shares,
        floor=floor,
        draws=draws,
    )


@st.composite
def mixed(draw: st.DrawFn) -> tuple[Probabilities, int]:
    """Chances of a few sources with a share each, and a number of draws."""
    sizes = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4).map(tuple))
    num_sources = len(sizes)
    shares = draw(
        st.lists(st.integers(0, 9), min_size=num_sources, max_size=num_sources).filter(any)
    )
    num = sum(sizes)
    preference = draw(st.lists(st.integers(0, 2**31 - 1), min_size=num, max_size=num))
    num_draws = draw(st.integers(1, 200))
    chances = chances_of(
        preference, draws=num_draws, floor=draw(floors), sizes=sizes, shares=tuple(shares)
    )
    return chances, num_draws


# -- the estimate ----------------------------------------------------------------------------


@given(points=st.lists(st.integers(1, 7), min_size=1, max_size=9), num_draws=st.integers(1, 25))
def test_over_all_starts_a_sample_is_drawn_by_its_probability_exactly(
    points: list[int], num_draws: int
) -> None:
    total = sum(points)
    counts = [counts_in_row(np.array(points), num_draws, start) for start in range(total)]
    assert (np.sum(counts, axis=0) == np.array(points) * num_draws).all()


@given(points=st.lists(st.integers(1, 7), min_size=1, max_size=9), num_draws=st.integers(1, 25))
def test_over_all_starts_the_weighted_mean_is_the_plain_mean_exactly(
    points: list[int], num_draws: int
) -> None:
    total, size = sum(points), len(points)
    values = [Fraction(7 * i * i - 3 * i + 1) for i in range(size)]
    weights = [Fraction(total, size * p) for p in points]  # q / p with q = 1 / F.
    estimate = Fraction(0)
    for start in range(total):
        counts = counts_in_row(np.array(points), num_draws, start).tolist()
        terms = zip(counts, weights, values, strict=True)
        estimate += sum((c * w * v for c, w, v in terms), Fraction(0)) / num_draws
    assert estimate / total == sum(values) / size


def test_the_weighted_mean_of_many_windows_is_the_plain_mean() -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(size=300)
    # Scores that have nothing to do with the values: as stale as can be.
    chances = chances_of(rng.integers(1, 1000, 300).tolist(), draws=60)
    estimates = []
    for window in range(800):
        ids = draw(chances, 60, seed=5, window=window)
        estimates.append((values[ids] * chances.weights_of(ids)).mean())
    error = np.std(estimates) / np.sqrt(len(estimates))
    assert abs(np.mean(estimates) - values.mean()) < 4 * error
    assert error < 0.01


@given(preference=preferences, num_draws=st.integers(1, 300), floor=floors)
def test_weights_average_to_one_and_do_not_exceed_one_over_the_floor(
    preference: list[int], num_draws: int, floor: float
) -> None:
    chances = chances_of(preference, draws=num_draws, floor=floor)
    assert chances.total == int(chances.points.sum()) == int(chances.base.sum())
    assert chances.weights.max() <= np.float32(1 / floor)
    assert (chances.points > 0).all()
    mean = float((chances.points / chances.total * chances.weights).sum())
    assert mean == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("floor", [0.1, 0.2, 1 / 3, 0.7])
def test_no_weight_exceeds_one_over_the_floor_where_probabilities_are_coarse(floor: float) -> None:
    # 2**26 samples and a window as large leave 8 bits for a mean probability.
    preference = np.zeros(1000, np.int64)
    preference[0] = 1
    chances = probabilities(preference, sizes=(1000,), shares=(1,), floor=floor, draws=2**44 - 1)
    assert chances.base[0] == 2**8
    assert chances.weights.max() <= np.float32(1 / floor)


def test_a_window_that_is_too_large_to_be_exact_is_refused() -> None:
    with pytest.raises(OptionError, match="too large to be exact; give a window of at most"):
        probabilities(np.ones(1000, np.int64), sizes=(1000,), shares=(1,), floor=0.2, draws=2**45)


@given(case=mixed())
def test_probabilities_mix_the_floor_with_what_is_preferred(
    case: tuple[Probabilities, int],
) -> None:
    chances, _ = case
    first = 0
    for size in chances.sizes:
        here = slice(first, first + size)
        assert chances.points[here].sum() == chances.base[here].sum()
        first += size


def test_flat_preferences_and_a_floor_of_one_are_uniform() -> None:
    for chances in (
        chances_of([5] * 7, draws=10),
        chances_of([0] * 7, draws=10),
        chances_of([1, 2, 3, 4, 5, 6, 7], draws=10, floor=1.0),
    ):
        assert (chances.weights == 1).all()
        assert chances.effective_share == 1


# -- counts ----------------------------------------------------------------------------------


@given(case=mixed(), seed=seeds, window=st.integers(0, 1000))
def test_a_sample_is_drawn_within_one_of_what_its_probability_says(
    case: tuple[Probabilities, int], seed: int, window: int
) -> None:
    chances, num_draws = case
    ids = draw(chances, num_draws, seed=seed, window=window)
    assert ids.dtype == np.int64
    assert len(ids) == num_draws
    counts = np.bincount(ids, minlength=len(chances.points)).tolist()
    for count, points in zip(counts, chances.points.tolist(), strict=True):
        expected = Fraction(num_draws * points, chances.total)
        assert abs(count - expected) < 1
        assert count >= 1 or expected < 1


@given(case=mixed(), seed=seeds)
def test_sources_keep_their_shares_to_within_one_draw_a_window(
    case: tuple[Probabilities, int], seed: int
) -> None:
    chances, num_draws = case
    ids = draw(chances, num_draws, seed=seed, window=0)
    edges = np.cumsum((0, *chances.sizes))
    for low, high in pairwise(edges.tolist()):
        share = Fraction(num_draws * int(chances.base[low:high].sum()), chances.total)
        assert abs(int(((ids >= low) & (ids < high)).sum()) - share) < 1


def test_a_source_of_weight_zero_is_never_drawn() -> None:
    chances = chances_of([3] * 10, draws=1000, sizes=(4, 6), shares=(0, 5))
    for window in range(20):
        assert draw(chances, 1000, seed=1, window=window).min() >= 4
    assert chances.effective_share == pytest.approx(1)
    assert chances.gain(np.ones(10)) == pytest.approx(1)


@pytest.mark.parametrize("batch", [8, 16, 50])
def test_a_sample_does_not_come_twice_in_a_batch_unless_it_is_a_large_part_of_the_window(
    batch: int,
) -> None:
    rng = np.random.default_rng(batch)
    num_draws = 40 * batch
    for window in range(60):
        # Hard samples come about twenty times: in every other batch.
        preference = rng.integers(1, 5, 60 * batch)
        preference[rng.integers(0, 60 * batch, 2)] = 75
        chances = chances_of(preference.tolist(), draws=num_draws, floor=0.01)
        ids = draw(chances, num_draws, seed=9, window=window)
        counts = np.bincount(ids)
        assert counts.max() > 5
        assert len(np.unique(counts[counts > 0])) <= batch
        often = np.flatnonzero(counts > num_draws // (2 * batch))
        for start in range(0, num_draws, batch):
            here = ids[start : start + batch]
            here = here[~np.isin(here, often)]
            assert len(np.unique(here)) == len(here)


@given(case=mixed(), seed=seeds)
def test_copies_of_a_sample_are_evenly_spaced(case: tuple[Probabilities, int], seed: int) -> None:
    chances, num_draws = case
    ids = draw(chances, num_draws, seed=seed, window=0)
    source = np.searchsorted(np.cumsum(chances.sizes), np.arange(sum(chances.sizes)), "right")
    counts = np.bincount(ids, minlength=len(source))
    classes = len({(s, c) for s, c in zip(source.tolist(), counts.tolist(), strict=True) if c})
    for i in np.flatnonzero(counts > 1).tolist():
        gaps = np.diff(np.flatnonzero(ids == i))
        assert gaps.min() >= num_draws / counts[i] - classes
        assert gaps.max() <= num_draws / counts[i] + classes


def test_each_batch_of_a_mixture_has_its_share_of_each_source() -> None:
    rng = np.random.default_rng(1)
    preference = rng.integers(1, 100, 1000).tolist()
    chances = chances_of(preference, draws=600, sizes=(300, 700), shares=(3, 1))
    ids = draw(chances, 600, seed=2, window=1)
    counts = np.bincount(ids, minlength=1000)
    classes = sum(len(np.unique(part[part > 0])) for part in (counts[:300], counts[300:]))
    for batch in ids.reshape(10, 60):
        assert abs(int((batch < 300).sum()) - 45) <= classes


def test_other_windows_and_seeds_are_other_draws() -> None:
    chances = chances_of(list(range(1, 101)), draws=50)
    drawn = [draw(chances, 50, seed=s, window=w).tolist() for s in (1, 2) for w in (0, 1)]
    assert len({tuple(ids) for ids in drawn}) == 4
    assert drawn[0] == draw(chances, 50, seed=1, window=0).tolist()


def test_places_in_a_window_are_even_for_hard_and_easy_samples() -> None:
    """A sample's place does not depend on how probable it is, nor on its id."""
    chances = chances_of([1] * 50 + [100] * 50, draws=40)
    places: list[list[int]] = [[], []]
    for window in range(400):
        for place, i in enumerate(draw(chances, 40, seed=4, window=window).tolist()):
            places[i >= 50].append(place)
    for each in places:
        error = 40 / np.sqrt(12 * len(each))
        assert abs(np.mean(each) - 19.5) < 4 * error


# -- fixed for ever --------------------------------------------------------------------------


def test_draws_are_pinned_by_value() -> None:
    chances = chances_of([1, 2, 3, 4, 5, 6, 7, 30], draws=12)
    ids = draw(chances, 12, seed=7, window=3)
    assert chances.points.tolist() == [
        5206723,
        7058002,
        8909281,
        10760560,
        12611839,
        14463117,
        16314396,
        58893810,
    ]
    assert ids.tolist() == [7, 6, 4, 7, 5, 7, 7, 0, 4, 7, 3, 7]
    weights = [float(w).hex() for w in chances.weights]
    assert weights == [
        "0x1.9c71c20000000p+1",
        "0x1.3043240000000p+1",
        "0x1.e213f00000000p+0",
        "0x1.8f23c80000000p+0",
        "0x1.548cea0000000p+0",
        "0x1.28f5c20000000p+0",
        "0x1.07432e0000000p+0",
        "0x1.23b5920000000p-2",
    ]


# -- memory ----------------------------------------------------------------------------------


def test_memory_grows_with_samples_and_draws_and_with_nothing_else() -> None:
    peaks = []
    for num_samples in (25_000, 100_000):
        preference = np.random.default_rng(0).integers(1, 10_000, num_samples)
        tracemalloc.start()
        chances = probabilities(
            preference, sizes=(num_samples,), shares=(1,), floor=0.2, draws=num_samples // 10
        )
        draw(chances, num_samples // 10, seed=1, window=0)
        peaks.append(tracemalloc.get_traced_memory()[1] / num_samples)
        tracemalloc.stop()
    assert max(peaks) < 100, "bytes a sample"
    assert peaks[1] == pytest.approx(peaks[0], rel=0.1)
