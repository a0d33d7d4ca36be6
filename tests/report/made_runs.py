"""Traces of runs that were never run: ranks, workers and stores with known times.

A run is played in whole milliseconds with the rules of torch's DataLoader: workers take turns, each
may be some batches ahead, batches are handed over in order. What each batch goes through is given,
so the truth about every wait is known.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.trace.reading import Trace, read_trace
from penstock.trace.recorder import Recorder
from penstock.trace.schema import Flag, Kind

MS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class MadeRun:
    """A run of torch's DataLoader; times in milliseconds."""

    steps: int = 60
    epochs: int = 2
    workers: int = 2
    prefetch_factor: int = 2
    batch_size: int = 8
    read_ms: float = 0.0
    """All reads of a batch together."""
    open_ms: float = 0.0
    decode_ms: float = 0.0
    starved_ms: float = 0.0
    blocked_ms: float = 0.0
    """In which a worker neither computes nor reads nor wants a core."""
    hand_over_ms: float = 0.0
    compute_ms: float = 10.0
    lock: float = 0.0
    no_core: float = 0.0
    on_core: float = 0.1
    """Shares of the compute."""
    read_bytes: int = 1_000_000
    is_remote: bool = False
    cold_factor: float = 1.0
    """Reads of the first epoch take so many times as long."""
    slow_object: float = 1.0
    """Reads of every eighth object take so many times as long."""
    checkpoint_every: int = 0
    checkpoint_ms: float = 0.0
    checkpoint_files: int = 1
    begin_ms: float = 1.0
    """When the loop begins."""
    pause_ms: float = 0.0
    """Between two epochs."""
    window: int = 0
    resident_compute_ms: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Values at the beginning and at the end."""


def make_run(folder: Path, run: MadeRun, *, rank: int = 0) -> None:
    """Write the trace of one rank."""
    train = Recorder(folder, role="train", rank=rank)
    workers = [Recorder(folder, role="worker", rank=rank) for _ in range(run.workers)]
    train.facts({"loader": "torch", "num_workers": run.workers, "cores": 8, **run.facts})
    free = [0.0] * run.workers
    taken: list[float] = []
    now, made = run.begin_ms, 0
    for step in range(run.steps * run.epochs):
        epoch = step // run.steps
        now += run.pause_ms * (step > 0 and step % run.steps == 0)
        resident = bool(run.window and (step // run.window) % 2)
        asked = now
        if not resident:
            who = made % run.workers
            ahead = made - run.workers * run.prefetch_factor
            begin = max(free[who], taken[ahead] if ahead >= 0 else 0.0)
            free[who] = _make_batch(workers[who], run, begin, made, step)
            now = max(asked, free[who]) + run.hand_over_ms
            taken.append(now)
            made += 1
        train.span(
            Kind.NEXT, _ns(asked), _ns(now), wait_ns=_ns(now - asked), step=step, epoch=epoch,
            count=run.batch_size, size_bytes=run.read_bytes,
            flags=Flag.RESIDENT if resident else 0,
        )  # fmt: skip
        now = _compute(train, run, now, step, resident=resident)
    for name, (first, last) in run.counters.items():
        train.counters(_ns(0), {name: first})
        train.counters(_ns(now), {name: last})
    for recorder in (train, *workers):
        recorder.close()


def _make_batch(to: Recorder, run: MadeRun, begin: float, made: int, step: int) -> float:
    at, total_cpu, epoch = begin, run.decode_ms, step // run.steps
    slow = run.slow_object if made % 8 == 0 else 1.0
    object_id = to.name(f"shard-{made % 16:03}")
    if run.open_ms:
        for _ in range(run.batch_size):
            each = run.open_ms / run.batch_size
            to.span(Kind.OPEN, _ns(at), _ns(at + each), object_id=object_id)
            at += each
    if run.read_ms:
        took = run.read_ms * slow * (run.cold_factor if epoch == 0 else 1.0)
        to.span(
            Kind.READ, _ns(at), _ns(at + took), object_id=object_id, offset=made * run.read_bytes,
            size_bytes=run.read_bytes, flags=Flag.SOCKET if run.is_remote else 0,
        )  # fmt: skip
        at += took
    end = at + run.decode_ms + run.starved_ms + run.blocked_ms
    to.span(
        Kind.BATCH, _ns(begin), _ns(end), step=step, epoch=epoch, count=run.batch_size,
        cpu_ns=max(1, _ns(total_cpu)), wait_ns=_ns(run.starved_ms),
    )  # fmt: skip
    return end


def _compute(to: Recorder, run: MadeRun, now: float, step: int, *, resident: bool) -> float:
    took = run.resident_compute_ms if resident else run.compute_ms
    end = now + took
    if run.checkpoint_every and step % run.checkpoint_every == run.checkpoint_every - 1:
        for _ in range(run.checkpoint_files):
            each = run.checkpoint_ms / run.checkpoint_files
            to.span(Kind.CHECKPOINT, _ns(end), _ns(end + each))
            end += each
    whole = _ns(end) - _ns(now)
    to.span(
        Kind.LAUNCH, _ns(now), _ns(end), count=1, cpu_ns=int(run.on_core * whole),
        wait_ns=int(run.no_core * whole), lock_ns=int(run.lock * whole),
    )  # fmt: skip
    return end


def _ns(ms: float) -> int:
    return round(ms * MS) + 1


def made_trace(folder: Path, *runs: MadeRun) -> Trace:
    """Return the trace of a run with one rank for each of `runs`."""
    for rank, run in enumerate(runs):
        make_run(folder, run, rank=rank)
    return read_trace(folder)
