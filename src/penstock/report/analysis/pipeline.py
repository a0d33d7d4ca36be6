"""A loader's workers as a pipeline: what a step would take if a stage were faster, or workers more.

A step takes as long as the slowest of: its own work, making a batch shared out to the workers, the
decoding on the cores there are, and the device that reads come from. What the run took beyond that
(jitter, the start of an epoch) is a rest that a change may or may not remove.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.report.analysis.interference import settled_real
from penstock.report.analysis.values import Analysis
from penstock.report.model.constants import HAND_OVER_S


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Seconds a step, mean over ranks."""

    step_s: float
    """The step as it was."""
    own_s: float
    """Its work: all but the wait for the batch."""
    hand_over_s: float
    fetch_s: float
    open_s: float
    decode_s: float
    """A worker's time for one batch, by what it does; the sum is the time of a batch."""
    cpu_s: float
    """Processor time of a batch."""
    reading_s: float
    """Time a step in which at least one worker reads."""
    workers: int
    cores: float
    """Of one rank."""

    def step(
        self,
        *,
        fetch: float = 1.0,
        decode: float = 1.0,
        workers: int | None = None,
    ) -> float:
        """Return what a step takes, with stages that take `fetch` or `decode` times as long."""
        count = self.workers if workers is None else workers
        batch_s = (self.fetch_s + self.open_s) * fetch + self.decode_s * decode
        if not count:
            return self.own_s + batch_s
        # Reads of one disk do not get faster by being more at a time.
        serial_s = min(self.reading_s, self.fetch_s + self.open_s) * fetch
        cores_s = self.cpu_s * decode / max(1.0, self.cores)
        # A training process that made its batches itself has not handed over any yet.
        hand_over_s = self.hand_over_s if self.workers else HAND_OVER_S
        # Workers go on while a batch is handed over: it adds to the loop's own work alone.
        return max(self.own_s + hand_over_s, batch_s / count, serial_s, cores_s)

    def gain(
        self,
        *,
        fetch: float = 1.0,
        decode: float = 1.0,
        workers: int | None = None,
        share: float = 1.0,
    ) -> tuple[float, float, float]:
        """Return the gain of throughput by a change, and its least and largest likely value.

        `share`: of the steps, so many gain from it.
        """
        now_s = self.step()
        new_s = share * self.step(fetch=fetch, decode=decode, workers=workers)
        new_s += (1 - share) * now_s
        rest_s = max(0.0, self.step_s - now_s)
        if now_s > self.step_s:
            # The run was faster than its stages say: they overlap more than is assumed here.
            new_s *= self.step_s / now_s
        middle, low, high = (self.step_s / (new_s + rest_s * x) - 1 for x in (0.5, 1.0, 0.0))
        return middle, min(middle, 0.75 * low), 1.25 * high

    def without(self, *, fetch: float = 1.0, decode: float = 1.0) -> float:
        """Return the share of a step that would be gone if a stage took less time, or none."""
        return max(0.0, 1 - self.step(fetch=fetch, decode=decode) / max(1e-12, self.step()))


def own_hand_over(analysis: Analysis) -> float:
    """Return the share of the time of handing over that the loader itself is responsible for.

    Handing over takes two wake-ups, of the sender and of the training thread. On a contended
    machine each waits for a core that others use, which no change of the loader would spare it.
    """
    return (1 - analysis.system.contention) ** 2


def pipeline_of(analysis: Analysis) -> Pipeline | None:
    """Return the pipeline of a foreign loader; None where its workers were not seen."""
    table, load = analysis.steps, analysis.workers
    kept = settled_real(table)
    if analysis.loader == "penstock" or not load.batch_s_mean or not kept.any():
        return None
    wall_s, wait_s = float(table.wall_s[kept].mean()), float(table.wait_s[kept].mean())
    samples = float(table.samples[kept].mean())
    batch_s = load.batch_s_mean
    return Pipeline(
        step_s=wall_s,
        own_s=wall_s - wait_s,
        hand_over_s=float(np.mean(table.parts["hand-over"][kept])),
        fetch_s=load.fetch * batch_s,
        open_s=load.open * batch_s,
        decode_s=max(0.0, 1 - load.fetch - load.open) * batch_s,
        cpu_s=load.cpu_per_sample_s * samples,
        reading_s=load.reading * wall_s,
        workers=load.num_workers,
        cores=analysis.cores_per_rank,
    )
