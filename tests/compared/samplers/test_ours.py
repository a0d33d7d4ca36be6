"""Penstock's importance sampling as a compared system: its cache and its bias, beside SHADE's."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.samplers import source_of
from benchmarks.samplers.same_string import lru_hits, min_hits, priority_hits
from tests.compared.samplers.runs import difficulties, epochs_of

from penstock.order.importance import Importance
from penstock.simulate.importance import ImportanceSource

F = 2000
B = 50
OURS = ("importance", "importance-loss", "cost-aware")
LOSSES = np.exp(np.random.default_rng(4).normal(size=F)).astype(np.float32)


def made(name: str, cached: float = 0.2, seed: int = 1) -> ImportanceSource:
    source = source_of(name, num_samples=F, batch_size=B, cache_samples=int(cached * F), seed=seed)
    assert isinstance(source, ImportanceSource)
    return source


@pytest.mark.parametrize(("cached", "least", "shade_most"), [(0.1, 0.27, 0.13), (0.2, 0.36, 0.24)])
def test_on_the_same_string_ours_lies_between_the_cache_of_shade_and_min(
    cached: float, least: float, shade_most: float
) -> None:
    losses = difficulties(F)
    source = ImportanceSource(
        "ours", Importance(window=0.25), num_samples=F, cache_samples=int(cached * F), seed=1
    )
    scores: list[np.ndarray] = []

    def score(ids: np.ndarray) -> None:
        ranks = np.argsort(np.argsort(losses[ids]))
        scores.append(np.log(10 + ranks))

    runs = list(epochs_of(source, losses, B, 40, score))
    ids, ones = np.concatenate([run.ids for run in runs]), np.ones(40 * F // 4, np.int64)
    capacity = int(cached * F)
    ours, lru, shade, most = (
        hits[F:].mean()  # The first epoch is plain.
        for hits in (
            np.concatenate([run.hits for run in runs]),
            lru_hits(ids, ones, capacity),
            priority_hits(ids, np.concatenate(scores), capacity),
            min_hits(ids, ones, capacity),
        )
    )
    assert lru < shade < shade_most < least < ours <= most


@pytest.mark.parametrize("name", OURS)
def test_hits_of_the_whole_system_never_pass_min_of_its_string(name: str) -> None:
    runs = list(epochs_of(made(name), LOSSES, B, 40))
    ids, hits = (np.concatenate([getattr(run, part) for run in runs]) for part in ("ids", "hits"))
    assert hits.sum() <= min_hits(ids, np.ones(len(ids), np.int64), F // 5).sum()


def test_cost_aware_draws_find_more_in_the_cache_than_draws_by_loss() -> None:
    aware, loss = (
        np.mean([run.hit_share for run in list(epochs_of(made(name), LOSSES, B, 40))[20:]])
        for name in ("cost-aware", "importance-loss")
    )
    assert aware > loss + 0.1


@pytest.mark.parametrize("name", ["importance", "importance-loss"])
def test_the_string_does_not_depend_on_the_cache(name: str) -> None:
    small, large = (
        np.concatenate([run.ids for run in epochs_of(made(name, cached), LOSSES, B, 25)])
        for cached in (0.05, 0.5)
    )
    assert np.array_equal(small, large)


def test_batches_out_of_order_are_noticed() -> None:
    source = made("importance")
    drawn = source.draw()
    with pytest.raises(AssertionError, match="in the order drawn"):
        source.access(drawn.ids[::-1])


def mean_loss_of_stretches(name: str) -> np.ndarray:
    """Estimates of the mean loss, one for each F draws, after three epochs."""
    source = source_of(name, num_samples=F, batch_size=B, cache_samples=F // 5, seed=1)
    values: list[np.ndarray] = []
    while sum(map(len, values)) < 33 * F:
        (run,) = epochs_of(source, LOSSES, B, 1)
        values.append(run.weights * LOSSES[run.ids])
    return np.concatenate(values)[: 33 * F].reshape(33, F)[3:].mean(axis=1, dtype=np.float64)


@pytest.mark.parametrize("name", [*OURS, "uniform"])
def test_the_weighted_mean_of_the_draws_is_the_mean_of_the_data_set(name: str) -> None:
    estimates = mean_loss_of_stretches(name)
    error = float(estimates.std(ddof=1)) / len(estimates) ** 0.5
    assert estimates.mean() == pytest.approx(LOSSES.mean(dtype=np.float64), abs=3.5 * error + 1e-6)


@pytest.mark.parametrize(("name", "least"), [("shade", 1.05), ("selective", 1.5)])
def test_systems_that_weight_nothing_estimate_another_mean(name: str, least: float) -> None:
    estimates = mean_loss_of_stretches(name)
    assert estimates.min() > least * LOSSES.mean()
