"""What the rows of a trace say about steps, batches, requests and the hand-over between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.report.model.constants import MakingCosts
from penstock.report.model.settings import RunSettings
from penstock.report.model.store_fit import Floats, Requests
from penstock.trace import Flag, Kind, Trace
from penstock.trace.chunks import Rows

_NS = 1e-9
_ALL_SHARE = 0.95
"""Rows of samples that stand for so much of all batches stand for all."""
_HEDGES = int(Flag.HEDGE | Flag.ERROR)


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run as it went, in the terms of a `Forecast`."""

    step_s: float
    """Mean time of a step in the last epoch, after its first half where it has 40 steps."""
    epoch_s: tuple[float, ...]
    stall_share: float
    """Share of the last epoch's time after its first batch that steps waited for batches."""
    store_bytes: float
    peer_bytes: float


def measured(trace: Trace) -> MeasuredRun:
    """Return how a run went; ranks wait for each other, so the times are those of the first."""
    taken = _taken(trace, trace.ranks[0])
    computed = float(np.median(computed_s(trace))) if len(trace.of(Kind.LAUNCH)) else 0.0
    epochs: list[Floats] = []
    for epoch in np.unique(taken["epoch"]):
        rows = taken[taken["epoch"] == epoch]
        starts, ends = rows["start_ns"] * _NS, (rows["start_ns"] + rows["duration_ns"]) * _NS
        # A step ends where the next question begins; the last one after its own work.
        epochs.append(np.append(starts[1:], ends[-1] + computed) - starts[0])
    return MeasuredRun(
        step_s=step_s_of(epochs[-1]),
        epoch_s=tuple(float(ends[-1]) for ends in epochs),
        stall_share=_stall_share(trace, computed),
        store_bytes=_store_bytes(trace),
        peer_bytes=float(trace.of(Kind.PEER_REQUEST)["size_bytes"].sum()),
    )


def _stall_share(trace: Trace, computed_s: float) -> float:
    """Return which share of the last epoch's time after its first batch went into waiting.

    Ranks wait for each other after each step, so of all waits for a batch the longest counts.
    """
    ranks = [_taken(trace, rank) for rank in trace.ranks]
    ranks = [rows[rows["epoch"] == rows["epoch"].max()] for rows in ranks if len(rows)]
    num_steps = min(map(len, ranks))
    waits = np.max([waits_s(trace, rows)[1:num_steps] for rows in ranks], axis=0)
    first = ranks[0]
    ends = first["start_ns"] + first["duration_ns"]
    rest_s = float(ends[num_steps - 1] - ends[0]) * _NS + computed_s
    return min(1.0, float(waits.sum()) / rest_s) if rest_s > 0 else 0.0


def _store_bytes(trace: Trace) -> float:
    """Return what came from the store: requests, or the samples of other loaders."""
    fetched = trace.of(Kind.FETCH)
    rows = fetched if len(fetched) else trace.of(Kind.SAMPLE)
    return float(rows["size_bytes"].sum())


def step_s_of(ends_s: Floats) -> float:
    """Return the mean time of a step: of the second half where there are enough of them."""
    num_steps = len(ends_s)
    if num_steps == 1:
        return float(ends_s[0])
    begin = num_steps // 2 if num_steps >= 40 else 0
    return float((ends_s[-1] - ends_s[begin]) / (num_steps - 1 - begin))


def _taken(trace: Trace, rank: int) -> Rows:
    rows = trace.of(Kind.NEXT, rank=rank)
    real: Rows = rows[(rows["flags"] & int(Flag.RESIDENT)) == 0]
    return real


# -- the training loop -------------------------------------------------------------------------


def computed_s(trace: Trace) -> Floats:
    """Return the time of each step between two questions, without waiting for a core or others.

    Of several ranks the shortest counts: the others waited for it in a collective or at a barrier.
    """
    ranks = []
    for rank in trace.ranks:
        rows = trace.of(Kind.LAUNCH, rank=rank)
        count = np.maximum(rows["count"], 1)
        # The run's own use of cores is replayed, and other programs come and go.
        seconds = (rows["duration_ns"] - rows["wait_ns"]) * _NS
        ranks.append(np.repeat(seconds / count, count))
    ranks = [steps for steps in ranks if len(steps)]
    if not ranks:
        return np.zeros(1)
    shortest = min(map(len, ranks))
    return np.asarray(np.min([steps[:shortest] for steps in ranks], axis=0))


def compute_cpu_share(trace: Trace) -> float:
    """Return how much of a step's own time the training thread used a core."""
    rows = trace.of(Kind.LAUNCH)
    total = float(rows["duration_ns"].sum() - rows["wait_ns"].sum())
    return min(1.0, float(rows["cpu_ns"].sum()) / total) if total > 0 else 0.0


def communicated_s(trace: Trace) -> float:
    """Return the mean time of collectives in a step, of the rank that waited least."""
    rows = trace.of(Kind.COMMUNICATE)
    if not len(rows):
        return 0.0
    steps = max(1, len(trace.of(Kind.NEXT, rank=trace.ranks[0])))
    return min(
        float(rows["duration_ns"][rows["rank"] == rank].sum()) * _NS / steps
        for rank in np.unique(rows["rank"])
    )


def interference_of(trace: Trace) -> float:
    """Return how much longer steps took beside the loader's work; 0 without resident windows."""
    taken, launched = trace.of(Kind.NEXT), trace.of(Kind.LAUNCH)
    is_resident = (taken["flags"] & int(Flag.RESIDENT)) != 0
    if not is_resident.any() or not len(launched):
        return 0.0
    ends = taken["start_ns"] + taken["duration_ns"]
    order = np.argsort(ends)
    place = np.searchsorted(ends[order], launched["start_ns"], side="right") - 1
    beside = is_resident[order][np.maximum(place, 0)]
    if beside.all() or not beside.any():
        return 0.0
    seconds = launched["duration_ns"] / np.maximum(launched["count"], 1)
    return max(0.0, float(seconds[~beside].mean() / seconds[beside].mean()) - 1)


# -- cores ---------------------------------------------------------------------------------------


def own_core_share(trace: Trace) -> float:
    """Return the share of a node's cores that the run used itself, as far as rows say."""
    facts = trace.facts()
    rows = trace.of(Kind.LAUNCH, Kind.DECODE, Kind.BATCH)
    taken = trace.of(Kind.NEXT)
    if not len(rows) or not len(taken):
        return 0.0
    ends = taken["start_ns"] + taken["duration_ns"]
    span = float(ends.max() - taken["start_ns"].min()) or 1.0
    cores = max(1, int(facts.get("cores", 1))) * max(1, int(facts.get("num_nodes", 1)))
    return min(1.0, float(rows["cpu_ns"].sum()) / span / cores)


def contended_share(trace: Trace) -> float:
    """Return which part of their time the run's threads were runnable and had no core."""
    rows = trace.of(Kind.LAUNCH, Kind.DECODE, Kind.BATCH)
    total = float(rows["duration_ns"].sum())
    return float(rows["wait_ns"].sum()) / total if total else 0.0


# -- making batches ------------------------------------------------------------------------------


def requests_of(trace: Trace, settings: RunSettings) -> Requests:
    """Return the requests of one node to the store: FETCH rows, or samples of other loaders."""
    rows = trace.of(Kind.FETCH)
    if len(rows):
        rows = rows[((rows["flags"] & _HEDGES) == 0) & (rows["size_bytes"] > 0)]
        sizes = rows["size_bytes"].astype(np.float64)
        return Requests(
            starts_s=rows["start_ns"] * _NS, durations_s=rows["duration_ns"] * _NS, sizes=sizes
        )
    rows = made_rows(trace)
    rows = rows[np.argsort(rows["start_ns"], kind="stable")]
    counts = np.maximum(rows["count"], 1)
    sizes = np.full(len(rows), settings.sample_bytes) * counts
    # The bytes of a BATCH row are those of the decoded batch.
    if (rows["kind"] == int(Kind.SAMPLE)).all() and rows["size_bytes"].any():
        sizes = rows["size_bytes"].astype(np.float64)
    return Requests(
        starts_s=rows["start_ns"] * _NS, durations_s=blocked_s(trace, rows), sizes=sizes
    )


def made_rows(trace: Trace) -> Rows:
    """Return the finest rows that say what making samples took: of all of them, or batches."""
    samples, batches = trace.of(Kind.SAMPLE), trace.of(Kind.BATCH)
    # Of quick samples only some are recorded: they would leave out what lies between them.
    num_made = float(np.maximum(batches["count"], 1).sum())
    is_whole = float(np.maximum(samples["count"], 1).sum()) >= _ALL_SHARE * num_made
    return samples if len(samples) and is_whole else batches


def blocked_s(trace: Trace, rows: Rows) -> Floats:
    """Return how long each row waited for something else than a core of its own run."""
    wait_ns = rows["wait_ns"].astype(np.float64)
    if not wait_ns.any() and len(batches := trace.of(Kind.BATCH)):
        wait_ns += batches["wait_ns"].sum() / max(1, int(batches["count"].sum()))
    own_wait = wait_ns * own_core_share(trace)
    return np.asarray(np.maximum(rows["duration_ns"] - rows["cpu_ns"] - own_wait, 1e3) * _NS)


def making_of(
    trace: Trace, settings: RunSettings, latencies_s: Floats | None
) -> MakingCosts | None:
    """Return what workers did for samples; `latencies_s` are the delays that a fit has left."""
    rows = made_rows(trace)
    if not len(rows):
        return None
    rows = rows[np.argsort(rows["start_ns"], kind="stable")]
    delay = blocked_s(trace, rows)
    if latencies_s is not None:
        rows, delay = rows[: len(latencies_s)], latencies_s[: len(rows)]
    counts = np.maximum(rows["count"], 1).astype(np.float64)
    return MakingCosts(
        counts=counts,
        delay_s=delay,
        cpu_s=rows["cpu_ns"] * _NS,
        sample_bytes=settings.sample_bytes,
        batch_s=_batch_s(trace),
    )


def _batch_s(trace: Trace) -> float:
    """Return the time of a batch beyond its samples."""
    batches, samples = trace.of(Kind.BATCH), trace.of(Kind.SAMPLE)
    if not len(samples) or not len(batches):
        return 0.0
    per_sample = float((samples["duration_ns"] / np.maximum(samples["count"], 1)).mean())
    inside = per_sample * float(np.maximum(batches["count"], 1).mean())
    return max(0.0, float(batches["duration_ns"].mean()) - inside) * _NS


# -- the hand-over -------------------------------------------------------------------------------


def waits_s(trace: Trace, taken: Rows) -> Floats:
    """Return how long each question waited for its batch to be made."""
    ready = _made_ns(trace, taken)
    if ready is None:
        # A loader that knows when its batches are ready says so in some row of the run.
        says = trace.of(Kind.NEXT)["wait_ns"].any()
        return np.asarray((taken["wait_ns"] if says else taken["duration_ns"]) * _NS)
    return np.asarray(np.clip(ready - taken["start_ns"], 0, taken["duration_ns"]) * _NS)


def _made_ns(trace: Trace, taken: Rows) -> Floats | None:
    """Return when the batch of each question was made; None where rows do not say."""
    batches = trace.of(Kind.BATCH)
    if not len(batches) or not (batches["step"] >= 0).all() or not (taken["step"] >= 0).all():
        return None
    begin = int(taken["start_ns"][0])
    made = batches[(batches["rank"] == taken["rank"][0])]
    ends = made["start_ns"] + made["duration_ns"]
    # Steps count from 0 in every epoch: a batch belongs to the first question after it was begun.
    out = np.full(len(taken), -1.0)
    for number, (step, got) in enumerate(
        zip(
            taken["step"].tolist(), (taken["start_ns"] + taken["duration_ns"]).tolist(), strict=True
        )
    ):
        fits = ends[(made["step"] == step) & (ends <= got)]
        if len(fits):
            out[number] = fits.max()
    return None if (out < 0).mean() > 0.1 else np.maximum(out, begin)


def hand_over_of(trace: Trace) -> tuple[float, float]:
    """Return the time of taking a batch that is ready, and that of its way to where it is taken."""
    taken = _taken(trace, trace.ranks[0])
    duration = taken["duration_ns"] * _NS
    made = _made_ns(trace, taken)
    low = float(np.quantile(duration, 0.1))
    if made is None:
        # A loader that knows when its batches are ready says so; others count all as waiting.
        after = duration - taken["wait_ns"] * _NS
        return (float(np.median(after)) if after.any() else low), 0.0
    start = taken["start_ns"]
    was_ready = made < start - 2e6
    after = duration - np.clip(made - start, 0, None) * _NS
    took = float(np.median(after[was_ready])) if was_ready.sum() >= 5 else low
    if (~was_ready).sum() < 5:
        return took, took
    return took, max(0.0, float(np.median(after[~was_ready])) - took)
