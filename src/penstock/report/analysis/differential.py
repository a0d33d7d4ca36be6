"""Differential runs: the same job with real, with cached and with resident data.

What a step takes longer with real than with cached data is fetching; what it takes longer with
cached data than with a batch that is already there is making and handing over batches, and the
interference of that work with the step. The attribution inside of the runs splits these further.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.report.analysis.values import WAITS, Analysis


@dataclass(frozen=True, kw_only=True)
class DifferentialSplit:
    """The mean step of a job, split by comparing runs of it."""

    real_s: float
    """A step as the job runs."""
    cached_s: float
    """The same when the files are in the page cache; `real_s` where no such run was made."""
    resident_s: float
    """The same when the batch is already there."""
    fetch_s: float
    decode_s: float
    hand_over_s: float
    other_wait_s: float
    """Waits for batches for other reasons: depth, order, cores."""
    interference_s: float
    copy_s: float
    communicate_s: float
    """Copies and collectives, barriers included: parts of `resident_s`."""

    @property
    def unexplained_s(self) -> float:
        """What the parts do not add up to: the runs differ among themselves."""
        parts = self.fetch_s + self.decode_s + self.hand_over_s + self.other_wait_s
        return self.real_s - self.resident_s - parts - self.interference_s


def differential_split(
    real: Analysis, differential: Analysis, cached: Analysis | None = None
) -> DifferentialSplit:
    """Return the split; `differential` is a run with resident windows."""
    warm = cached or real
    measured = differential.interference
    resident = differential.steps.is_resident
    resident_s = measured.resident_s + float(differential.steps.wait_s[resident].mean())
    waits = {name: warm.parts[name] * warm.step_mean_s for name in WAITS}
    saved = max(0.0, real.step_mean_s - warm.step_mean_s)
    known = ("fetch", "open", "decode", "hand-over")
    return DifferentialSplit(
        real_s=real.step_mean_s,
        cached_s=warm.step_mean_s,
        resident_s=resident_s,
        fetch_s=saved + waits["fetch"] + waits["open"],
        decode_s=waits["decode"],
        hand_over_s=waits["hand-over"],
        other_wait_s=sum(v for n, v in waits.items() if n not in known),
        interference_s=max(0.0, measured.real_s - measured.resident_s),
        copy_s=real.parts["copy"] * real.step_mean_s,
        communicate_s=(real.parts["communicate"] + real.parts["barrier"]) * real.step_mean_s,
    )
