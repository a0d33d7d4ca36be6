"""Importance sampling, compared: ways to choose samples and to cache them, one file each.

All answer to `TrainingSource` (`base`) and draw the same for the same seed. They hold no bytes: a
cache is a set of ids, and its result is a count of hits. All samples count as equally large.

* `uniform`, `uniform-lru` – plain epochs over a cache that never evicts, and over LRU
* `importance`, `importance-loss`, `cost-aware` – Penstock's own, by its three scores
* `shade`, `shade-released` – SHADE as described, and as its program is
* `selective` – back-propagation of the samples with large losses only

`caches` has their caches, `strings` runs caches over a given string of accesses, MIN among them.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.arguments import count_of, word_of
from penstock.simulate.importance.base import Bools, DrawnStretch, Floats, TrainingSource
from penstock.simulate.importance.ours import cost_aware, importance, importance_loss
from penstock.simulate.importance.selective import SelectiveSource
from penstock.simulate.importance.shade import ShadeSource
from penstock.simulate.importance.shade_released import ShadeReleasedSource
from penstock.simulate.importance.uniform import uniform, uniform_lru

_MAKERS: dict[str, Callable[..., TrainingSource]] = {
    "uniform": uniform,
    "uniform-lru": uniform_lru,
    "importance": importance,
    "importance-loss": importance_loss,
    "cost-aware": cost_aware,
    "shade": ShadeSource,
    "shade-released": ShadeReleasedSource,
    "selective": SelectiveSource,
}
SOURCES = tuple(_MAKERS)
"""Names of the systems that can be compared."""


def source_of(
    name: str, *, num_samples: int, batch_size: int, cache_samples: int, seed: int
) -> TrainingSource:
    """Return a system by its name.

    >>> source = source_of("uniform", num_samples=4, batch_size=2, cache_samples=1, seed=0)
    >>> source.draw().ids
    array([3, 0, 1, 2])
    """
    return _MAKERS[word_of("name", name, SOURCES)](
        num_samples=count_of("num_samples", num_samples),
        batch_size=count_of("batch_size", batch_size),
        cache_samples=count_of("cache_samples", cache_samples, least=0),
        seed=seed,
    )


__all__ = ["SOURCES", "Bools", "DrawnStretch", "Floats", "TrainingSource", "source_of"]
