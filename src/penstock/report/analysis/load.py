"""What the workers and the machine did during a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.report.analysis.batches import same_processes
from penstock.report.analysis.loops import TrainingLoop
from penstock.report.analysis.sources import is_of, is_read
from penstock.report.analysis.values import Floats, SystemLoad, WorkerLoad
from penstock.trace.reading import Trace
from penstock.trace.schema import Kind

Rows = npt.NDArray[np.void]


def worker_load(trace: Trace, loops: tuple[TrainingLoop, ...], num_samples: int) -> WorkerLoad:
    """Return what the workers of all ranks did, from the first question to the last step's end."""
    batches = trace.of(Kind.BATCH)
    made = batches if len(batches) else trace.of(Kind.DECODE)
    window_ns = max((int(x.end_ns[-1] - x.ask_ns[0]) for x in loops), default=1)
    is_foreign = len(batches) > 0
    # A worker of a foreign loader is a process, a worker of Penstock may be a thread.
    who = same_processes(trace)[made["process"]] if len(made) else made["process"]
    if not is_foreign:
        who = who.astype(np.int64) << 32 | made["thread"]
    inside = _inside(trace, made, is_foreign)
    busy_ns = float(made["duration_ns"].sum())
    alive_ns = _alive_ns(made, who, window_ns)
    per = max(1, num_samples)
    starved = float(np.clip(made["wait_ns"], 0, None).sum())
    lengths = made["duration_ns"] / 1e9 if len(made) else np.zeros(1)
    return WorkerLoad(
        num_workers=_num_workers(trace, who, loops),
        busy=min(1.0, busy_ns / max(1.0, alive_ns)),
        decode=max(0.0, 1 - (inside["fetch"] + inside["open"] + starved) / max(1.0, busy_ns)),
        fetch=inside["fetch"] / max(1.0, busy_ns),
        open=inside["open"] / max(1.0, busy_ns),
        starved=starved / max(1.0, busy_ns),
        cpu_per_sample_s=float(made["cpu_ns"].sum()) / 1e9 / per,
        fetch_per_sample_s=inside["fetch"] / 1e9 / per,
        open_per_sample_s=inside["open"] / 1e9 / per,
        # Threads of Penstock that decode wait for others that fetch: they do not idle.
        idle=max(0.0, 1 - busy_ns / max(1.0, alive_ns)) if is_foreign else 0.0,
        reading=inside["reading"] / max(1, window_ns),
        batch_s_mean=float(lengths.mean()),
        batch_s_p50=float(np.median(lengths)),
        batch_s_p99=float(np.percentile(lengths, 99)),
    )


def _num_workers(trace: Trace, who: Any, loops: tuple[TrainingLoop, ...]) -> int:
    """Return the workers of a rank: as it was set, else those that worked at one time."""
    stated = trace.facts().get("num_workers")
    if stated is not None:
        return int(stated)
    return max(1, len(np.unique(who)) // max(1, len(loops))) if len(who) else 0


def _alive_ns(made: Rows, who: Any, window_ns: int) -> float:
    """Return how long workers lived, added up: workers of torch may end with their epoch."""
    if not len(made):
        return 0.0
    _, where = np.unique(who, return_inverse=True)
    begin = np.full(where.max() + 1, np.iinfo(np.int64).max)
    end = np.zeros(where.max() + 1, np.int64)
    np.minimum.at(begin, where, made["start_ns"])
    np.maximum.at(end, where, made["start_ns"] + made["duration_ns"])
    return float(np.minimum(end - begin, window_ns).sum())


def _inside(trace: Trace, made: Rows, is_foreign: bool) -> Mapping[str, float]:
    """Return nanoseconds of reads and opens in the processes that make batches, and of any read."""
    if not is_foreign:
        return {"fetch": 0.0, "open": 0.0, "reading": 0.0}
    spans, same = trace.spans, same_processes(trace)
    is_worker = np.zeros(len(same), bool)
    is_worker[same[made["process"]]] = True
    length = np.where(is_worker[same][spans["process"]], spans["duration_ns"], 0)
    reads = is_read(spans)
    return {
        "fetch": float(length[reads].sum()),
        "open": float(length[is_of(spans, Kind.OPEN, Kind.METADATA)].sum()),
        "reading": _union_ns(spans["start_ns"][reads], length[reads]),
    }


def _union_ns(start_ns: Any, length_ns: Any) -> float:
    """Return how long at least one of some spans lasts."""
    order = np.argsort(start_ns)
    start, end = start_ns[order], (start_ns + length_ns)[order]
    if not len(start):
        return 0.0
    before = np.concatenate([start[:1], np.maximum.accumulate(end)[:-1]])
    return float(np.maximum(0, end - np.maximum(start, before)).sum())


def system_load(
    trace: Trace, loops: tuple[TrainingLoop, ...], facts: Mapping[str, Any]
) -> SystemLoad:
    """Return the load of the machine, from counters; from the accounts in rows where none are."""
    begin = min(int(x.ask_ns[0]) for x in loops)
    end = max(int(x.end_ns[-1]) for x in loops)
    span = (begin, max(end, begin + 1))
    hosts = max(1, len({p.host for p in trace.processes}))
    cpu = _rise_sum(trace, ("cpu.user_s", "cpu.system_s"), span)
    delay = _rise_sum(trace, ("cpu.delay_s",), span)
    if cpu is None:
        cpu, delay = _from_rows(trace)
    seconds = (span[1] - span[0]) / 1e9
    cores = float(facts.get("cores") or _level(trace, "node.cores", span) or 0)
    busy_s = _rise_sum(trace, ("node.disk_busy_s",), span)
    memory = float(facts.get("memory_bytes") or 0)
    used = _level(trace, "memory.rss_bytes", span, total=True)
    return SystemLoad(
        cores=cores,
        cpu_busy=_level(trace, "node.cpu_busy", span),
        job_cores=None if cpu is None else cpu / seconds / hosts,
        delay=None if delay is None or not cpu else delay / cpu,
        disk_busy=None if busy_s is None else busy_s / seconds / hosts,
        device_read_share=_device_share(trace, span),
        device_read_by_epoch=_device_by_epoch(trace, loops),
        gpu_busy=_gpu_busy(trace, span),
        memory_used=used / hosts / memory if used and memory else None,
        psi_cpu=_level(trace, "node.psi_cpu", span),
        psi_io=_level(trace, "node.psi_io", span),
    )


def _from_rows(trace: Trace) -> tuple[float | None, float | None]:
    """Return seconds on a core and runnable without one, of the threads that rows account for."""
    rows = trace.of(Kind.LAUNCH, Kind.BATCH, Kind.DECODE)
    cpu = float(rows["cpu_ns"].sum()) / 1e9
    if not cpu:
        return None, None
    return cpu, float(np.clip(rows["wait_ns"], 0, None).sum()) / 1e9


_Series = dict[str, tuple[Floats, Floats]]


def counter_series(trace: Trace) -> dict[tuple[str, int], _Series]:
    """Return times and values of each counter, by host and process; 0 is the machine itself.

    Processes sample themselves, or whoever started the job samples all of them and says `pid`.
    """
    found: dict[tuple[str, int], dict[str, list[tuple[int, float]]]] = {}
    for process in trace.processes:
        for at_ns, values in process.counters:
            pid = int(values.get("pid", 0 if process.role == "launch" else process.pid))
            for name, value in values.items():
                of = 0 if name.startswith(("node.", "gpu.")) else pid
                found.setdefault((process.host, of), {}).setdefault(name, []).append((at_ns, value))
    return {who: {n: _columns(v) for n, v in series.items()} for who, series in found.items()}


def _columns(points: list[tuple[int, float]]) -> tuple[Floats, Floats]:
    table = np.array(sorted(points), float)
    return table[:, 0], table[:, 1]


def rise_of(series: _Series, name: str, span: tuple[float, float]) -> float | None:
    """Return how much a counter rose in a stretch of time; between readings it rises in a line."""
    times, values = series.get(name, (np.zeros(0), np.zeros(0)))
    if len(times) < 2:
        return None
    # A sum over threads falls when one of them ends: only what rises counts.
    risen = np.concatenate([[0.0], np.cumsum(np.maximum(0.0, np.diff(values)))])
    low, high = np.interp(span, times, risen)
    return float(high - low)


def _rise_sum(trace: Trace, names: tuple[str, ...], span: tuple[float, float]) -> float | None:
    found = counter_series(trace).values()
    rises = [rise_of(series, name, span) for series in found for name in names]
    known = [rise for rise in rises if rise is not None]
    return sum(known) if known else None


def _level(
    trace: Trace, name: str, span: tuple[float, float], *, total: bool = False
) -> float | None:
    """Return the mean of a level over a stretch of time; `total`: summed over processes."""
    levels = []
    for series in counter_series(trace).values():
        times, values = series.get(name, (np.zeros(0), np.zeros(0)))
        inside = (times >= span[0]) & (times <= span[1])
        if inside.any():
            levels.append(float(values[inside].mean()))
    if not levels:
        return None
    return sum(levels) if total else sum(levels) / len(levels)


def _gpu_busy(trace: Trace, span: tuple[float, float]) -> float | None:
    busy = _level(trace, "gpu.busy", span)
    if busy is None:
        return None
    return busy / 100 if busy > 1 else busy


def _device_share(trace: Trace, span: tuple[float, float]) -> float | None:
    device = _rise_sum(trace, ("io.read_bytes",), span)
    read = _rise_sum(trace, ("io.rchar",), span)
    if device is None or not read:
        return None
    return device / read


def _device_by_epoch(trace: Trace, loops: tuple[TrainingLoop, ...]) -> Mapping[int, float]:
    out = {}
    loop = loops[0]
    for epoch in np.unique(loop.epochs).tolist():
        of = loop.epochs == epoch
        share = _device_share(trace, (int(loop.ask_ns[of].min()), int(loop.end_ns[of].max())))
        if share is not None:
            out[int(epoch)] = share
    return out
