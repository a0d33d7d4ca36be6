"""Tables of runs: means over seeds with 95 % confidence intervals, and times to an accuracy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.importance_accuracy.training import Run
from benchmarks.importance_accuracy.wall_time import Clock, wall_s

Floats = NDArray[np.float64]

T_975 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179]
"""Quantiles of Student's t for 1, 2, ... degrees of freedom; the last serves for more."""
FRACTIONS = (0.25, 0.5, 0.75)
BASE = "uniform"


@dataclass(frozen=True, slots=True)
class Interval:
    mean: float
    half: float
    """Half the width of the 95 % confidence interval; NaN for one seed."""

    def percent(self, digits: int = 2) -> str:
        half = "" if np.isnan(self.half) else f" ± {100 * self.half:.{digits}f}"
        return f"{100 * self.mean:.{digits}f}{half}"


def interval(values: Sequence[float]) -> Interval:
    """Mean and confidence interval over seeds.

    >>> interval([0.89, 0.90, 0.91]).percent()
    '90.00 ± 2.48'
    """
    num = len(values)
    half = np.nan
    if num > 1:
        half = T_975[min(num - 2, len(T_975) - 1)] * np.std(values, ddof=1) / num**0.5
    return Interval(float(np.mean(values)), float(half))


def time_to(target: float, accuracies: Floats, seconds: Floats) -> float | None:
    """When a curve first reaches an accuracy, with a straight line between measurements.

    >>> time_to(0.75, np.array([0.5, 1.0]), np.array([10.0, 20.0]))
    15.0
    """
    reached = np.flatnonzero(accuracies >= target)
    if not len(reached):
        return None
    at = reached[0]
    if at == 0:
        return float(seconds[0])
    before, after = accuracies[at - 1], accuracies[at]
    share = (target - before) / (after - before)
    return float(seconds[at - 1] + share * (seconds[at] - seconds[at - 1]))


def seconds_of(run: Run, clock: Clock, slowness: float) -> Floats:
    """Wall time at each measurement of a run's accuracy."""
    batch_size = run.recipe["batch_size"]
    misses = batch_size - np.array(run.hits)
    shares = np.array(run.compute_shares)
    all_s = wall_s(misses, shares, clock, batch_size=batch_size, slowness=slowness)
    return all_s[np.array(run.steps) - 1]


class Summary:
    """Rows of the table, one for each system and number of epochs."""

    def __init__(self, runs: Sequence[Run], clock: Clock, slownesses: Sequence[float]) -> None:
        self._clock, self._slownesses = clock, slownesses
        self._groups: dict[tuple[str, float], list[Run]] = {}
        for run in sorted(runs, key=lambda run: run.seed):
            self._groups.setdefault((run.system, run.recipe["epochs"]), []).append(run)
        self._base_key = self._longest(BASE)
        base = self._groups[self._base_key]
        final = interval([run.accuracies[-1] for run in base])
        self.target = final.mean - (0.0 if np.isnan(final.half) else final.half)
        """The accuracy that counts as uniform's: its final mean less half its interval."""
        self._base_final = {run.seed: run.accuracies[-1] for run in base}
        self._base_s = {s: self._mean_s(base, s)[-1] for s in slownesses}

    def _longest(self, system: str) -> tuple[str, float]:
        return max((key for key in self._groups if key[0] == system), key=lambda key: key[1])

    def _mean_s(self, group: list[Run], slowness: float) -> Floats:
        return np.mean([seconds_of(run, self._clock, slowness) for run in group], axis=0)

    def rows(self) -> list[dict[str, Any]]:
        return [self._row(key, group) for key, group in self._groups.items()]

    def _row(self, key: tuple[str, float], group: list[Run]) -> dict[str, Any]:
        curves = np.array([run.accuracies for run in group])
        mean = curves.mean(0)
        steps = np.array(group[0].steps)
        final = interval(list(curves[:, -1]))
        paired = [
            run.accuracies[-1] - self._base_final[run.seed]
            for run in group
            if run.seed in self._base_final
        ]
        at = [int(np.argmin(abs(steps - share * steps[-1]))) for share in FRACTIONS]
        hits = [sum(run.hits) / len(run.hits) / run.recipe["batch_size"] for run in group]
        return {
            "system": key[0],
            "epochs": key[1],
            "seeds": [run.seed for run in group],
            "final": final,
            "difference": interval(paired) if paired else None,
            "accuracy at": [float(mean[i]) for i in at],
            "hits": float(np.mean(hits)),
            "distinct": float(np.mean([np.mean(run.distinct) for run in group])),
            "ess": float(np.mean([np.mean(run.ess) for run in group])),
            "weight max": max(run.weight_max for run in group),
            "stores": [self._store_row(group, mean, slowness) for slowness in self._slownesses],
            "seconds": float(np.mean([run.seconds for run in group])),
        }

    def _store_row(self, group: list[Run], mean: Floats, slowness: float) -> dict[str, Any]:
        curves_s = [seconds_of(run, self._clock, slowness) for run in group]
        seconds = np.mean(curves_s, axis=0)
        base_s = self._base_s[slowness]
        reached = time_to(self.target, mean, seconds)
        by_seed = [
            time_to(self.target, np.array(run.accuracies), curve_s)
            for run, curve_s in zip(group, curves_s, strict=True)
        ]
        return {
            "slowness": slowness,
            "total s": float(seconds[-1]),
            "total of uniform's": float(seconds[-1] / base_s),
            "to target s": reached,
            "to target of uniform's": None if reached is None else reached / base_s,
            "to target of uniform's, by seed": [s and s / base_s for s in by_seed],
        }

    def table(self) -> str:
        """A table in Markdown; times are divided by the time of uniform's whole run."""
        heads = [
            "system",
            "epochs",
            "final accuracy %",
            "to uniform",
            *(f"at {f:.0%}" for f in FRACTIONS),
        ]
        heads += ["hits %", "distinct %", "ESS %"]
        heads += [f"store {s:g}x: to target, all steps" for s in self._slownesses]
        lines = [heads, ["---"] * len(heads)]
        lines += [self._cells(row) for row in self.rows()]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def _cells(self, row: dict[str, Any]) -> list[str]:
        difference: Interval | None = row["difference"]
        cells = [row["system"], f"{row['epochs']:g}", row["final"].percent()]
        cells.append("" if difference is None else difference.percent())
        cells += [f"{100 * a:.1f}" for a in row["accuracy at"]]
        cells += [f"{100 * row[name]:.1f}" for name in ("hits", "distinct", "ess")]
        return cells + [store_cell(store) for store in row["stores"]]


def store_cell(store: dict[str, Any]) -> str:
    """Time to the target, with its interval if every seed reaches it, and time of all steps."""
    to_target, total = store["to target of uniform's"], store["total of uniform's"]
    by_seed = [share for share in store["to target of uniform's, by seed"] if share is not None]
    text = "never" if to_target is None else f"{to_target:.2f}"
    num_seeds = len(store["to target of uniform's, by seed"])
    if len(by_seed) < num_seeds:
        text += f" ({len(by_seed)} of {num_seeds} seeds)"
    elif num_seeds > 1:
        text += f" ± {interval(by_seed).half:.2f}"
    return f"{text}, {total:.2f}"
