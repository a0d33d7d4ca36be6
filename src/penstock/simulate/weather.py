"""Weather: how a store varies around its averages, and what goes wrong with it at which time.

Latencies are drawn from a log-normal distribution through median and 99th percentile, or from
measured samples. Troubles have a start and an end; all draws come from one seed.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from penstock.errors import OptionError
from penstock.flow.cost import log_normal_s
from penstock.machine import StoreModel
from penstock.storage.retry import RetryPolicy, waits

_RETRIES = RetryPolicy(attempts_max=sys.maxsize)
"""A loader's, but never given up: a prediction has no run that fails."""
_NORMAL = NormalDist()


def _check_times(start_s: float, stop_s: float, share: float) -> None:
    if not 0 <= start_s < stop_s or not 0 <= share <= 1:
        raise OptionError(
            f"a trouble has 0 <= start_s < stop_s and a share between 0 and 1, got {start_s:g}, "
            f"{stop_s:g} and {share:g}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """Latencies and transfers take a number of times as long."""

    factor: float
    start_s: float = 0.0
    stop_s: float = math.inf

    def __post_init__(self) -> None:
        _check_times(self.start_s, self.stop_s, 1.0)
        if self.factor <= 0:
            raise OptionError(f"factor must be above 0, got {self.factor:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """A share of the requests hangs for some seconds before the first byte."""

    share: float
    stall_s: float
    start_s: float = 0.0
    stop_s: float = math.inf

    def __post_init__(self) -> None:
        _check_times(self.start_s, self.stop_s, self.share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """A share of the requests is answered with 503."""

    share: float
    start_s: float = 0.0
    stop_s: float = math.inf

    def __post_init__(self) -> None:
        _check_times(self.start_s, self.stop_s, self.share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """How a store behaves over time. The default is the machine's averages and their spread."""

    latencies_s: tuple[float, ...] = ()
    """Measured latencies to draw from; none: a log-normal through the machine's numbers."""
    excess: Literal["refuse", "queue"] = "refuse"
    """What happens to requests above the limit a second: 503, or they wait for their turn."""
    slow: tuple[Slow, ...] = ()
    stalls: tuple[Stalls, ...] = ()
    refusals: tuple[Refusals, ...] = ()
    seed: int = 0

    def factor_at(self, now_s: float) -> float:
        """Return how many times slower the store is at a time.

        >>> Weather(slow=(Slow(factor=10, start_s=2, stop_s=4),)).factor_at(3)
        10.0
        """
        return math.prod((s.factor for s in self.slow if s.start_s <= now_s < s.stop_s), start=1.0)

    def changes_s(self) -> list[float]:
        """Return the times at which the store gets slower or faster."""
        times = {t for slow in self.slow for t in (slow.start_s, slow.stop_s)}
        return sorted(t for t in times if math.isfinite(t))


class RequestWeather:
    """Draws latency, refusal and waits of each request."""

    def __init__(self, store: StoreModel, weather: Weather) -> None:
        self._store, self._weather = store, weather
        self._random = random.Random(weather.seed)

    def latency_s(self, now_s: float) -> float:
        """Return the time to the first byte of a request that begins now."""
        weather, share = self._weather, self._random.random()
        if weather.latencies_s:
            latency_s = weather.latencies_s[int(share * len(weather.latencies_s))]
        else:
            deviations = _NORMAL.inv_cdf(min(max(share, 1e-12), 1 - 1e-12))
            latency_s = log_normal_s(self._store.latency_s, self._store.latency_p99_s, deviations)
        latency_s *= weather.factor_at(now_s)
        return latency_s + sum(
            trouble.stall_s
            for trouble in weather.stalls
            if trouble.start_s <= now_s < trouble.stop_s and self._random.random() < trouble.share
        )

    def is_refused(self, now_s: float) -> bool:
        """Return whether a request that begins now is answered with 503."""
        return any(
            trouble.start_s <= now_s < trouble.stop_s and self._random.random() < trouble.share
            for trouble in self._weather.refusals
        )

    def retry_waits_s(self) -> Iterator[float]:
        """Yield how long a loader waits before it asks again, each time."""
        return waits(_RETRIES, self._random)
