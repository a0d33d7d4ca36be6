"""The values of an analysis: what `analyze` returns, and what pages and terminals show.

Times are seconds from the start of the trace, sizes are bytes, shares are between 0 and 1. Large
tables are NumPy columns. Everything here is plain data; `Analysis.as_json` turns it into JSON.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

WAITS = (
    "fetch",
    "open",
    "decode",
    "queue",
    "head-of-line",
    "hand-over",
    "cpu-starved",
    "loader",
)
"""Causes of a wait for a batch. `fetch`: bytes come from a store, a disk or a peer. `open`: files
are opened, stat is called. `decode`: samples are decoded, transformed, collated. `queue`: the batch
was not begun, because workers and the prefetch depth were used up. `head-of-line`: the batch was
ready, an earlier one was not. `hand-over`: the finished batch was on its way to the training
process. `cpu-starved`: a worker was runnable and had no core. `loader`: a wait of which the trace
does not say what the batch went through."""
WORK = (
    "copy",
    "launch",
    "compute",
    "communicate",
    "barrier",
    "checkpoint",
    "validation",
    "between-epochs",
    "interference",
    "unexplained",
)
"""What a step does when it has its batch. `launch`: the host issues work while the device is known
to be idle. `barrier`: a collective waits for a rank that is late. `between-epochs`: from the end of
an epoch's last step to the first question of the next. `interference`: the step is slower because
of the loader's work beside it, e.g. it waits for the interpreter's lock or for a core."""
CATEGORIES = WAITS + WORK
"""All parts of a step's time, in the order in which charts stack them."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A property of the application, the data set or the system that shapes the I/O."""

    family: str
    """`application`, `dataset` or `system`."""
    name: str
    """The name of the fact, e.g. `num_workers`; `label` is the name in words."""
    label: str
    value: Any
    shown: str
    """The value for people."""
    origin: str
    """`config` (the program set it), `probe` (asked of the machine) or `trace` (measured)."""
    is_changeable: bool
    """Whether the user of the job can change it without another machine or another data set."""


@dataclass(frozen=True, kw_only=True)
class Completeness:
    """How much of the run the trace holds."""

    delivered_bytes: int
    """Bytes of the batches that training loops got; 0: nobody knows."""
    delivered_samples: int
    read_bytes: int
    """Bytes of reads and requests in the trace, during the training loop."""
    process_read_bytes: int
    """Bytes that the kernel counted (`io.rchar`) where batches are made; 0: not sampled."""
    compared_bytes: int
    """What the trace has of these."""
    num_spans: int
    dropped: Mapping[str, int]
    """Rows that were left out, by kind."""
    num_damaged: int
    recorded_by: tuple[str, ...]
    """What recorded: `loader`, `python`, `preload`, `strace`."""
    cannot_see: tuple[str, ...]
    """Sentences about what this way of recording cannot see."""
    clock: str
    """How clocks were compared."""
    clock_error_s: float
    """How much times of two machines may be off; 0 on one machine."""

    @property
    def traced_share(self) -> float | None:
        """Bytes in the trace by what the kernel counted; None where it was not sampled."""
        counted = self.process_read_bytes
        return min(1.0, self.compared_bytes / counted) if counted else None


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of the run that does one thing."""

    name: str
    """`start`, `index`, `first epoch`, `steady`, `validation` or `checkpoint`."""
    epoch: int
    """-1: it belongs to no epoch."""
    start_s: float
    end_s: float
    num_steps: int
    """Steps of all ranks."""
    num_samples: int
    wait_s: float
    """Wait for batches, mean over ranks."""
    bytes_by_source: Mapping[str, int]
    num_requests: int
    num_opens: int
    repeats: int = 1
    """How many such stretches are folded into this one (checkpoints, validations)."""
    busy_s: float = 0.0
    """Seconds in it, where it is folded: `end_s - start_s` spans all repeats."""


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """How one rank reads: its spatial and temporal pattern."""

    rank: int
    label: str
    """`sequential`, `strided`, `block-shuffled`, `random`, `whole files` or `mixed`."""
    num_requests: int
    """Reads and requests with at least one byte."""
    num_zero_reads: int
    """Reads that returned nothing: the end of a file, no request."""
    num_opens: int
    read_bytes: int
    sequential: float
    """Share of requests that begin where the last one on the same object ended."""
    strided: float
    """Share of requests that keep a constant distance to the last one, and are not sequential."""
    random: float
    """The rest."""
    stride_bytes: int
    """The most common distance of strided requests; 0: none."""
    locality: float
    """Mean distance between two requests on an object, by that of a uniform shuffle: 1 is a global
    shuffle, values near 0 a shuffle within blocks."""
    size_p50: float
    size_p90: float
    size_p99: float
    requests_per_sample: float
    opens_per_sample: float
    bytes_per_sample: float
    concurrency_mean: float
    """Requests in flight, mean over the time with at least one."""
    concurrency_max: int
    reuse: float
    """Share of read bytes that this rank had read before."""
    num_objects: int
    """Files or objects that it read."""


@dataclass(frozen=True, kw_only=True)
class SlowObject:
    """A file or object that many late requests go to."""

    name: str
    num_requests: int
    read_bytes: int
    busy_s: float
    """Sum of the durations of its requests."""
    latency_p50: float
    slowdown: float
    """Its time per request by that of a request of the same size to the others."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How ranks share files and objects, and how evenly the load lies on them."""

    num_objects: int
    shared_objects: float
    """Share of objects that more than one rank reads in the same epoch."""
    duplicate_bytes: float
    """Share of read bytes that another rank read in the same epoch, too."""
    amplification: float | None
    """Bytes read by bytes of the samples delivered (stored size); None: unknown."""
    busiest_share: float
    """Share of the time of all requests that the busiest tenth of the objects takes."""
    slowest: tuple[SlowObject, ...]
    """Objects with the most time, at most 20."""
    distinct_bytes: int
    """Bytes that were read, each place of each object once."""
    rank_bytes: Mapping[int, int]
    """Bytes that each rank read."""
    slow_share: float
    """Share of the time of all requests that slow objects take beyond what their sizes explain;
    0 unless they are a minority."""
    slow_share_by_rank: Mapping[int, float]
    """The same among the requests of each rank."""


@dataclass(frozen=True, kw_only=True)
class StepTable:
    """One row a step and rank: from one question for a batch to the next."""

    rank: Ints
    step: Ints
    """Number of the step in its rank, from 0."""
    epoch: Ints
    start_s: Floats
    wall_s: Floats
    samples: Ints
    wait_s: Floats
    """Wait for the batch: the sum of the categories in `WAITS`."""
    is_resident: npt.NDArray[np.bool_]
    """Steps of a differential run that got a batch that was kept."""
    parts: Mapping[str, Floats]
    """Seconds of each category (`CATEGORIES`); they add up to `wall_s`."""
    fetch_by_source: Mapping[str, Floats]
    """`parts["fetch"]` by where the bytes came from."""
    waited_for: Ints
    """The rank that a barrier or collective waited for; -1: none."""

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, kw_only=True)
class EpochSum:
    """An epoch of all ranks."""

    epoch: int
    start_s: float
    end_s: float
    num_steps: int
    num_samples: int
    samples_s: float
    """Throughput of the whole job."""
    parts: Mapping[str, float]
    """Seconds of each category, mean over ranks."""
    bytes_by_source: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class WaitMatrix:
    """Rank by time: which share of each moment a rank waited for batches."""

    edges_s: Floats
    ranks: tuple[int, ...]
    wait: Floats
    """Shares, one row a rank, one column a bin."""
    late: Floats
    """Seconds that a rank was behind the first one when it finished the steps of the bin."""


@dataclass(frozen=True, kw_only=True)
class SourceTimeline:
    """Bytes by source over time."""

    edges_s: Floats
    bytes_s: Mapping[str, Floats]
    """Bytes a second of each source in each bin."""
    in_flight: Floats
    """Requests in flight, mean of the bin."""
    samples_s: Floats
    """Samples a second that training loops got."""


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """How a quantity spreads."""

    name: str
    """`request size`, `latency of SOURCE`, `wait`, `step`, `decode per sample`."""
    unit: str
    """`B` or `s`."""
    edges: Floats
    """Logarithmic bins."""
    counts: Ints
    p50: float
    p90: float
    p99: float
    maximum: float


@dataclass(frozen=True, kw_only=True)
class BoundRatio:
    """Bytes from the store against the least that any cache of this size could do with."""

    dataset_bytes: int
    cache_bytes: int
    num_epochs: float
    """Epochs that the trace covers."""
    bound_bytes: int
    """S + (E - 1) * max(0, S - C)."""
    store_bytes: int
    hits: float
    """Share of bytes after the first epoch that did not come from the store."""
    hits_possible: float
    """The same with a cache that never evicts."""
    hits_lru: float
    """The same with LRU and a fresh shuffle each epoch."""

    @property
    def ratio(self) -> float:
        """Store bytes by the bound: 1 is the best that can be."""
        return self.store_bytes / self.bound_bytes if self.bound_bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class Interference:
    """How much slower a step is because the loader works beside it."""

    method: str
    """`differential` (real against resident steps), `accounting` (the kernel's account of the
    training thread) or `none`."""
    share: float
    """Share of the wall time."""
    low: float
    high: float
    """90 % interval of `share`."""
    real_s: float
    """Median of a step without its wait for the batch."""
    resident_s: float
    """The same in resident windows; 0: there were none."""
    lock: float | None
    """Share of the work between batches that waits for the interpreter's lock; None: not
    measured."""
    no_core: float
    """Share of it that is runnable and has no core."""
    on_core: float
    """Share of it on a core."""
    blocked: float
    """The rest: on the device, on a collective, on I/O."""


@dataclass(frozen=True, kw_only=True)
class WorkerLoad:
    """What the workers of the loader do."""

    num_workers: int
    busy: float
    """Share of their time in which they make batches."""
    decode: float
    fetch: float
    open: float
    starved: float
    """Shares of their busy time; `starved`: runnable without a core."""
    cpu_per_sample_s: float
    fetch_per_sample_s: float
    open_per_sample_s: float
    idle: float
    """Share of their time in which they make nothing: as a rule, their batches are not taken."""
    reading: float
    """Share of the run in which at least one of them reads."""
    batch_s_mean: float
    batch_s_p50: float
    batch_s_p99: float


@dataclass(frozen=True, kw_only=True)
class SystemLoad:
    """The machine during the run, from counters; None where nobody sampled."""

    cores: float
    cpu_busy: float | None
    """Share of the machine's cores in use."""
    job_cores: float | None
    """Cores that the processes of the job keep busy, sum over processes of a node."""
    delay: float | None
    """Seconds that threads of the job were runnable without a core, by seconds on a core."""
    disk_busy: float | None
    """Share of the time in which the busiest disk works."""
    device_read_share: float | None
    """Bytes that came from the device by bytes read: 0 is a warm page cache."""
    device_read_by_epoch: Mapping[int, float]
    """The same for each epoch."""
    gpu_busy: float | None
    memory_used: float | None
    psi_cpu: float | None
    psi_io: float | None

    @property
    def runnable(self) -> float | None:
        """Threads of the job that want a core, by usable cores: beyond 1 some of them wait.

        Neighbours on the machine do not raise it: they make the job wait, not want.
        """
        if self.job_cores is None or not self.cores:
            return None
        return self.job_cores * (1 + (self.delay or 0.0)) / self.cores

    @property
    def own_delay(self) -> float:
        """Share of the time without a core that the job brings upon itself.

        With R threads that want one of C cores each waits 1 - C/R of the time. What threads wait
        beyond that is taken by other processes of the machine.
        """
        runnable = self.runnable
        if runnable is None or not self.delay:
            return 1.0
        waited = self.delay / (1 + self.delay)
        return min(1.0, max(0.0, 1 - 1 / max(1e-9, runnable)) / waited)

    @property
    def contention(self) -> float:
        """Share of their time that threads of the job wait for cores that other processes use."""
        return 0.0 if not self.delay else self.delay / (1 + self.delay) * (1 - self.own_delay)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One observation that speaks for a verdict."""

    sentence: str
    value: float
    """The figure behind it."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A cause with the share of the time that it takes."""

    cause: str
    """The word of a cause: docs/concepts/analysis.md lists them."""
    share: float
    """Share of the wall time that would be gone without it."""
    low: float
    high: float
    """90 % interval of `share`."""
    sentence: str
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What limits the run, in one sentence, with the figures behind it."""

    cause: str
    share: float
    low: float
    high: float
    sentence: str
    evidence: tuple[Evidence, ...]
    runner_up: Finding | None
    """What limits the run next; None: nothing worth naming."""
    findings: tuple[Finding, ...] = ()
    """All causes that were found, largest first; the first one is the verdict."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A change that helps, with its predicted gain."""

    rank: int
    """1 is the best."""
    title: str
    cause: str
    settings: Mapping[str, Any]
    """What to set, machine-readable: `num_workers`, `prefetch_factor`, `pin_memory`, `loader`, …"""
    command: str
    """The exact line to write or to run."""
    gain: float
    """Predicted throughput by present throughput, minus 1."""
    gain_low: float
    gain_high: float
    """90 % band of the gain."""
    confidence: str
    """`high` (the model reproduces this run), `medium` or `low` (a bound from shares)."""
    cost: str
    """What it takes: memory, disk, cores, work."""
    why: str


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """All that a trace says about a run."""

    folder: str
    loader: str
    """`penstock`, `torch`, `webdataset`, …"""
    wall_s: float
    """From the first question for a batch to the end of the last step."""
    num_ranks: int
    num_steps: int
    """Steps of a rank."""
    num_samples: int
    """Samples of all ranks."""
    samples_s: float
    """Throughput of the whole job."""
    step_s: float
    """Median of a step."""
    step_mean_s: float
    """Mean of a step: shares of `parts` are of this."""
    parts: Mapping[str, float]
    """Share of the wall time of each category; they add up to 1."""
    fetch_by_source: Mapping[str, float]
    """`parts["fetch"]` by source."""
    steady: Mapping[str, float]
    """Like `parts`, for the epochs after the first; empty where there are none."""
    parameters: tuple[Parameter, ...]
    completeness: Completeness
    phases: tuple[Phase, ...]
    patterns: tuple[Pattern, ...]
    sharing: Sharing
    steps: StepTable
    epochs: tuple[EpochSum, ...]
    waits: WaitMatrix
    timeline: SourceTimeline
    distributions: tuple[Distribution, ...]
    bound: BoundRatio | None
    interference: Interference
    workers: WorkerLoad
    system: SystemLoad
    checkpoints: tuple[tuple[float, float], ...]
    """Begin and end of each checkpoint."""
    checkpoint_bytes_s: float
    """Rate at which checkpoints are written; 0: there are none, or their sizes are unknown."""
    collectives_per_step: float
    """Collectives of a step as if all had the same size; 0: their sizes are unknown."""
    read_cost_by_epoch: Mapping[int, float]
    """Seconds that a byte of local files takes, for each epoch."""
    has_worker_processes: bool
    """Whether batches are made outside of the training processes."""
    verdict: Verdict
    advice: tuple[Advice, ...]
    notes: tuple[str, ...] = field(default=())
    """What the reader has to know of this analysis, e.g. that the model does not fit."""

    @property
    def wait(self) -> float:
        """Share of the wall time spent waiting for batches."""
        return sum(self.parts.get(name, 0.0) for name in WAITS)

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of a parameter."""
        return next((p.value for p in self.parameters if p.name == name), default)

    @property
    def seen_bytes(self) -> int:
        """Bytes of the data set as far as the trace shows it: what was read, without repeats.

        Of a run that ended within its first epoch, the rest is taken to be like what was read.
        """
        known = int(self.value("num_samples", 0) or 0)
        part = min(1.0, self.num_samples / known) if known and self.num_samples else 1.0
        return int(self.sharing.distinct_bytes / part)

    @property
    def cores_per_rank(self) -> float:
        """Cores of a node that a rank has, if the ranks of the node share them evenly."""
        num_nodes = max(1, int(self.value("num_nodes", 1) or 1))
        return self.system.cores / max(1, -(-self.num_ranks // num_nodes))

    def read_rate(self, sources: Collection[str] | None = None) -> float:
        """Return the bytes a second that loops read from some sources, or all, while they ran."""
        line = self.timeline
        of = line.edges_s[1:] > float(self.steps.start_s.min(initial=np.inf))
        size_bytes = sum(
            float((rates * np.diff(line.edges_s))[of].sum())
            for name, rates in line.bytes_s.items()
            if sources is None or name in sources
        )
        return size_bytes / max(1e-9, self.wall_s)

    @property
    def unexplained(self) -> float:
        """Share of the wall time that the trace does not explain."""
        return self.parts.get("unexplained", 0.0) + self.parts.get("loader", 0.0)

    def as_json(self, *, tables: bool = False) -> dict[str, Any]:
        """Return the analysis for programs; with `tables`, also a row for each step."""
        out: dict[str, Any] = _plain(self)
        if not tables:
            del out["steps"]
        return out


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not np.isfinite(value):
        return None  # JSON has no word for it.
    return value
