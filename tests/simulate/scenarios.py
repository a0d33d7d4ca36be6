"""Small scenarios to vary."""

from __future__ import annotations

from typing import Any

from penstock.simulate import Scenario, scenario_of


def flat(bytes_s: float) -> dict[str, list[float]]:
    return {"counts": [1], "bytes_s": [bytes_s]}


def tier(kind: str, capacity_bytes: int, bytes_s: float = 1e12) -> dict[str, Any]:
    return {
        "kind": kind,
        "capacity_bytes": capacity_bytes,
        "read": flat(bytes_s),
        "write": flat(bytes_s),
    }


def tables(**changes: dict[str, Any]) -> dict[str, Any]:
    """1,200 samples of 1 kB on 4 nodes, a store of 1 MB/s a request, no latency, no tier."""
    plain: dict[str, Any] = {
        "dataset": {"num_samples": 1200, "sample_bytes": 1000},
        "job": {"epochs": 3, "nodes": 4, "batch": 10, "compute_samples_s": 1000.0},
        "loader": {"threads": 1, "fill_threads": 1, "stage_bytes": 1_000_000},
        "machine": {
            "store": {"latency_s": 0.0, "latency_p99_s": 0.0, "throughput": flat(1e6)},
            "link": {"bytes_s": 1e12},
            "tiers": [],
        },
    }
    for name, table in changes.items():
        plain[name] = {**plain.get(name, {}), **table}
    return plain


def scenario(**changes: dict[str, Any]) -> Scenario:
    return scenario_of(tables(**changes))


def cached(share: float, **changes: dict[str, Any]) -> Scenario:
    """The same with memory for a share of the set on all nodes together."""
    made = scenario(**{"machine": {**tables()["machine"], "tiers": [tier("memory", 1)]}, **changes})
    return made.with_cache(share, int(made.sizes().sum()))
