"""A machine as it is now: what was measured once, corrected by what a run observes.

Each finished request is compared with the time that it should have taken. The ratio is averaged
with weights that halve with observations and with time, and as logarithms: ten times slower and ten
times faster weigh the same, and one straggler does not count as twenty.

According to the machine, a request is partly latency and partly transfer. Its ratio is evidence on
both, in these proportions: small requests correct the latency, large ones the throughput, and where
all are of one size both move alike.

Pure: no clock, no lock. The caller gives the time, and calls from one thread at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from penstock.errors import OptionError
from penstock.machine import Curve, Machine, StoreModel, TierModel

STORE = "store"
"""The source that owns the data."""


def tier_source(number: int) -> str:
    """Return the source that a tier is, by its place in `Machine.tiers`.

    >>> tier_source(0)
    'tier0'
    """
    return f"tier{number}"


@dataclass(slots=True)
class _Average:
    """A weighted mean that forgets; the machine as it was measured is its first observation."""

    weight: float
    sum: float = 0.0

    @property
    def factor(self) -> float:
        return math.exp(self.sum / self.weight)

    def fade(self, share: float, weight_min: float) -> None:
        """Let what is known count for less, but not for so little that one answer decides."""
        kept = max(share, min(1.0, weight_min / self.weight))
        self.weight *= kept
        self.sum *= kept

    def add_step(self, step: float, weight: float) -> None:
        """Take an observation that lies so far from the mean."""
        value = self.sum / self.weight + step
        self.weight += weight
        self.sum += weight * value


class LiveRates:
    """Refines a machine with what a run observes.

    At first the machine counts as `prior_observations` of each source. Later, everything seen
    before counts as at least that many, however long ago it was.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        half_life_observations: float = 64.0,
        half_life_s: float = 10.0,
        prior_observations: float = 8.0,
    ) -> None:
        lowest = min(half_life_observations, half_life_s, prior_observations)
        if not lowest > 0:
            raise OptionError(
                "half lives and the weight of the machine are above 0, got "
                f"{half_life_observations=}, {half_life_s=}, {prior_observations=}"
            )
        machine = self._machine = machine.without_latency()
        self._half_life_observations = half_life_observations
        self._half_life_s = half_life_s
        self._weight_min = min(prior_observations, half_life_observations)
        tiers = {tier_source(i): tier for i, tier in enumerate(machine.tiers)}
        self._models: dict[str, StoreModel | TierModel] = {STORE: machine.store, **tiers}
        self._transfer = {name: _Average(prior_observations) for name in self._models}
        self._latency = {name: _Average(prior_observations) for name in self._models}
        self._seen_s: dict[str, float] = {}

    def observe(
        self, source: str, *, size_bytes: int, seconds: float, in_flight: float, at_s: float
    ) -> None:
        """Take one request: how much it brought, how long it took, beside how many in all.

        `in_flight` counts the request itself. One without bytes or without time says nothing.
        """
        if source not in self._models:
            raise OptionError(
                f"this machine has no source {source!r}; it has: {', '.join(self._models)}"
            )
        if not (size_bytes >= 0 and seconds >= 0 and in_flight >= 1):
            raise OptionError(
                "sizes and times are at least 0 and requests in flight at least 1, got "
                f"{size_bytes=}, {seconds=}, {in_flight=}"
            )
        if size_bytes == 0 or seconds == 0:
            return
        self._fade(source, at_s)
        expected_s, latency_share = self._expected(source, size_bytes, in_flight)
        slower = math.log(seconds / expected_s)
        self._latency[source].add_step(slower, latency_share)
        self._transfer[source].add_step(slower, 1 - latency_share)

    def _expected(self, source: str, size_bytes: int, in_flight: float) -> tuple[float, float]:
        """Return the time that a request should take by now, and the share of it that is latency.

        By now, not as measured: else a latency that has grown would count against the transfers of
        large requests for ever.
        """
        model = self._models[source]
        latency, transfer = self.slowdown(source)
        latency_s = model.latency_s * latency
        alone_s = latency_s + (model.read_s(size_bytes, 1) - model.latency_s) * transfer
        shared_s = in_flight * size_bytes / _curve(model).at(in_flight) * transfer
        # Where many share a full pipe, they wait for each other and not for first bytes.
        return (alone_s, latency_s / alone_s) if alone_s >= shared_s else (shared_s, 0.0)

    def _fade(self, source: str, at_s: float) -> None:
        passed_s = max(0.0, at_s - self._seen_s.get(source, at_s))
        self._seen_s[source] = at_s
        share = 0.5 ** (1 / self._half_life_observations + passed_s / self._half_life_s)
        self._latency[source].fade(share, self._weight_min)
        self._transfer[source].fade(share, self._weight_min)

    def slowdown(self, source: str) -> tuple[float, float]:
        """Return how many times as long as promised latency and transfer take by now."""
        return self._latency[source].factor, self._transfer[source].factor

    def machine(self) -> Machine:
        """Return the machine as it is now; its curves are those of the transfer alone."""
        latency, transfer = self.slowdown(STORE)
        store = self._machine.store
        return replace(
            self._machine,
            store=replace(
                store,
                latency_s=store.latency_s * latency,
                latency_p99_s=store.latency_p99_s * latency,
                throughput=_slower(store.throughput, transfer),
            ),
            tiers=tuple(self._tier(*item) for item in enumerate(self._machine.tiers)),
        )

    def _tier(self, number: int, tier: TierModel) -> TierModel:
        latency, transfer = self.slowdown(tier_source(number))
        return replace(tier, latency_s=tier.latency_s * latency, read=_slower(tier.read, transfer))


def _curve(model: StoreModel | TierModel) -> Curve:
    return model.throughput if isinstance(model, StoreModel) else model.read


def _slower(curve: Curve, factor: float) -> Curve:
    return replace(curve, bytes_s=tuple(rate / factor for rate in curve.bytes_s))
