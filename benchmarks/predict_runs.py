"""How far off are forecasts of runs that the model has not seen?

    python -m benchmarks.predict_runs FOLDER [--rounds 3] [--residuals] [--json FILE]

Records real runs (torch's DataLoader on a shaped HTTP store and with latencies of a long tail,
Penstock on a shaped S3 store, on one node and on several that are processes of this machine) as
traces in FOLDER, unless they are there already. Two short runs of each kind calibrate a model; the
others are predicted, without their traces being looked at, and compared: time of a step, time of
the first epoch, stall, bytes from the store and between nodes. Steps sleep, so that other programs
of the machine matter little; each run counts, also where rounds of one configuration differ.
`--residuals` predicts the runs that the bands are made of and writes
src/penstock/report/model/residuals.py; without it the other runs are scored: no configuration is in
both sets.

Two rules beside, for the time of a step: `min` (the slowest of compute, workers, cores and store,
each alone) and `as it was` (the calibrated step, scaled with the batch).
"""

import argparse
import json
import math
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.predict_cases import ALL, BASES, CALIBRATE, LINKS, RESIDUALS, SCORED, Case
from benchmarks.predict_record import dataset_bytes, record
from penstock.report.model import Forecast, RunModel, WhatIf, calibrate
from penstock.report.model.bands import Quantity
from penstock.report.model.observed import MeasuredRun, contended_share, measured
from penstock.trace import read_trace

UNITS: dict[Quantity, tuple[str, float]] = {
    "step_s": ("ms", 1e-3),
    "first_epoch_s": ("s", 1.0),
    "stall_share": ("%", 0.01),
    "store_bytes": ("MB", 1e6),
    "peer_bytes": ("MB", 1e6),
}
TITLES: dict[Quantity, str] = {
    "step_s": "time of a step, last epoch",
    "first_epoch_s": "time of the first epoch",
    "stall_share": "stall share, last epoch",
    "store_bytes": "bytes from the store",
    "peer_bytes": "bytes between nodes",
}
RESIDUALS_FILE = Path("src/penstock/report/model/residuals.py")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One quantity of a case, predicted, and measured in each of its runs."""

    case: Case
    quantity: Quantity
    reals: list[float]
    said: float
    low: float
    high: float
    doubt: float
    rules: tuple[float, float] = (0.0, 0.0)
    """`min` and `as it was`, of a step."""

    @property
    def spread(self) -> float:
        """How far apart runs are, in the terms of `errors`."""
        apart = max(self.reals) - min(self.reals)
        return apart if self.quantity == "stall_share" else apart / min(self.reals)

    @property
    def errors(self) -> list[float]:
        """Of each run: relative ones, but of a share the difference."""
        if self.quantity == "stall_share":
            return [self.said - real for real in self.reals]
        return [self.said / real - 1 for real in self.reals]

    @property
    def scores(self) -> list[float]:
        """How many doubts each run is off."""
        if self.quantity == "stall_share":
            return [(real - self.said) / self.doubt for real in self.reals]
        return [math.log(real / self.said) / self.doubt for real in self.reals]

    @property
    def covered(self) -> list[bool]:
        return [self.low <= real <= self.high for real in self.reals]


def question(case: Case) -> WhatIf:
    """Return the change from the calibrated run to a case."""
    task, base = case.task, BASES[case.base]
    names = ("workers", "prefetch_factor", "batch_size", "epochs", "nodes", "num_samples")
    changes = {name: task[name] for name in names if task[name] != base[name]}
    if task["ranks"] != base["ranks"]:
        changes["ranks_per_node"] = task["ranks"]
    if task["compute_s"] != base["compute_s"]:
        changes["compute_factor"] = task["compute_s"] / base["compute_s"]
    if task["latency_s"] != base["latency_s"]:
        changes["store_latency_s"] = task["latency_s"]
    if task.get("link_bytes_s"):
        changes["link_bandwidth"] = task["link_bytes_s"]
    if task["bytes_s"] != base["bytes_s"]:
        changes["store_bandwidth"] = task["bytes_s"]
    if case.base == "penstock":
        capacities = {"memory_cache_bytes": "cache", "disk_cache_bytes": "disk"}
        for name, tier in capacities.items():
            size, had = (int(t[tier] * dataset_bytes(t)) for t in (task, base))
            if size != had:
                changes[name] = size
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


def compared(model: RunModel, case: Case, rounds: list[MeasuredRun]) -> list[Result]:
    if not rounds:
        print(f"{case.name}: no run", file=sys.stderr)
        return []
    what_if = question(case)
    forecast: Forecast = model.predict(what_if)
    grows = case.task["batch_size"] / model.settings.batch_size
    rules = (least_s(model, what_if), model.measured.step_s * grows)
    doubts = model.doubts(what_if)
    out = []
    for quantity in TITLES:
        reals = [_value(run, quantity) for run in rounds]
        if reals[0] or quantity == "stall_share":  # Where no bytes were read, none were foreseen.
            out.append(
                Result(
                    case=case,
                    quantity=quantity,
                    doubt=doubts[quantity],
                    reals=reals,
                    said=_value(forecast, quantity),
                    low=getattr(forecast, f"{quantity}_low"),
                    high=getattr(forecast, f"{quantity}_high"),
                    rules=rules if quantity == "step_s" else (0.0, 0.0),
                )
            )
    return out


def _value(run: MeasuredRun | Forecast, quantity: Quantity) -> float:
    return run.epoch_s[0] if quantity == "first_epoch_s" else getattr(run, quantity)


# -- residuals -----------------------------------------------------------------------------------


def residuals_text(results: list[Result]) -> str:
    """Return the source of the module that bands are made of."""
    tables: dict[str, dict[str, list[float]]] = {}
    for result in results:
        loader = "penstock" if result.case.base == "penstock" else "torch"
        rows = tables.setdefault(result.quantity, {}).setdefault(loader, [])
        rows += [round(score, 3) for score in result.scores]
    head = RESIDUALS_FILE.read_text().split("# fmt: off")[0]
    lines = ["# fmt: off", "RESIDUALS: dict[str, dict[str, tuple[float, ...]]] = {"]
    for quantity, loaders in tables.items():
        lines.append(f'    "{quantity}": {{')
        for loader, rows in loaders.items():
            lines.append(f'        "{loader}": (')
            numbers = ", ".join(f"{row:g}" for row in rows) + ","
            lines += textwrap.wrap(numbers, 98, initial_indent=" " * 12, subsequent_indent=" " * 12)
            lines.append("        ),")
        lines.append("    },")
    return head + "\n".join([*lines, "}", ""])


# -- tables --------------------------------------------------------------------------------------


def summary(results: list[Result], name: str) -> str:
    errors = np.array([abs(error) for r in results for error in r.errors])
    unit = " points" if results[0].quantity == "stall_share" else " %"
    digits = 2 if results[0].quantity == "store_bytes" else 1
    shown = [f"{100 * e:.{digits}f}{unit}" for e in (np.median(errors), errors.max())]
    covered = np.mean([is_covered for r in results for is_covered in r.covered])
    spread = f"{100 * np.median([r.spread for r in results]):.{digits}f}{unit}"
    return (
        f"| {name} | {len(results)} | {len(errors)} | {shown[0]} | {shown[1]} | {covered:.0%} | "
        f"{spread} |"
    )


def print_summaries(results: list[Result]) -> None:
    print("| | cases | runs | median error | worst | in the 90 % band | repeats differ by |")
    print("|---|---|---|---|---|---|---|")
    for quantity, title in TITLES.items():
        of_all = [r for r in results if r.quantity == quantity]
        if not of_all:
            continue
        print(summary(of_all, f"**{title}**"))
        for name, is_part in PARTS.items():
            part = [r for r in of_all if is_part(r.case)]
            if part and len(part) < len(of_all):
                print(summary(part, name))


PARTS: dict[str, Callable[[Case], bool]] = {
    "torch": lambda case: case.base == "torch",
    "tail": lambda case: case.base == "tail",
    "penstock, one node": lambda case: case.base == "penstock" and case.task["nodes"] == 1,
    "penstock, nodes": lambda case: case.task["nodes"] > 1,
}


def print_rules(results: list[Result]) -> None:
    steps = [r for r in results if r.quantity == "step_s"]
    for place, name in enumerate(("`min` rule", "as it was")):
        errors = [abs(r.rules[place] / real - 1) for r in steps for real in r.reals]
        print(f"{name}: median {np.median(errors):.1%}, worst {max(errors):.0%}")


def print_runs(results: list[Result]) -> None:
    """Print a row for each case: what its runs measured, the forecast, its band."""
    heads = [f"{quantity}, {unit}" for quantity, (unit, _) in UNITS.items()]
    print(f"| run | {' | '.join(heads)} |")
    print(f"|{'---|' * (1 + len(UNITS))}")
    for case in dict.fromkeys(r.case.name for r in results):
        cells = {r.quantity: _cell(r) for r in results if r.case.name == case}
        print(f"| {case} | {' | '.join(cells.get(quantity, '') for quantity in UNITS)} |")


def _cell(r: Result) -> str:
    size = UNITS[r.quantity][1]
    digits = 0 if r.quantity == "stall_share" else 3
    reals = "; ".join(
        f"{_number(real / size, digits)}{'' if is_covered else ' ✗'}"
        for real, is_covered in zip(r.reals, r.covered, strict=True)
    )
    said, low, high = (_number(value / size, digits) for value in (r.said, r.low, r.high))
    return f"{reals} / {said} ({low}–{high})"


def _number(value: float, digits: int) -> str:
    return f"{value:.0f}" if not digits or value >= 10**digits else f"{value:.{digits}g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--residuals", action="store_true")
    parser.add_argument("--links", action="store_true", help="nodes behind slow links; needs root")
    parser.add_argument("--no-record", action="store_true", help="use the runs that are there")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not given.no_record:
        record([*ALL, *(LINKS if given.links else [])], given.folder, given.rounds)
    cases = LINKS if given.links else RESIDUALS if given.residuals else SCORED
    results = results_of(given.folder, cases, given.rounds)
    print_runs(results)
    print_summaries(results)
    print_rules(results)
    if given.residuals:
        RESIDUALS_FILE.write_text(residuals_text(results))
    if given.json:
        rows = [
            [r.case.name, r.quantity, r.reals, r.said, r.low, r.high, *r.rules] for r in results
        ]
        given.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
