"""The settings of a run as numbers: those of the traced run, and those after a change."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.report.model.what_if import WhatIf
from penstock.trace import Flag, Kind, Trace

_SAME_NAME = (
    "nodes",
    "ranks_per_node",
    "workers",
    "prefetch_factor",
    "batch_size",
    "epochs",
    "cores",
    "memory_cache_bytes",
    "disk_cache_bytes",
    "num_samples",
)
PREFETCH_FACTOR = 2
"""What torch's DataLoader takes where nothing is said."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings of a run."""

    loader: str
    nodes: int
    ranks_per_node: int
    workers: int
    prefetch_factor: int
    batch_size: int
    """Samples a step and rank."""
    epochs: int
    cores: int
    """Usable cores of a node."""
    num_samples: int
    sample_bytes: float
    """Stored bytes of a sample, mean."""
    sample_sd_bytes: float
    memory_cache_bytes: int | None
    """Of a node; None where nobody said."""
    disk_cache_bytes: int | None
    drop_last: bool = False
    persistent_workers: bool = False
    look_ahead_bytes: int = 512_000_000
    """Penstock's memory for samples on their way, per rank."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole job."""
        return self.nodes * self.ranks_per_node

    @property
    def dataset_bytes(self) -> float:
        """Stored bytes of all samples."""
        return self.num_samples * self.sample_bytes

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch: the last one may be smaller than the others."""
        steps = self.num_samples / (self.batch_size * self.num_ranks)
        return max(1, math.floor(steps) if self.drop_last else math.ceil(steps))

    @property
    def num_starts(self) -> float:
        """Workers of a rank that start one after the other; ranks share the cores for that."""
        return self.workers * max(1.0, self.ranks_per_node / self.cores)

    def changed(self, what_if: WhatIf) -> RunSettings:
        """Return the settings after a change."""
        given = {name: getattr(what_if, name) for name in _SAME_NAME}
        return replace(self, **{k: v for k, v in given.items() if v is not None})


def settings_of(trace: Trace) -> RunSettings:
    """Return the settings of a traced run: facts where it has them, else what its rows show."""
    facts = trace.facts()
    taken = trace.of(Kind.NEXT)
    ranks = max(int(facts.get("world_size", 0)), len(trace.ranks), 1)
    per_node = int(facts.get("ranks_per_node", 0)) or _ranks_per_node(trace)
    batch = int(facts.get("batch_size", 0)) or int(taken["count"].max(initial=1)) or 1
    per_rank = len(trace.of(Kind.NEXT, rank=trace.ranks[0])) if trace.ranks else len(taken)
    epochs = int(facts.get("epochs", 0)) or int(taken["epoch"].max(initial=0)) + 1
    num_samples = int(facts.get("num_samples", 0)) or max(1, per_rank * batch * ranks // epochs)
    sizes = facts.get("sample_bytes") or {}
    mean = float(sizes.get("mean", 0.0)) or float(facts.get("dataset_bytes", 0)) / num_samples
    workers = facts.get("num_workers")
    return RunSettings(
        loader=str(facts.get("loader", "torch" if len(trace.of(Kind.BATCH)) else "penstock")),
        nodes=max(1, ranks // max(1, per_node)),
        ranks_per_node=per_node,
        workers=_num_workers(trace) if workers is None else int(workers),
        prefetch_factor=int(facts.get("prefetch_factor") or PREFETCH_FACTOR),
        batch_size=batch,
        epochs=max(1, epochs),
        cores=int(facts.get("cores", 0)) or _cores(trace),
        num_samples=num_samples,
        sample_bytes=mean or _sample_bytes(trace, num_samples),
        sample_sd_bytes=float(sizes.get("sd", 0.0)),
        memory_cache_bytes=_tier_bytes(facts, "memory"),
        disk_cache_bytes=_tier_bytes(facts, "disk"),
        drop_last=bool(facts.get("drop_last", False)),
        persistent_workers=bool(facts.get("persistent_workers", False)),
        look_ahead_bytes=int(facts.get("look_ahead_bytes") or 512_000_000),
    )


def _cores(trace: Trace) -> int:
    """Return the cores of a node by its counters; one where nothing says."""
    found = [v.get("node.cores", 1.0) for p in trace.processes for _, v in p.counters[-1:]]
    return max(1, int(max(found, default=1.0)))


def _ranks_per_node(trace: Trace) -> int:
    hosts: dict[str, set[int]] = {}
    for process in trace.processes:
        if process.role != "launch":
            hosts.setdefault(process.host, set()).add(process.rank)
    return max((len(ranks) for ranks in hosts.values()), default=1)


def _num_workers(trace: Trace) -> int:
    """Return the workers of a rank by the processes that made batches; Penstock's by threads."""
    made = trace.of(Kind.BATCH)
    if len(made):
        first = made[made["rank"] == made["rank"][0]]
        trainers = {p.number for p in trace.processes if p.role == "train"}
        return len(set(first["process"].tolist()) - trainers)
    decoded = trace.of(Kind.DECODE)
    if not len(decoded):
        return 1
    first = decoded[decoded["rank"] == decoded["rank"][0]]
    pairs = set(zip(first["process"].tolist(), first["thread"].tolist(), strict=True))
    return max(1, len(pairs))


def _sample_bytes(trace: Trace, num_samples: int) -> float:
    """Return the stored bytes of a sample as they were read; 0 where no row says."""
    fetched = trace.of(Kind.FETCH)
    if len(fetched):
        first = fetched[
            (fetched["epoch"] <= 0) & (fetched["flags"] & int(Flag.HEDGE | Flag.ERROR) == 0)
        ]
        return float(first["size_bytes"].sum()) / num_samples
    samples, batches = trace.of(Kind.SAMPLE), trace.of(Kind.BATCH)
    if samples["size_bytes"].any():
        return float(samples["size_bytes"].sum()) / float(samples["count"].clip(1).sum())
    # Reads of the processes that make batches; libraries that they load count little.
    makers = set(batches["process"].tolist())
    pids = {p.pid for p in trace.processes if p.number in makers}
    numbers = [p.number for p in trace.processes if p.pid in pids]
    rows = trace.of(Kind.READ)
    rows = rows[np.isin(rows["process"], numbers) & (rows["step"] >= 0)]
    return float(rows["size_bytes"].sum()) / max(1.0, float(batches["count"].sum()))


def _tier_bytes(facts: dict[str, Any], kind: str) -> int | None:
    tiers = facts.get("tiers")
    if tiers is None:
        return None
    return sum(int(t.get("capacity_bytes", 0)) for t in tiers if kind in str(t.get("source", "")))
