"""Bytes from the store against the least that any cache of the same size could do with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.report.analysis.sources import is_peer, is_remote
from penstock.report.analysis.values import BoundRatio, EpochSum
from penstock.report.model.lru import lru_hits

_MEMORY = ("memory", "disk")


def bound_ratio(
    facts: Mapping[str, Any], epochs: tuple[EpochSum, ...], *, num_nodes: int
) -> BoundRatio | None:
    """Return the ratio; None where the size of the data set or the tiers are unknown."""
    dataset_bytes = int(facts.get("dataset_bytes") or 0)
    num_samples = int(facts.get("num_samples") or 0)
    if not dataset_bytes or not num_samples or not epochs or "tiers" not in facts:
        return None
    tiers = facts["tiers"] or ()
    cache_bytes = sum(int(tier.get("capacity_bytes") or 0) for tier in tiers) * num_nodes
    num_epochs = sum(e.num_samples for e in epochs) / num_samples
    per_epoch = [store_bytes(e.bytes_by_source) for e in epochs]
    bound = min(1.0, num_epochs) * dataset_bytes
    bound += max(0.0, num_epochs - 1) * max(0, dataset_bytes - cache_bytes)
    later = sum(sum(e.bytes_by_source.values()) for e in epochs[1:])
    held = min(1.0, cache_bytes / dataset_bytes)
    return BoundRatio(
        dataset_bytes=dataset_bytes,
        cache_bytes=cache_bytes,
        num_epochs=num_epochs,
        bound_bytes=int(bound),
        store_bytes=sum(per_epoch),
        hits=1 - sum(per_epoch[1:]) / later if later else 0.0,
        hits_possible=held if len(epochs) > 1 else 0.0,
        hits_lru=float(lru_hits(held)) if len(epochs) > 1 else 0.0,
    )


def store_bytes(bytes_by_source: Mapping[str, int]) -> int:
    """Return bytes that came neither from a tier nor from a peer."""
    return sum(
        size
        for name, size in bytes_by_source.items()
        if not is_peer(name) and not (name in _MEMORY and not is_remote(name))
    )
