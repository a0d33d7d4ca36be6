"""Systems of importance sampling that Penstock's are compared with, behind the same interface.

* `shade`, `shade-released` – SHADE as described, and as its program is
* `selective` – back-propagation of the samples with large losses only

`SOURCES` and `source_of` have those of `penstock.simulate.importance` as well. `same_string` runs
caches over a given string of accesses, MIN among them.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.samplers.selective import SelectiveSource
from benchmarks.samplers.shade import ShadeSource
from benchmarks.samplers.shade_released import ShadeReleasedSource
from penstock.arguments import word_of
from penstock.simulate import importance
from penstock.simulate.importance import TrainingSource

_MAKERS: dict[str, Callable[..., TrainingSource]] = {
    "shade": ShadeSource,
    "shade-released": ShadeReleasedSource,
    "selective": SelectiveSource,
}
SOURCES = (*importance.SOURCES, *_MAKERS)
"""Names of the systems that can be compared."""


def source_of(
    name: str, *, num_samples: int, batch_size: int, cache_samples: int, seed: int
) -> TrainingSource:
    """Return a system by its name.

    >>> source = source_of("shade", num_samples=4, batch_size=2, cache_samples=1, seed=0)
    >>> len(source.draw().ids)
    4
    """
    make = _MAKERS.get(word_of("name", name, SOURCES))
    if make is None:
        return importance.source_of(
            name,
            num_samples=num_samples,
            batch_size=batch_size,
            cache_samples=cache_samples,
            seed=seed,
        )
    return make(
        num_samples=num_samples, batch_size=batch_size, cache_samples=cache_samples, seed=seed
    )


def tell_accuracy(source: TrainingSource, accuracy: float) -> None:
    """Tell a system the validation accuracy of an epoch, if it looks at it: only SHADE does."""
    if isinstance(source, ShadeSource | ShadeReleasedSource):
        source.validated(accuracy)
