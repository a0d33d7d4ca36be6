"""How far off are forecasts of runs that the model has not seen?

    python -m benchmarks.predict_runs FOLDER [--rounds 3] [--residuals] [--json FILE]

Records real runs (torch's DataLoader on a shaped HTTP store and with latencies of a long tail,
Penstock on a shaped S3 store) as traces in FOLDER, unless they are there already. Two short runs of
each kind calibrate a model; the others are predicted, without their traces being looked at, and
compared. Steps sleep, so that other programs of the machine matter little; of the rounds the
fastest counts, because other programs can only add time. `--residuals` predicts the runs that the
bands are made of and prints src/penstock/report/model/residuals.py; without it the other runs are
scored: no configuration is in both sets.

Two rules beside: `min` (the slowest of compute, workers, cores and store, each alone) and `as it
was` (the calibrated step, scaled with the batch).
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.predict_cases import ALL, BASES, CALIBRATE, RESIDUALS, SCORED, Case
from benchmarks.predict_record import record, shard_sizes
from penstock.report.model import Forecast, RunModel, WhatIf, calibrate
from penstock.report.model.bands import kind_of
from penstock.report.model.observed import MeasuredRun, contended_share, measured
from penstock.trace import read_trace


@dataclass(frozen=True, kw_only=True)
class Result:
    """A case, predicted and measured."""

    case: Case
    what: str
    """`step` of the last epoch or `first epoch`."""
    kind: str
    real: float
    spread: float
    """Slowest over fastest round, minus 1."""
    said: float
    low: float
    high: float
    least: float
    """The `min` rule."""
    as_was: float

    @property
    def error(self) -> float:
        return self.said / self.real - 1


def question(case: Case) -> WhatIf:
    """Return the change from the calibrated run to a case."""
    task, base = case.task, BASES[case.base]
    changes = {
        name: task[name]
        for name in ("workers", "prefetch_factor", "batch_size")
        if task[name] != base[name]
    }
    if task["ranks"] != base["ranks"]:
        changes["ranks_per_node"] = task["ranks"]
    if task["compute_s"] != base["compute_s"]:
        changes["compute_factor"] = task["compute_s"] / base["compute_s"]
    if task["latency_s"] != base["latency_s"]:
        changes["store_latency_s"] = task["latency_s"]
    if task["bytes_s"] != base["bytes_s"]:
        changes["store_bandwidth"] = task["bytes_s"]
    if task.get("cache") != base.get("cache"):
        changes["memory_cache_bytes"] = int(task["cache"] * shard_sizes().sum())
    return WhatIf(**changes)


def rounds_of(folder: Path, case: Case, rounds: int) -> list[MeasuredRun]:
    paths = [folder / f"{case.name}.{turn}" for turn in range(rounds)]
    return [measured(read_trace(path)) for path in paths if (path / "load.json").exists()]


def model_of(folder: Path, base: str, rounds: int) -> RunModel:
    """Return the model from the round of the two calibration runs that other programs spared."""
    pair = [case for case in CALIBRATE if case.base == base]
    paths = [[folder / f"{case.name}.{turn}" for case in pair] for turn in range(rounds)]
    there = [p for p in paths if all((path / "load.json").exists() for path in p)]
    best = min(there, key=lambda p: max(contended_share(read_trace(path)) for path in p))
    return calibrate(*[read_trace(path) for path in best])


def least_s(model: RunModel, what_if: WhatIf) -> float:
    """Return a step by the `min` rule: the slowest resource, each as if it were alone."""
    settings = model.settings.changed(what_if)
    constants = model.constants
    compute = float(constants.computed_s(settings.batch_size, what_if).mean())
    making, store = constants.making_for(what_if), constants.store_for(what_if)
    batch_bytes = settings.batch_size * settings.sample_bytes
    misses = 1.0
    if settings.loader == "penstock":
        misses = max(0.0, 1 - (settings.memory_cache_bytes or 0) / settings.dataset_bytes)
        own = making.service_s * settings.batch_size / settings.cores
    else:
        own = (making.service_s * settings.batch_size) / max(1, settings.workers)
        own += batch_bytes / store.connection_bytes_s / max(1, settings.workers)
    shared = settings.num_ranks * batch_bytes * misses / store.bytes_s
    return max(compute, own, shared)


def results_of(folder: Path, cases: list[Case], rounds: int) -> list[Result]:
    out: list[Result] = []
    for base in BASES:
        model = model_of(folder, base, rounds)
        store = model.constants.store
        print(
            f"{base}: replay of its own run {model.self_check():+.1%}, of the second "
            f"{model.second_error:+.1%}; store {store.latency_s * 1e3:.1f} ms, "
            f"{store.bytes_s / 1e6:.1f} MB/s",
            *model.notes,
            file=sys.stderr,
        )
        for case in cases:
            if case.base == base:
                out += compared(model, case, rounds_of(folder, case, rounds))
    return out


def compared(model: RunModel, case: Case, real: list[MeasuredRun]) -> list[Result]:
    if not real:
        print(f"{case.name}: no run", file=sys.stderr)
        return []
    what_if = question(case)
    forecast: Forecast = model.predict(what_if)
    ratio = (forecast.step_s_low / forecast.step_s, forecast.step_s_high / forecast.step_s)
    grows = case.task["batch_size"] / model.settings.batch_size
    rows = [
        ("step", [m.step_s for m in real], forecast.step_s, least_s(model, what_if),
         model.measured.step_s * grows),
    ]  # fmt: skip
    return [
        Result(
            case=case,
            what=what,
            kind=kind_of(what_if),
            real=min(values),
            spread=max(values) / min(values) - 1,
            said=said,
            low=said * ratio[0],
            high=said * ratio[1],
            least=least,
            as_was=as_was,
        )
        for what, values, said, least, as_was in rows
    ]


def print_residuals(results: list[Result]) -> None:
    tables: dict[str, dict[str, list[float]]] = {}
    for result in results:
        loader = "penstock" if result.case.base == "penstock" else "torch"
        rows = tables.setdefault(loader, {}).setdefault(result.kind, [])
        rows.append(round(math.log(result.real / result.said), 4))
    for loader, kinds in tables.items():
        print(f'    "{loader}": {{')
        for kind, rows in kinds.items():
            print(f'        "{kind}": ({", ".join(f"{r:g}" for r in rows)},),')
        print("    },")


def summary(results: list[Result], name: str) -> str:
    errors = np.array([r.error for r in results])
    covered = np.mean([r.low <= r.real <= r.high for r in results])
    least = np.array([r.least / r.real - 1 for r in results])
    as_was = np.array([r.as_was / r.real - 1 for r in results])
    return (
        f"| {name} | {len(results)} | {np.median(np.abs(errors)):.1%} | {np.abs(errors).max():.1%} "
        f"| {np.mean(errors):+.1%} | {covered:.0%} | {np.median(np.abs(least)):.1%} "
        f"({np.abs(least).max():.0%}) | {np.median(np.abs(as_was)):.0%} "
        f"({np.abs(as_was).max():.0%}) | {np.median([r.spread for r in results]):.1%} |"
    )


def print_table(results: list[Result]) -> None:
    print("| run | measured ms | forecast ms | error | 90 % band | repeats differ by |")
    print("|---|---|---|---|---|---|")
    for r in results:
        print(
            f"| {r.case.name} | {r.real * 1e3:.1f} | {r.said * 1e3:.1f} | {r.error:+.1%} | "
            f"{r.low * 1e3:.1f}–{r.high * 1e3:.1f} | {r.spread:.1%} |"
        )
    print()
    print(
        "| runs | number | median error | worst | bias | in the band | `min` rule (worst) | "
        "as it was (worst) | repeats differ by |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for base in BASES:
        print(summary([r for r in results if r.case.base == base], base))
    print(summary(results, "all"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--residuals", action="store_true")
    parser.add_argument("--no-record", action="store_true", help="use the runs that are there")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not given.no_record:
        record(ALL, given.folder, given.rounds)
    results = results_of(given.folder, RESIDUALS if given.residuals else SCORED, given.rounds)
    if given.residuals:
        print_residuals(results)
    else:
        print_table(results)
    if given.json:
        rows = [[r.case.name, r.real, r.said, r.low, r.high, r.least, r.as_was] for r in results]
        given.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
