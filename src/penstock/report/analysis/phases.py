"""The phases of a run: start, index, first epoch, steady epochs, validation, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from penstock.report.analysis.loops import TrainingLoop
from penstock.report.analysis.sources import SourceNames, is_of_validation
from penstock.report.analysis.values import CATEGORIES, EpochSum, Ints, Phase, StepTable
from penstock.trace.reading import Trace
from penstock.trace.schema import Kind

Rows = npt.NDArray[np.void]


def epoch_of_rows(rows: Rows, loops: tuple[TrainingLoop, ...]) -> Ints:
    """Return the epoch of each row: as it says, else the one that its rank was in."""
    out = rows["epoch"].astype(np.int64)
    for loop in loops:
        unknown = (out < 0) & (rows["rank"] == loop.rank)
        at = np.searchsorted(loop.ask_ns, rows["start_ns"][unknown], side="right") - 1
        # What is read before the first question is for the first epoch.
        out[unknown] = loop.epochs[np.clip(at, 0, None)]
    return out


def epoch_sums(
    table: StepTable, reads: Rows, read_epoch: Ints, sources: SourceNames
) -> tuple[EpochSum, ...]:
    """Return the sums of each epoch over all ranks."""
    num_ranks = max(1, len(np.unique(table.rank)))
    real = ~table.is_resident
    out = []
    for epoch in np.unique(table.epoch).tolist():
        of = (table.epoch == epoch) & real
        if not of.any():
            continue
        start = float(table.start_s[of].min())
        end = float((table.start_s + table.wall_s)[of].max())
        num_samples = int(table.samples[of].sum())
        busy_s = float(table.wall_s[of].sum()) / num_ranks
        out.append(
            EpochSum(
                epoch=int(epoch),
                start_s=start,
                end_s=end,
                num_steps=int(of.sum()),
                num_samples=num_samples,
                samples_s=num_samples / max(1e-9, busy_s),
                parts={n: float(table.parts[n][of].sum()) / num_ranks for n in CATEGORIES},
                bytes_by_source=bytes_by_source(reads[read_epoch == epoch], sources),
            )
        )
    return tuple(out)


def bytes_by_source(reads: Rows, sources: SourceNames) -> Mapping[str, int]:
    """Return how many bytes came from where."""
    total = np.bincount(sources.of(reads), reads["size_bytes"], len(sources.names))
    return {n: int(v) for n, v in zip(sources.names, total.tolist(), strict=True) if v}


def phases_of(
    trace: Trace, table: StepTable, epochs: tuple[EpochSum, ...], reads: Rows, sources: SourceNames
) -> tuple[Phase, ...]:
    """Return the phases in the order of their beginning."""
    validates = is_of_validation(trace, reads)
    reads, validation_reads = reads[~validates], reads[validates]
    first_s = float((table.start_s + table.wait_s).min())
    out = [_stretch(trace, "start", (0.0, first_s), reads, sources)]
    index = trace.of(Kind.INDEX)
    if len(index):
        begin = float(index["start_ns"].min()) / 1e9
        end = float((index["start_ns"] + index["duration_ns"]).max()) / 1e9
        out.append(_stretch(trace, "index", (begin, end), reads, sources))
    out += [_epoch_phase(trace, n, e, table, reads) for n, e in enumerate(epochs)]
    opens = trace.of(Kind.OPEN)
    opens = opens[is_of_validation(trace, opens)]
    for name, kind, read, num_opens in (
        ("validation", Kind.VALIDATE, validation_reads, len(opens)),
        ("checkpoint", Kind.CHECKPOINT, reads[:0], 0),
    ):
        rows = trace.of(kind)
        if len(rows):
            out.append(_folded(name, rows, bytes_by_source(read, sources), len(read), num_opens))
    return tuple(sorted(out, key=lambda p: p.start_s))


def _stretch(
    trace: Trace, name: str, span_s: tuple[float, float], reads: Rows, sources: SourceNames
) -> Phase:
    start_s, end_s = span_s
    during = _during(reads, start_s, end_s)
    return Phase(
        name=name,
        epoch=-1,
        start_s=start_s,
        end_s=end_s,
        num_steps=0,
        num_samples=0,
        wait_s=end_s - start_s if name == "start" else 0.0,
        bytes_by_source=bytes_by_source(during, sources),
        num_requests=len(during),
        num_opens=len(_during(trace.of(Kind.OPEN), start_s, end_s)),
        busy_s=end_s - start_s,
    )


def _during(rows: Rows, start_s: float, end_s: float) -> Rows:
    low, high = np.searchsorted(rows["start_ns"], [start_s * 1e9, end_s * 1e9])
    return rows[low:high]


def _epoch_phase(
    trace: Trace,
    number: int,
    epoch: EpochSum,
    table: StepTable,
    reads: Rows,
) -> Phase:
    num_ranks = max(1, len(np.unique(table.rank)))
    of = (table.epoch == epoch.epoch) & ~table.is_resident
    during = _during(reads, epoch.start_s, epoch.end_s)
    return Phase(
        name="steady" if number else "first epoch",
        epoch=epoch.epoch,
        start_s=epoch.start_s,
        end_s=epoch.end_s,
        num_steps=epoch.num_steps,
        num_samples=epoch.num_samples,
        wait_s=float(table.wait_s[of].sum()) / num_ranks,
        bytes_by_source=epoch.bytes_by_source,
        num_requests=len(during),
        num_opens=len(_during(trace.of(Kind.OPEN), epoch.start_s, epoch.end_s)),
        busy_s=epoch.end_s - epoch.start_s,
    )


def _folded(
    name: str, rows: Rows, size_bytes: Mapping[str, int], num_requests: int, num_opens: int
) -> Phase:
    """Return all stretches of one kind as one phase; pieces that touch are one stretch."""
    rank = rows["rank"].min()
    mine = rows[rows["rank"] == rank]
    ends = np.maximum.accumulate(mine["start_ns"] + mine["duration_ns"])
    begins_new = np.append(True, mine["start_ns"][1:] > ends[:-1] + 1_000_000_000)
    return Phase(
        name=name,
        epoch=-1,
        start_s=float(mine["start_ns"].min()) / 1e9,
        end_s=float(ends.max()) / 1e9,
        num_steps=0,
        num_samples=int(mine["count"].sum()),
        wait_s=float(mine["wait_ns"].clip(0).sum()) / 1e9,
        bytes_by_source=size_bytes,
        num_requests=num_requests,
        num_opens=num_opens,
        repeats=int(begins_new.sum()),
        busy_s=float(mine["duration_ns"].sum()) / 1e9,
    )
