"""What a run needs so that it does not wait: bandwidth, workers, cores, cache.

Each resource is varied alone, all others as the question has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock.report.model.run_model import RunModel
from penstock.report.model.what_if import WhatIf

NO_STALL = 0.01
"""A loop that waits for less of its time does not wait."""
LITTLE_STALL = 0.05
_STEPS = 24
"""Values that are tried of a resource, in geometric steps over three decades."""


@dataclass(frozen=True, kw_only=True)
class ResourceNeed:
    """How much of a resource keeps a run from waiting. None: no amount of it alone does."""

    resource: str
    """A field of `WhatIf`."""
    has: float | None
    """What the question has of it; None where nobody knows."""
    no_stall: float | None
    little_stall: float | None
    """For at most 5 % of the time."""


def needs(model: RunModel, what_if: WhatIf | None = None) -> tuple[ResourceNeed, ...]:
    """Return what a run needs of each resource for no stall, and for a stall of at most 5 %."""
    base = what_if or WhatIf()
    settings = model.settings.changed(base)
    store = model.constants.store_for(base)
    own_s = float(model.constants.computed_s(settings.batch_size, base).mean())
    samples_s = settings.batch_size * settings.num_ranks / max(own_s, 1e-9)
    demand = samples_s * settings.sample_bytes
    out = []
    if store is not None and demand > 0:
        has = None if store.bytes_s == float("inf") else store.bytes_s
        out.append(_need(model, base, "store_bandwidth", has, _geometric(demand / 30, 1000.0)))
    if model.loader != "penstock":
        workers = [float(n) for n in (*range(1, 9), *range(10, 33, 2), *range(40, 129, 8))]
        out.append(_need(model, base, "workers", settings.workers, workers))
    cores = [float(n) for n in (*range(1, 9), *range(12, 65, 4), 96, 128, 192, 256)]
    out.append(_need(model, base, "cores", settings.cores, cores))
    if settings.epochs > 1 and settings.sample_bytes > 0:
        share = settings.dataset_bytes / (settings.nodes if model.loader == "penstock" else 1)
        sizes = [share * n / 20 for n in range(21)]
        has_bytes = settings.memory_cache_bytes
        out.append(_need(model, base, "memory_cache_bytes", has_bytes, sizes))
    return tuple(out)


def _geometric(least: float, factor: float) -> list[float]:
    return [least * factor ** (n / (_STEPS - 1)) for n in range(_STEPS)]


def _need(
    model: RunModel, base: WhatIf, resource: str, has: float | None, values: list[float]
) -> ResourceNeed:
    stalls: dict[int, float] = {}

    def stall(place: int) -> float:
        if place not in stalls:
            value: Any = values[place]
            value = value if resource == "store_bandwidth" else int(value)
            question = replace(base, **{resource: value})
            stalls[place] = model.outline(question).stall_share
        return stalls[place]

    return ResourceNeed(
        resource=resource,
        has=has,
        no_stall=_least(values, lambda place: stall(place) <= NO_STALL),
        little_stall=_least(values, lambda place: stall(place) <= LITTLE_STALL),
    )


def _least(values: list[float], is_enough: Callable[[int], bool]) -> float | None:
    """Return the smallest value that is enough; more is never worse.

    >>> _least([1.0, 2.0, 4.0, 8.0], lambda place: place >= 2)
    4.0
    """
    low, high = 0, len(values) - 1
    if not is_enough(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle + 1
    return values[low]
