"""`analyze`: from a trace to all that it says about a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import OptionError
from penstock.report.analysis.advice import advice_for
from penstock.report.analysis.attribution import Blame, blame_of
from penstock.report.analysis.batches import same_processes
from penstock.report.analysis.bound import bound_ratio
from penstock.report.analysis.completeness import completeness_of
from penstock.report.analysis.interference import interference_of, launch_share, settled_real
from penstock.report.analysis.load import system_load, worker_load
from penstock.report.analysis.loops import TrainingLoop, loops_of
from penstock.report.analysis.parameters import parameters_of, traced_parameter
from penstock.report.analysis.patterns import patterns_of, reads_of, sharing_of
from penstock.report.analysis.phases import epoch_of_rows, epoch_sums, phases_of
from penstock.report.analysis.series import distributions_of, source_timeline, wait_matrix
from penstock.report.analysis.sources import (
    SourceNames,
    is_of_validation,
    is_remote,
    source_names,
)
from penstock.report.analysis.steps import step_table, with_interference, with_launch
from penstock.report.analysis.values import (
    CATEGORIES,
    Analysis,
    Floats,
    Interference,
    Ints,
    Parameter,
    Pattern,
    Sharing,
    StepTable,
    SystemLoad,
    Verdict,
    WorkerLoad,
)
from penstock.report.analysis.verdict import verdict_of
from penstock.trace.reading import Trace
from penstock.trace.schema import Kind
from penstock.units import show_bytes, show_seconds

__all__ = ["Analysis", "analyze"]

CONTENDED_MIN = 0.05
"""From this share on, time lost to other processes is worth a note: figures will not repeat."""
_NO_VERDICT = Verdict(
    cause="healthy", share=0.0, low=0.0, high=0.0, sentence="", evidence=(), runner_up=None
)


def analyze(trace: Trace, *, baseline: Trace | None = None) -> Analysis:
    """Return all that a trace says about a run.

    `baseline` is a differential run of the same job: its resident windows show what a step takes
    without the loader's work beside it, and so what interference costs in `trace`.
    """
    loops = loops_of(trace)
    if not loops:
        raise OptionError(
            f"{trace.folder} has no training loop: nobody asked for a batch while it was recorded "
            f"({len(trace.spans)} spans of {len(trace.processes)} processes); trace a run that "
            "iterates over a Loader or a DataLoader"
        )
    facts, sources = trace.facts(), source_names(trace)
    num_samples = sum(int(loop.samples[~loop.is_resident].sum()) for loop in loops)
    workers = worker_load(trace, loops, num_samples)
    system = system_load(trace, loops, facts)
    own_delay = system.own_delay
    blames = tuple(
        blame_of(trace, loop, sources, idle=workers.idle, own_delay=own_delay) for loop in loops
    )
    table = step_table(trace, loops, blames, own_delay=own_delay)
    table, interference = _disturbed(trace, table, loops, system, baseline)
    out = _gathered(trace, loops, sources, table)
    out |= {"workers": workers, "system": system, "interference": interference}
    parameters = _parameters(trace, out, loops, facts, workers)
    analysis = Analysis(
        folder=str(trace.folder),
        loader=_loader(trace, sources),
        parameters=parameters,
        notes=_notes(blames, trace, system),
        verdict=_NO_VERDICT,
        advice=(),
        **out,
    )
    analysis = replace(analysis, verdict=verdict_of(analysis))
    advice, notes = advice_for(analysis, trace)
    return replace(analysis, advice=advice, notes=analysis.notes + notes)


def _disturbed(
    trace: Trace,
    table: StepTable,
    loops: tuple[TrainingLoop, ...],
    system: SystemLoad,
    baseline: Trace | None,
) -> tuple[StepTable, Interference]:
    """Return the table with launch and interference as well as they are known."""
    measured = interference_of(table, loops)
    facts = trace.facts()
    is_cuda = str(facts.get("device", "cpu")).startswith("cuda")
    num_ops = int(facts.get("ops_per_step", 0))
    launching = launch_share(table, measured, system, is_cuda=is_cuda, num_ops=num_ops)
    if launching:
        table = with_launch(table, launching)
    if baseline is not None and measured.method != "differential":
        other_loops = loops_of(baseline)
        other = baseline_table(baseline, other_loops)
        of_baseline = interference_of(other, other_loops)
        if of_baseline.method == "differential":
            # The machine may have been slower then: what carries over is the ratio of the two.
            scale = measured.real_s / of_baseline.real_s if of_baseline.real_s else 1.0
            measured = replace(
                of_baseline,
                real_s=measured.real_s,
                resident_s=of_baseline.resident_s * scale,
                lock=measured.lock,
                no_core=measured.no_core,
                on_core=measured.on_core,
            )
    if measured.method == "differential":
        table = with_interference(table, measured.real_s - measured.resident_s)
    return table, measured


def baseline_table(trace: Trace, loops: tuple[TrainingLoop, ...]) -> StepTable:
    """Return the step table of a run that others are compared with."""
    sources = source_names(trace)
    return step_table(trace, loops, tuple(blame_of(trace, x, sources) for x in loops))


def _gathered(
    trace: Trace, loops: tuple[TrainingLoop, ...], sources: SourceNames, table: StepTable
) -> dict[str, Any]:
    facts = trace.facts()
    every_read = reads_of(trace, sources)
    reads = every_read[~is_of_validation(trace, every_read)]
    read_epoch = epoch_of_rows(reads, loops)
    epochs = epoch_sums(table, reads, read_epoch, sources)
    samples = {loop.rank: int(loop.samples[~loop.is_resident].sum()) for loop in loops}
    stated = facts.get("sample_bytes") or {}
    sample_bytes = float(stated.get("mean", 0)) if isinstance(stated, Mapping) else float(stated)
    kept = settled_real(table)
    wall_s = float(table.wall_s[kept].sum()) / len(loops)
    return {
        "wall_s": max(float(x.end_ns[-1] - x.ask_ns[0]) for x in loops) / 1e9,
        "num_ranks": len(loops),
        "num_steps": max(len(loop) for loop in loops),
        "num_samples": sum(samples.values()),
        "samples_s": float(table.samples[kept].sum()) / max(1e-9, wall_s),
        "step_s": float(np.median(table.wall_s[kept])),
        "step_mean_s": float(table.wall_s[kept].mean()),
        "parts": shares_of(table, kept),
        "fetch_by_source": _source_shares(table, kept),
        "steady": _steady(table, kept),
        "completeness": completeness_of(trace, every_read, loops),
        "phases": phases_of(trace, table, epochs, every_read, sources),
        "patterns": patterns_of(trace, reads, samples),
        "sharing": sharing_of(
            trace, reads, read_epoch, sample_bytes=sample_bytes, num_samples=sum(samples.values())
        ),
        "steps": table,
        "epochs": epochs,
        "waits": wait_matrix(loops),
        "timeline": source_timeline(every_read, loops, sources),
        "distributions": distributions_of(trace, every_read, loops, sources),
        "bound": bound_ratio(facts, epochs, num_nodes=len({p.host for p in trace.processes})),
        "checkpoints": _checkpoints(
            trace, float(np.median((table.wall_s - table.parts["checkpoint"])[kept]))
        ),
        "checkpoint_bytes_s": _checkpoint_rate(trace),
        "collectives_per_step": _collectives_per_step(trace, loops),
        "read_cost_by_epoch": _read_costs(reads, read_epoch, sources),
        "has_worker_processes": _has_worker_processes(trace, loops),
    }


def shares_of(table: StepTable, kept: npt.NDArray[np.bool_]) -> dict[str, float]:
    """Return the share of each category in the time of some steps."""
    total = max(1e-12, float(table.wall_s[kept].sum()))
    return {name: float(table.parts[name][kept].sum()) / total for name in CATEGORIES}


def _source_shares(table: StepTable, kept: npt.NDArray[np.bool_]) -> dict[str, float]:
    total = max(1e-12, float(table.wall_s[kept].sum()))
    shares = {n: float(v[kept].sum()) / total for n, v in table.fetch_by_source.items()}
    return {name: share for name, share in shares.items() if share}


def _steady(table: StepTable, kept: npt.NDArray[np.bool_]) -> dict[str, float]:
    later = kept & (table.epoch > table.epoch.min())
    return shares_of(table, later) if later.any() else {}


def _checkpoints(trace: Trace, step_s: float) -> tuple[tuple[float, float], ...]:
    """Return begin and end of each checkpoint: files that follow each other are of one."""
    rows = trace.of(Kind.CHECKPOINT)
    starts_s = rows["start_ns"] / 1e9
    ends_s = np.maximum.accumulate(starts_s + rows["duration_ns"] / 1e9)
    if not len(rows):
        return ()
    first = np.flatnonzero(np.append(True, starts_s[1:] > ends_s[:-1] + step_s / 2))
    last = np.append(first[1:], len(rows)) - 1
    return tuple(zip(starts_s[first].tolist(), ends_s[last].tolist(), strict=True))


def _checkpoint_rate(trace: Trace) -> float:
    rows = trace.of(Kind.CHECKPOINT)
    seconds = float(rows["duration_ns"].sum()) / 1e9
    return float(rows["size_bytes"].clip(0).sum()) / seconds if seconds else 0.0


def _collectives_per_step(trace: Trace, loops: tuple[TrainingLoop, ...]) -> float:
    """Return how many collectives of equal size would be a step's; 0: sizes are not known.

    A large one with many small ones beside it counts as little more than one.
    """
    sizes = trace.of(Kind.COMMUNICATE)["size_bytes"].clip(0).astype(np.float64)
    num_steps = sum(len(loop) for loop in loops)
    if not sizes.any() or not num_steps:
        return 0.0
    return float(sizes.sum() ** 2 / (sizes**2).sum()) / num_steps


def _read_costs(reads: npt.NDArray[np.void], epoch: Ints, sources: SourceNames) -> dict[int, float]:
    """Return seconds for a byte of local files, for each epoch."""
    local = np.array([not is_remote(name) for name in sources.names])
    mine = local[sources.of(reads)] & (reads["size_bytes"] > 0)
    out = {}
    for number in np.unique(epoch[mine]).tolist():
        rows = reads[mine & (epoch == number)]
        out[int(number)] = float(rows["duration_ns"].sum()) / 1e9 / float(rows["size_bytes"].sum())
    return out


def _has_worker_processes(trace: Trace, loops: tuple[TrainingLoop, ...]) -> bool:
    made = trace.of(Kind.BATCH, Kind.DECODE)
    if not len(made):
        return any(p.role in ("worker", "engine") for p in trace.processes)
    same = same_processes(trace)
    training = [same[loop.process] for loop in loops]
    return bool((~np.isin(same[made["process"]], training)).mean() > 0.5)


def _loader(trace: Trace, sources: SourceNames) -> str:
    stated = trace.facts().get("loader")
    if stated:
        return str(stated)
    return "penstock" if sources.is_penstock else "torch" if len(trace.of(Kind.BATCH)) else "other"


def _notes(blames: tuple[Blame, ...], trace: Trace, system: SystemLoad) -> tuple[str, ...]:
    notes = []
    if system.contention >= CONTENDED_MIN:
        notes.append(
            f"The machine is contended: threads of the job wait {system.contention:.0%} of their "
            "time for cores that other processes use. All times are longer for it."
        )
    if any(b.how == "time" and b.parts["fetch"].size for b in blames):
        notes.append(
            "Batches could not be told apart in this trace: waits are blamed on what the loader "
            "did at the time, in proportion."
        )
    if trace.num_damaged:
        notes.append(f"{trace.num_damaged} rows could not be read.")
    return tuple(notes)


def _parameters(
    trace: Trace,
    out: Mapping[str, Any],
    loops: tuple[TrainingLoop, ...],
    facts: Mapping[str, Any],
    workers: WorkerLoad,
) -> tuple[Parameter, ...]:
    per_step = np.concatenate([loop.samples for loop in loops])
    patterns: tuple[Pattern, ...] = out["patterns"]
    sharing: Sharing = out["sharing"]
    measured = {
        "world_size": len(loops),
        "batch_size": int(np.median(per_step)) if per_step.any() else None,
        "num_workers": workers.num_workers or None,
        "num_nodes": len({p.host for p in trace.processes}),
        "num_files": sharing.num_objects or None,
    }
    found = [
        *parameters_of(facts, measured),
        traced_parameter(
            "application", "step_s", "step, median", out["step_s"], show_seconds(out["step_s"])
        ),
    ]
    work: Floats = out["steps"].wall_s - out["steps"].wait_s
    compute_s = float(np.median(work))
    found.append(
        traced_parameter(
            "application", "compute_s", "the same without waits", compute_s, show_seconds(compute_s)
        )
    )
    read = float(np.mean([p.bytes_per_sample for p in patterns])) if patterns else 0.0
    if read:
        found.append(
            traced_parameter("dataset", "read_per_sample", "read a sample", read, show_bytes(read))
        )
    return tuple(found)
