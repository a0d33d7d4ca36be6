"""The limits of a machine for a data set, in samples a second.

Pure. A limit is the rate of one resource if all others took no time.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import OptionError
from penstock.machine import Curve, Machine

_NEARLY = 0.95
"""A rate this close to the best rate counts as the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimit:
    """The rate of one resource."""

    resource: str
    samples_s: float


def useful_count(curve: Curve) -> int:
    """Return the smallest count of a curve with nearly the best rate; a larger count gains nothing.

    >>> useful_count(Curve(counts=(1, 2, 4, 8), bytes_s=(10.0, 20.0, 39.0, 40.0)))
    4
    """
    best = max(curve.bytes_s)
    return next(
        count
        for count, bytes_s in zip(curve.counts, curve.bytes_s, strict=True)
        if bytes_s >= _NEARLY * best
    )


def sample_limits(machine: Machine, sample_bytes: float) -> list[ResourceLimit]:
    """Return the limits for samples of some mean size, lowest first.

    Where samples are smaller than the requests that the store was measured with, the store has two
    limits: for samples fetched one by one, and together with their neighbours.
    """
    if sample_bytes <= 0:
        raise OptionError(f"samples have more than 0 bytes, got {sample_bytes}")
    store, in_flight = machine.store, useful_count(machine.store.throughput)
    alone_s = store.read_s(sample_bytes, in_flight) / in_flight
    found = {"copies": max(machine.copy.bytes_s) / sample_bytes}
    if store.request_bytes is not None and sample_bytes < store.request_bytes / 2:
        found["store, one by one"] = 1 / alone_s
        found["store, neighbours together"] = max(store.throughput.bytes_s) / sample_bytes
    else:
        found["store"] = 1 / alone_s
    for number, tier in enumerate(machine.tiers):
        same = [t for t in machine.tiers[: number + 1] if t.kind == tier.kind]
        name = f"{tier.kind} tier" + (f" {len(same)}" if len(same) > 1 else "")
        found[name] = max(tier.read.bytes_s) / sample_bytes
    if machine.decode is not None:
        found["decoding"] = max(machine.decode.bytes_s) / sample_bytes
    limits = [ResourceLimit(resource=name, samples_s=value) for name, value in found.items()]
    return sorted(limits, key=lambda limit: limit.samples_s)
