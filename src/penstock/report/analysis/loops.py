"""Training loops as their rows show them: when each rank asked, when it got, what it did then."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.report.analysis.values import Floats, Ints
from penstock.trace.reading import Trace
from penstock.trace.schema import Flag, Kind

GAP_NS = 1_000_000
"""Between the end of a loop's work and its next question there is no time, unless it did something
else between two epochs: shorter gaps are the recorder's own."""


@dataclass(frozen=True, kw_only=True)
class TrainingLoop:
    """The steps of one rank, in order."""

    rank: int
    ask_ns: Ints
    got_ns: Ints
    done_ns: Ints
    """When the work of the step was done: the next question, or earlier at the end of an epoch."""
    end_ns: Ints
    """The next question; for the last step the end of its work."""
    wait_ns: Ints
    """Wait as the loader states it: no batch was ready."""
    step: Ints
    epoch: Ints
    """As the rows have them; -1: unknown."""
    samples: Ints
    size_bytes: Ints
    is_resident: npt.NDArray[np.bool_]
    process: int
    """The process of the training loop."""
    lock: Floats
    """Share of the step's work that waits for the interpreter's lock; -1: not measured."""
    no_core: Floats
    on_core: Floats
    """Shares of the step's work; -1: not measured."""

    def __len__(self) -> int:
        return len(self.ask_ns)

    @property
    def epochs(self) -> Ints:
        """Epochs numbered from 0 in the order of the run, where the rows do not number them."""
        if len(self) and self.epoch.min() >= 0:
            return self.epoch
        # A step number that falls back begins an epoch.
        falls = np.diff(self.step, prepend=self.step[:1]) < 0
        return np.cumsum(falls & (self.step >= 0))


def loops_of(trace: Trace) -> tuple[TrainingLoop, ...]:
    """Return the loop of every rank that asked for a batch."""
    asked = trace.of(Kind.NEXT)
    launched = trace.of(Kind.LAUNCH)
    loops = [
        _loop(rank, asked[asked["rank"] == rank], launched[launched["rank"] == rank], trace)
        for rank in np.unique(asked["rank"]).tolist()
    ]
    return tuple(loops)


def _loop(rank: int, asked: np.ndarray, launched: np.ndarray, trace: Trace) -> TrainingLoop:
    ask = asked["start_ns"].astype(np.int64)
    # Rows of one thread never overlap; a clock that was corrected may make them by a little.
    got = np.maximum(ask + asked["duration_ns"], ask)
    if len(ask) > 1:
        got[:-1] = np.minimum(got[:-1], ask[1:])
    process = int(np.bincount(asked["process"]).argmax())
    launch_end = launched["start_ns"] + launched["duration_ns"]
    last = _last_ns(trace, rank, process, int(got[-1]), launch_end)
    end = np.append(ask[1:], last)
    shares = _shares(launched, got)
    return TrainingLoop(
        rank=rank,
        ask_ns=ask,
        got_ns=got,
        done_ns=_done(got, end, launch_end),
        end_ns=end,
        wait_ns=np.clip(asked["wait_ns"].astype(np.int64), 0, got - ask),
        step=asked["step"].astype(np.int64),
        epoch=asked["epoch"].astype(np.int64),
        samples=asked["count"].astype(np.int64),
        size_bytes=asked["size_bytes"].astype(np.int64),
        is_resident=(asked["flags"] & int(Flag.RESIDENT)) > 0,
        process=process,
        lock=shares["lock_ns"],
        no_core=shares["wait_ns"],
        on_core=shares["cpu_ns"],
    )


def _last_ns(trace: Trace, rank: int, process: int, got_ns: int, launch_end: Ints) -> int:
    """Return when the last step ended: with its work, as far as any row shows it."""
    rows = trace.of(Kind.COPY, Kind.COMMUNICATE, Kind.COMPUTE, Kind.STEP, rank=rank)
    ends = rows["start_ns"] + rows["duration_ns"]
    ends = ends[(rows["start_ns"] >= got_ns) & (rows["process"] == process)]
    return int(max(got_ns, ends.max(initial=0), launch_end.max(initial=0)))


def _done(got: Ints, end: Ints, launch_end: Ints) -> Ints:
    """Return when the work of each step was done.

    A LAUNCH row ends with a question. Where no batch was the answer, an epoch was over: what came
    between it and the next question is no work of a step.
    """
    done = end.copy()
    if len(launch_end):
        ends = np.sort(launch_end)
        last = np.searchsorted(ends, end, side="right") - 1
        at = ends[np.clip(last, 0, None)]
        early = (last >= 0) & (at > got) & (end - at > GAP_NS)
        done[early] = at[early]
    return done


def _shares(launched: np.ndarray, got: Ints) -> dict[str, Floats]:
    """Return shares of the work of each step; a row may cover several steps."""
    out = {name: np.full(len(got), -1.0) for name in ("lock_ns", "wait_ns", "cpu_ns")}
    if not len(launched):
        return out
    row = np.searchsorted(launched["start_ns"], got, side="right") - 1
    # The clock is read once more between NEXT and LAUNCH: the row may begin just after `got`.
    ends = launched["start_ns"] + launched["duration_ns"]
    inside = np.clip(row, 0, None)
    is_in = (row >= 0) & (got < ends[inside])
    for name, share in out.items():
        known = launched[name][inside]
        of = np.minimum(1.0, known / np.maximum(1, launched["duration_ns"][inside]))
        share[:] = np.where(is_in & (known >= 0), of, -1.0)
    return out
