"""The compared systems: what they draw, whom they score, what they find cached."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.samplers import SOURCES, source_of
from benchmarks.samplers.pads import AccuracyTrend, Smoothing, log_ranks
from benchmarks.samplers.selective import SelectiveSource
from benchmarks.samplers.shade import ShadeSource
from benchmarks.samplers.shade_released import ShadeReleasedSource
from tests.compared.samplers.runs import difficulties, epochs_of

from penstock.errors import OptionError
from penstock.flow.bound import lru_hit_ratio
from penstock.order import Ids

F = 6400
B = 64


@pytest.mark.parametrize("name", SOURCES)
def test_a_seed_gives_one_stream_and_another_seed_another(name: str) -> None:
    def stream(seed: int) -> list[int]:
        made = source_of(name, num_samples=640, batch_size=B, cache_samples=128, seed=seed)
        assert made.name == name
        runs = epochs_of(made, difficulties(640), B, 4)
        return np.concatenate([epoch.ids for epoch in runs]).tolist()

    assert stream(1) == stream(1) != stream(2)


@pytest.mark.parametrize("name", SOURCES)
def test_a_stretch_has_a_weight_for_each_id_and_ids_of_the_data_set(name: str) -> None:
    made = source_of(name, num_samples=1000, batch_size=B, cache_samples=200, seed=5)
    for epoch in epochs_of(made, difficulties(1000), B, 4):
        assert epoch.ids.dtype == np.int64
        assert epoch.weights.dtype == np.float32
        assert len(epoch.ids) == len(epoch.weights) == len(epoch.hits)
        assert 0 <= epoch.ids.min() <= epoch.ids.max() < 1000


def test_a_name_that_there_is_not_is_refused() -> None:
    with pytest.raises(OptionError, match="shade-released"):
        source_of("shades", num_samples=9, batch_size=3, cache_samples=1, seed=0)


def test_plain_epochs_visit_every_sample_once_and_find_what_the_cache_holds() -> None:
    made = source_of("uniform", num_samples=F, batch_size=B, cache_samples=F // 5, seed=1)
    first, *later = epochs_of(made, difficulties(F), B, 4)
    assert first.hit_share == 0
    for epoch in later:
        assert epoch.hit_share == 0.2
        assert np.array_equal(np.sort(epoch.ids), np.arange(F))


def test_lru_on_plain_epochs_finds_what_its_formula_says() -> None:
    made = source_of("uniform-lru", num_samples=F, batch_size=B, cache_samples=F // 2, seed=1)
    _, *later = epochs_of(made, difficulties(F), B, 4)
    assert np.mean([e.hit_share for e in later]) == pytest.approx(lru_hit_ratio(0.5), abs=0.01)


class Attribution:
    """Counts how many scores of a batch went to the sample whose loss they stand for."""

    def __init__(self, source: ShadeSource | ShadeReleasedSource, losses: np.ndarray) -> None:
        self.source, self.losses = source, losses
        self.right = self.all = 0

    def __call__(self, ids: Ids) -> None:
        ranked = ids.reshape(-1, len(ids) // self.num_ranks)
        order = np.argsort(self.losses[ranked], axis=1, kind="stable")
        true = np.take_along_axis(ranked, order, axis=1).ravel()
        self.right += int((self.source.scored == true).sum())
        self.all += len(true)

    num_ranks = 1


def test_shade_as_described_gives_each_score_to_its_own_sample() -> None:
    losses = difficulties(F)
    made = ShadeSource(num_samples=F, batch_size=B, cache_samples=F // 5, seed=1)
    count = Attribution(made, losses)
    list(epochs_of(made, losses, B, 8, count))
    assert count.right == count.all == 8 * F
    assert np.corrcoef(made.weights, losses)[0, 1] > 0.7


@pytest.mark.parametrize("num_ranks", [1, 4, 8])
def test_shade_as_released_gives_its_scores_to_other_samples(num_ranks: int) -> None:
    # The original program with stubs of torch and Redis: 0.03 to 0.1 % of scores went to the
    # right sample, and weights had a correlation of -0.006 to 0.02 with the difficulty.
    losses = difficulties(F)
    made = ShadeReleasedSource(
        num_samples=F, batch_size=B, cache_samples=F // 5, seed=1, num_ranks=num_ranks
    )
    count = Attribution(made, losses)
    count.num_ranks = num_ranks
    list(epochs_of(made, losses, B, 8, count))
    assert count.right / count.all < 0.002
    for weights in made.weights:
        assert abs(np.corrcoef(weights, losses)[0, 1]) < 0.05


@pytest.mark.parametrize(
    ("num_ranks", "published"),
    [(1, 0.43), (4, 0.23), (8, 0.185)],
)
def test_coverage_of_the_released_program_collapses_with_ranks(
    num_ranks: int, published: float
) -> None:
    made = ShadeReleasedSource(
        num_samples=F, batch_size=B, cache_samples=F // 5, seed=1, num_ranks=num_ranks
    )
    *_, last = epochs_of(made, difficulties(F), B, 8)
    assert last.distinct_share(F) == pytest.approx(published, abs=0.06)


@pytest.mark.parametrize(
    ("cached", "replication", "hits", "distinct"),
    [
        (0.05, 3, 0.18, 0.58),
        (0.1, 1, 0.12, 0.63),
        (0.1, 3, 0.35, 0.53),
        (0.2, 3, 0.71, 0.38),
        (0.3, 3, 1.0, 0.21),
        (0.5, 2, 1.0, 0.34),
    ],
)
def test_replays_make_the_hits_and_cost_coverage(
    cached: float, replication: float, hits: float, distinct: float
) -> None:
    """The table of an independent emulation with correct scores, in which all have one."""
    made = ShadeSource(
        num_samples=F,
        batch_size=B,
        cache_samples=int(F * cached),
        seed=1,
        replication=replication,
    )
    losses = difficulties(F)
    for batch in np.random.default_rng(2).permutation(F).reshape(-1, B):
        made.observe(batch, losses[batch])
    *_, last = epochs_of(made, losses, B, 8)
    assert last.hit_share == pytest.approx(hits, abs=0.04)
    assert last.distinct_share(F) == pytest.approx(distinct, abs=0.04)


@pytest.mark.parametrize("replication", [1.0, 2.0, 2.5, 3.0])
def test_hits_of_the_released_program_are_replays_by_construction(replication: float) -> None:
    made = ShadeReleasedSource(
        num_samples=F, batch_size=B, cache_samples=F // 5, seed=1, replication=replication
    )
    losses = difficulties(F)
    list(epochs_of(made, losses, B, 5))
    chance = made.weights[0, made.cached].sum() / made.weights.sum()
    (last,) = epochs_of(made, losses, B, 1)
    # Somewhat more: misses that are kept can be drawn again in the same epoch.
    assert min(1, replication * chance) - 0.02 < last.hit_share
    assert last.hit_share < min(1, replication * chance) + 0.1


def test_the_released_program_uses_cached_samples_first() -> None:
    made = ShadeReleasedSource(num_samples=F, batch_size=B, cache_samples=F // 10, seed=1)
    *_, last = epochs_of(made, difficulties(F), B, 4)
    half = len(last.hits) // 2
    assert last.hits[:half].mean() > 4 * last.hits[half:].mean()


def test_the_published_count_leaves_first_misses_out() -> None:
    made = ShadeReleasedSource(num_samples=F, batch_size=B, cache_samples=F // 5, seed=1)
    runs = list(epochs_of(made, difficulties(F), B, 3))
    true = np.concatenate([epoch.hits for epoch in runs]).mean()
    assert made.published_hit_share > true + 0.05


def test_a_batch_that_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(OptionError, match="multiple of 3"):
        ShadeReleasedSource(num_samples=F, batch_size=B, cache_samples=9, seed=1, num_ranks=3)


def test_log_ranks_span_what_their_logarithm_says() -> None:
    ranks = log_ranks(256)
    assert ranks[-1] / ranks[0] == pytest.approx(2.42, abs=0.005)


def test_smoothing_starts_at_a_hundredth_of_the_loss_and_follows_it() -> None:
    smoothing = Smoothing()
    smoothing.end_epoch()
    assert smoothing.term == 0
    for loss in (2.0, 1.0):
        smoothing.observe(loss)
        smoothing.end_epoch()
    assert smoothing.term == pytest.approx(0.02 * np.exp(-0.5))


def test_progress_is_the_mean_of_the_last_three_changes() -> None:
    progress = AccuracyTrend()
    said = [progress.improves]
    for accuracy in (10.0, 20.0, 15.0, 14.0, 18.0, 16.0, 16.0):
        progress.validated(accuracy)
        said.append(progress.improves)
    # Changes: 0 (the first), 10, -5 | 0+10-5, 10-5-1, -5-1+4, -1+4-2, 4-2+0
    assert said == [True, False, True, True, True, False, True, True]


def test_replays_of_shade_stop_when_accuracy_no_longer_improves() -> None:
    made = ShadeSource(num_samples=F, batch_size=B, cache_samples=F // 5, seed=1, replication=3)
    *_, before = epochs_of(made, difficulties(F), B, 4)
    made.validated(50.0)
    made.validated(40.0)
    (after,) = epochs_of(made, difficulties(F), B, 1)
    assert before.hit_share > 2 * after.hit_share


def test_selective_trains_on_a_third_that_is_the_harder_part() -> None:
    losses = difficulties(F)
    made = SelectiveSource(num_samples=F, batch_size=B, cache_samples=F // 5, seed=1)
    first, second = epochs_of(made, losses, B, 2)
    assert np.array_equal(first.weights, np.ones(F, np.float32))
    chosen = second.weights > 0
    assert chosen.mean() == pytest.approx(1 / 3, abs=0.02)
    # Density of the chosen is 3 u², so their mean percentile is 3/4.
    assert losses[second.ids[chosen]].mean() == pytest.approx(0.75, abs=0.02)
    assert second.hit_share == 0.2


def test_selective_weights_make_a_mean_over_the_chosen_of_each_batch() -> None:
    losses = difficulties(1000)
    made = SelectiveSource(num_samples=1000, batch_size=B, cache_samples=0, seed=1)
    *_, last = epochs_of(made, losses, B, 2)
    for start in range(0, 1000, B):
        part = slice(start, start + B)
        weights, values = last.weights[part], losses[last.ids[part]]
        assert np.mean(weights * values) == pytest.approx(values[weights > 0].mean(), rel=1e-5)
