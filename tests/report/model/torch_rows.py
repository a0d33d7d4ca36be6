"""Traces of torch-like runs whose every time is known: by a recurrence, not by the model."""

from pathlib import Path

import numpy as np

from penstock.trace import Kind, Recorder, Trace, read_trace

MS = 1_000_000


def taken_s(
    services: np.ndarray, computes: np.ndarray, *, workers: int, prefetch: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return when batches were begun, made and taken: batches in turn, taken in order."""
    num = len(services)
    begun, made, taken = np.zeros(num), np.zeros(num), np.zeros(num)
    asked = 0.0
    for k in range(num):
        free = made[k - workers] if k >= workers else 0.0
        told = taken[k - workers * prefetch] if k >= workers * prefetch else 0.0
        begun[k] = max(free, told)
        made[k] = begun[k] + services[k]
        taken[k] = max(asked, made[k])
        asked = taken[k] + computes[k]
    return begun, made, taken


def draw(seed: int, num_steps: int, service_s: float, compute_s: float, spread: float = 0.2):
    """Return the times of batches and steps."""
    rng = np.random.default_rng(seed)
    services = service_s * rng.lognormal(-spread * spread / 2, spread, num_steps)
    return services, np.full(num_steps, compute_s)


def torch_trace(
    folder: Path,
    *,
    workers: int = 2,
    prefetch: int = 2,
    num_steps: int = 200,
    service_s: float = 0.08,
    compute_s: float = 0.01,
    facts: dict | None = None,
) -> Trace:
    """Record a run of one rank with batches of 8 samples that only wait."""
    services, computes = draw(1, num_steps, service_s, compute_s)
    begun, made, taken = taken_s(services, computes, workers=workers, prefetch=prefetch)
    recorder = Recorder(folder, role="train", rank=0)
    recorder.facts(
        {
            "loader": "torch",
            "batch_size": 8,
            "num_workers": workers,
            "prefetch_factor": prefetch,
            "num_samples": 8 * num_steps,
            "epochs": 1,
            "cores": 64,
            "sample_bytes": {"mean": 50_000, "sd": 0},
            **(facts or {}),
        }
    )
    base, asked = 10**9, 0.0
    for step in range(num_steps):
        times = [base + int(t * 1e9) for t in (asked, taken[step], taken[step] + computes[step])]
        recorder.span(Kind.NEXT, times[0], times[1], step=step, epoch=0, count=8)
        recorder.span(Kind.LAUNCH, times[1], times[2], count=1)
        begin, end = base + int(begun[step] * 1e9), base + int(made[step] * 1e9)
        recorder.span(Kind.BATCH, begin, end, step=step, epoch=0, count=8, size_bytes=400_000)
        asked = taken[step] + computes[step]
    recorder.close()
    return read_trace(folder)
