"""How much does a cache find of an importance string, and what does each whole system find?

    python -m benchmarks.importance_hits            # half a minute
    python -m benchmarks.importance_hits --quick

First table: one string, drawn by Penstock's importance sampling (8,000 samples, windows of a
quarter of them, 40 windows, floor 0.2), and caches over it: LRU, SHADE's priority cache with the
scores of the string, Penstock's eviction with one window of foresight, and MIN with all of the
future. The difficulty of samples drifts: its correlation from window to window is 0.95.

* log-rank: a score is the logarithm of the rank of a loss in its batch of 64, as SHADE scores.
* log-normal: losses are log-normal with sigma 1, and a score is a moving average of the loss.

Second table: Penstock's hits by the size of a window, and how many samples as many draws as there
are samples visit (`distinct`). Windows are drawn independently of each other, so shorter ones
repeat sooner what the last one had.

Third table: each system with its own draws and its own cache, on log-normal losses that drift as
above. `effective` is (sum v)^2 / sum v^2 over the number of draws. SHADE weights nothing, so its
1.00 says nothing about its bias: see `importance_bias`.

The first epoch is left out everywhere, because nothing is scored or cached before it. The released
program's own count includes it, so the true share beside that count does, too.
"""

import argparse
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.samplers import SOURCES, source_of
from benchmarks.samplers.pads import log_ranks
from benchmarks.samplers.same_string import lru_hits, min_hits, priority_hits
from benchmarks.samplers.shade_released import ShadeReleasedSource
from penstock.order.importance import Importance
from penstock.simulate.importance import ImportanceSource, TrainingSource

BATCH = 64
CACHES = (0.05, 0.1, 0.2, 0.3, 0.5)
DRIFT = 0.95
WINDOW_SHARE = 0.25

Uses = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Ids, weights of the losses, scores and hits, in the order of use."""


def drifting_losses(num_samples: int, seed: int) -> Iterator[np.ndarray]:
    """Yield log-normal losses, one vector for each quarter of an epoch."""
    rng = np.random.default_rng(seed)
    level = rng.normal(size=num_samples)
    while True:
        yield np.exp(level).astype(np.float32)
        level = DRIFT * level + np.sqrt(1 - DRIFT**2) * rng.normal(size=num_samples)


def run(
    source: TrainingSource,
    num_samples: int,
    num_draws: int,
    seed: int,
    score_of: Callable[[np.ndarray], np.ndarray] = lambda losses: losses,
) -> Uses:
    """Use so many draws of a system; difficulties drift with every quarter of an epoch."""
    levels = drifting_losses(num_samples, seed)
    losses = next(levels)
    columns: tuple[list, ...] = ([], [], [], [])
    used, quarter = 0, num_samples // 4
    while used < num_draws:
        drawn = source.draw()
        for start in range(0, len(drawn.ids), BATCH):
            ids = drawn.ids[start : start + BATCH]
            hits = source.access(ids)
            source.observe(ids, losses[ids])
            weights = drawn.weights[start : start + BATCH]
            for column, part in zip(
                columns, (ids, weights, score_of(losses[ids]), hits), strict=True
            ):
                column.append(part)
            if (used + len(ids)) // quarter > used // quarter:
                losses = next(levels)
            used += len(ids)
    ids, weights, scores, hits = (np.concatenate(column) for column in columns)
    return ids, weights, scores, hits


def log_rank_scores(losses: np.ndarray) -> np.ndarray:
    scores = np.empty(len(losses))
    scores[np.argsort(losses, kind="stable")] = log_ranks(len(losses))
    return scores


def ours(score: str, window: float, num_samples: int, cached: float) -> ImportanceSource:
    options = Importance(window=window, floor=0.2, score=score)
    cache = int(cached * num_samples)
    return ImportanceSource("ours", options, num_samples=num_samples, cache_samples=cache, seed=1)


STRINGS = {"log-rank": ("loss-rank", log_rank_scores), "log-normal": ("loss", lambda x: x)}


def same_string(num_samples: int, num_draws: int) -> None:
    print("hits of caches over the same string")
    print("| weights    | cache |    LRU | SHADE's cache |   ours |    MIN | ours of MIN |")
    print("|------------|-------|--------|---------------|--------|--------|-------------|")
    for name, (score, score_of) in STRINGS.items():
        for cached in CACHES:
            source = ours(score, WINDOW_SHARE, num_samples, cached)
            ids, _, scores, found = run(source, num_samples, num_draws, 7, score_of)
            ones, capacity = np.ones(len(ids), np.int64), int(cached * num_samples)
            rows = (
                lru_hits(ids, ones, capacity),
                priority_hits(ids, scores, capacity),
                found,
                min_hits(ids, ones, capacity),
            )
            lru, shade, own, best = (float(hits[num_samples:].mean()) for hits in rows)
            print(
                f"| {name:10} | {cached:5.0%} | {lru:6.1%} | {shade:13.1%} | {own:6.1%} "
                f"| {best:6.1%} | {own / best:11.2f} |",
                flush=True,
            )


def by_window(num_samples: int, num_draws: int) -> None:
    windows = (0.05, 0.1, 0.25, 0.5, 1.0)
    print("\nours by the size of a window, as a share of the data set")
    print("| weights    | cache | " + " | ".join(f"{w:6}" for w in windows) + " |")
    print("|------------|-------|" + "--------|" * len(windows))
    for name, (score, _) in STRINGS.items():
        for cached in (0.1, 0.2):
            cells, shares = [], []
            for window in windows:
                source = ours(score, window, num_samples, cached)
                ids, _, _, hits = run(source, num_samples, num_draws, 7)
                cells.append(f"{hits[num_samples:].mean():6.1%}")
                shares.append(f"{distinct_share(ids, num_samples):6.1%}")
            print(f"| {name:10} | {cached:5.0%} | " + " | ".join(cells) + " |", flush=True)
        print(f"| distinct   |       | {' | '.join(shares)} |")


def whole_systems(num_samples: int, num_draws: int) -> None:
    print("\nwhole systems: own draws, own cache; hits by size of the cache")
    heads = " | ".join(f"{cached:5.0%}" for cached in CACHES)
    print(f"| system                  | {heads} | distinct at 20 % | effective at 20 % |")
    print(
        "|-------------------------|" + "-------|" * len(CACHES) + "-" * 18 + "|" + "-" * 19 + "|"
    )
    for name in SOURCES:
        cells, whole, published = [], [], []
        distinct = effective = 0.0
        for cached in CACHES:
            cache = int(cached * num_samples)
            source = source_of(
                name, num_samples=num_samples, batch_size=BATCH, cache_samples=cache, seed=1
            )
            ids, weights, _, hits = run(source, num_samples, num_draws, 7)
            cells.append(f"{hits[num_samples:].mean():5.1%}")
            if isinstance(source, ShadeReleasedSource):
                whole.append(f"{hits.mean():5.1%}")
                published.append(f"{source.published_hit_share:5.1%}")
            if cached == 0.2:
                distinct = distinct_share(ids, num_samples)
                effective = effective_share(weights[num_samples:])
        print(
            f"| {name:23} | {' | '.join(cells)} | {distinct:16.1%} | {effective:17.2f} |",
            flush=True,
        )
        if published:
            print(f"|   with its first epoch  | {' | '.join(whole)} | {'':16} | {'':17} |")
            print(f"|   as its README counts  | {' | '.join(published)} | {'':16} | {'':17} |")


def distinct_share(ids: np.ndarray, num_samples: int) -> float:
    starts = range(num_samples, len(ids) - num_samples + 1, num_samples)
    return (
        float(np.mean([len(np.unique(ids[at : at + num_samples])) for at in starts])) / num_samples
    )


def effective_share(weights: np.ndarray) -> float:
    total, squares = weights.sum(dtype=np.float64), np.square(weights, dtype=np.float64).sum()
    return float(total * total / (len(weights) * squares))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=8000)
    parser.add_argument("--windows", type=int, default=40, help="quarters of an epoch")
    parser.add_argument("--quick", action="store_true", help="800 samples: does it work?")
    options = parser.parse_args()
    num_samples = 800 if options.quick else options.samples
    num_draws = options.windows * num_samples // 4
    same_string(num_samples, num_draws)
    by_window(num_samples, num_draws)
    whole_systems(num_samples, num_draws)


if __name__ == "__main__":
    main()
