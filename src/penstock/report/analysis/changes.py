"""Changes that remove a cause: what to set, in torch, in Penstock, on the machine.

A change has settings for programs, a command for people, a question for the model and, for runs
that no model fits, the share of its cause that is left afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.report.analysis.epoch_starts import epoch_start_wait
from penstock.report.analysis.interference import settled_real
from penstock.report.analysis.pipeline import own_hand_over, pipeline_of
from penstock.report.analysis.sources import is_peer, is_remote
from penstock.report.analysis.values import Analysis, Finding
from penstock.units import show_bytes

NEARLY_NONE = 0.02
"""What is left of a read's time if its bytes are in memory or on a disk that is not busy."""
PACKED = 0.05
"""What is left of the time of small reads if many samples are read at once."""
COPY_BYTES_S = 1.3e9
"""Copying a state into new memory, and the part of saving that keeps the interpreter's lock."""
BACKWARD = 0.66
"""Share of a step's own work that is its backward pass."""
BUCKETS = 8
"""Pieces in which gradients are sent, where the trace does not say."""
WORKERS_MAX = 64
"""More workers of a rank than this are not advised: what is left is another cause."""


@dataclass(frozen=True, kw_only=True)
class SuggestedChange:
    """One change to a run."""

    title: str
    settings: Mapping[str, Any]
    command: str
    left: float
    """Share of the cause's time that is left after it."""
    cost: str = "none"
    why: str = ""
    what_if: Mapping[str, Any] = field(default_factory=dict)
    """The question for the model; empty: the model knows nothing of it."""
    gain: tuple[float, float, float] | None = None
    """The gain with its band, where the run's own figures say it; None: from `left`."""
    is_certain: bool = False
    """Whether `left` follows from the trace, not from experience with other runs."""


def changes_for(finding: Finding, analysis: Analysis) -> list[SuggestedChange]:
    """Return the changes for one cause, the most direct one first."""
    make = _BY_CAUSE.get(finding.cause)
    return [] if make is None else make(finding, analysis)


def _is_torch(analysis: Analysis) -> bool:
    return analysis.loader != "penstock"


def _workers(analysis: Analysis, wanted: float) -> int:
    return max(1, min(WORKERS_MAX, math.ceil(wanted)))


def _more_workers(
    finding: Finding, analysis: Analysis, *, needs_cores: bool
) -> SuggestedChange | None:
    """Return the change to as many workers as keep up with the loop."""
    now = analysis.workers.num_workers
    # Work that goes on while the loop computes is `1 - wait`: so many times more is wanted.
    wanted = max(1, now) / max(0.05, 1 - analysis.wait) * 1.15
    if now == 0:
        # Batches are made between steps: a worker takes them out of the step's way.
        wanted = max(1.0, 1.15 * analysis.wait / max(0.05, 1 - analysis.wait))
    cores = analysis.cores_per_rank
    count = _workers(analysis, wanted)
    if needs_cores and cores:
        count = min(count, max(1, int(cores)))
    # Workers that read also compute: more of them than cores feed find no core for that.
    load, samples = analysis.workers, analysis.num_samples / max(1, len(analysis.steps))
    on_core = load.cpu_per_sample_s * samples / max(1e-9, load.batch_s_mean)
    if cores and on_core:
        count = min(count, max(1, math.ceil(cores / on_core)))
    if count <= now:
        return None
    left = 0.0
    if now:
        # A batch's time is spread over more workers; what exceeds the step is still waited for.
        busy = 1 - analysis.wait
        left = max(0.0, (now / count - busy) / max(1e-6, 1 - busy))
    return SuggestedChange(
        title=f"use {count} workers instead of {now}",
        settings={"num_workers": count},
        command=_set_workers(analysis, count),
        left=min(1.0, left),
        cost=f"{count - now} more processes a rank",
        what_if={"workers": count},
        gain=pipe.gain(workers=count) if (pipe := pipeline_of(analysis)) else None,
        is_certain=True,
    )


def _set_workers(analysis: Analysis, count: int) -> str:
    if _is_torch(analysis):
        return f"DataLoader(..., num_workers={count}, persistent_workers=True)"
    return f"penstock.Loader(..., workers={count})"


def _to_penstock(analysis: Analysis, why: str) -> SuggestedChange:
    """Return the change to Penstock: it works on across epochs, and hands over without a copy."""
    hand_over = analysis.parts["hand-over"] * own_hand_over(analysis)
    removed = min(0.85, epoch_start_wait(analysis).share_of_time + hand_over)
    gains = [1 / (1 - removed * x) - 1 for x in (0.9, 0.5, 1.1)]
    return SuggestedChange(
        title="move the loader to Penstock",
        settings={"loader": "penstock"},
        command="penstock.Loader(penstock.open(DATA), batch_size=..., epochs=...)",
        left=1.0,
        cost="a change of a few lines in the training script",
        why=why,
        gain=(gains[0], gains[1], gains[2]),
    )


def _too_few_workers(finding: Finding, analysis: Analysis) -> list[SuggestedChange]:
    more = _more_workers(finding, analysis, needs_cores=True)
    out = [more] if more is not None else []
    if _is_torch(analysis):
        out.append(_to_penstock(analysis, "Penstock chooses its workers by measuring."))
    return out


def _heavy_decode(finding: Finding, analysis: Analysis) -> list[SuggestedChange]:
    busy, wait = 1 - analysis.wait, analysis.wait
    # Workers take a whole step for a batch; with half of the decoding, less is waited for.
    decode = analysis.workers.decode + analysis.workers.starved
    left = max(0.0, (1 - 0.5 * decode - busy) / max(1e-6, wait))
    pipe, starts = pipeline_of(analysis), epoch_start_wait(analysis)
    changes = [
        SuggestedChange(
            title="halve the decoding: store samples smaller or decoded",
            settings={"decode_scale": 0.5},
            command="penstock pack SOURCE DESTINATION  # after resizing to what the model uses",
            left=min(1.0, left),
            cost="one pass over the data set",
            what_if={"decode_factor": 0.5},
            gain=pipe.gain(decode=0.5) if pipe and not starts.is_most else None,
            is_certain=True,
        ),
        SuggestedChange(
            title="decode on more cores",
            settings={},
            command="give the job more cores (cgroup, --cpus-per-task)",
            left=0.1,
            cost="cores",
            what_if={"cores": math.ceil(analysis.system.cores / max(0.05, busy)) or 1},
        ),
    ]
    if _is_torch(analysis) and starts.is_most:
        why = "Penstock goes on from one epoch to the next: its workers do not begin anew."
        return [_to_penstock(analysis, why), changes[0]]
    return changes


def _store_speed(finding: Finding, analysis: Analysis) -> list[SuggestedChange]:
    is_store = finding.cause == "slow-store"
    names = [n for n in analysis.timeline.bytes_s if is_remote(n) == is_store and not is_peer(n)]
    rate = analysis.read_rate(names)
    if not rate:
        return []
    wanted = rate / max(0.05, 1 - finding.share)
    change = SuggestedChange(
        title=f"give the job {show_bytes(wanted)}/s of the store instead of {show_bytes(rate)}/s",
        settings={"store_bandwidth": wanted},
        command="raise the limit of the store or of its link, or copy the data nearer",
        left=0.1,
        cost="a faster store",
        what_if={"store_bandwidth": max(1.0, wanted)} if is_store else {},
    )
    return [change]


def _cache(finding: Finding, analysis: Analysis) -> SuggestedChange:
    # Reads of a socket have no offsets: what one epoch reads is then all that is known.
    read = max(sum(epoch.bytes_by_source.values()) for epoch in analysis.epochs)
    size = int(analysis.value("dataset_bytes", 0) or max(analysis.seen_bytes, read))
    epochs = max(1.0, len(analysis.epochs), float(analysis.value("epochs", 0) or 0))
    later, pipe = 1 - 1 / epochs, pipeline_of(analysis)
    return SuggestedChange(
        title=f"cache the data set ({show_bytes(size)}) on the node",
        settings={"cache_bytes": int(size * 1.1)},
        command=f"penstock.Loader(..., tiers=[penstock.Disk(FOLDER, {int(size * 1.1)})])",
        left=1 - later,
        cost=f"{show_bytes(size * 1.1)} of memory or disk",
        why="Later epochs then come from the cache; the first one still reads the store.",
        gain=pipe.gain(fetch=NEARLY_NONE, share=later) if pipe else None,
        is_certain=len(analysis.epochs) > 1,
    )


def _slow_store(finding: Finding, analysis: Analysis) -> list[SuggestedChange]:
    more = _more_workers(finding, analysis, needs_cores=False)
    out = [_cache(finding, analysis), *_store_speed(finding, analysis)]
    if more is not None and _is_torch(analysis):
        out.append(more)
    if _is_torch(analysis):
        why = "Penstock keeps many requests in flight and reads ahead."
        out.append(_to_penstock(analysis, why))
    return out


def _cache_too_small(finding: Finding, analysis: Analysis) -> list[SuggestedChange]:
    bound = analysis.bound
    size = int((bound.dataset_bytes if bound else analysis.value("dataset_bytes", 0)) * 1.05)
    return [
        SuggestedChange(
            title=f"raise the cache to {show_bytes(size)}, so that it holds the data set",
            settings={"cache_bytes": size},
            command=f"penstock.Loader(..., tiers=[penstock.Disk(FOLDER, {size})])",
            left=0.0,
            cost=f"{show_bytes(size)} of disk or memory",
            is_certain=True,
        )
    ]


def _slow_disk(finding: Finding, analysis: Analysis) -> list[SuggestedChange]:
    size = int(analysis.value("dataset_bytes", 0) or analysis.seen_bytes)
    memory = int(analysis.value("memory_bytes", 0) or 0)
    out = []
    if memory and size and size < 0.7 * memory:
        out.append(
            SuggestedChange(
                title=f"keep the data set ({show_bytes(size)}) in memory",
                settings={"warm_cache": True, "cache_bytes": size},
                command="cp -r DATA /dev/shm/ and read from there",
                left=0.05,
                cost=f"{show_bytes(size)} of memory",
                what_if={"fetch_factor": NEARLY_NONE},
                gain=pipe.gain(fetch=NEARLY_NONE) if (pipe := pipeline_of(analysis)) else None,
            )
        )
    out += _store_speed(finding, analysis)
    return out


def _cold(finding: Finding, analysis: Analysis) -> list[SuggestedChange]:
    table, kept = analysis.steps, settled_real(analysis.steps)
    later = kept & (table.epoch > table.epoch[kept].min())
    gain = float(table.wall_s[kept].mean() / table.wall_s[later].mean()) - 1
    return [
        SuggestedChange(
            title="read the files into the page cache before the run starts",
            settings={"warm_cache": True},
            command="cat FILES > /dev/null  # while the job before this one still computes",
            left=0.02,
            cost="one pass over the data set, before the run",
            why="Later epochs, whose files are in the page cache, show what the first would take.",
            gain=(gain, 0.75 * gain, 1.25 * gain),
        )
    ]


def _tiny_files(finding: Finding, analysis: Analysis) -> list[SuggestedChange]:
    return [
        SuggestedChange(
            title="pack the files into shards",
            settings={"pack_files": True},
            command="penstock pack FOLDER DESTINATION",
            left=0.05,
            cost="one pass over the data set",
            gain=pipe.gain(fetch=PACKED) if (pipe := pipeline_of(analysis)) else None,
        ),
        *(c for c in (_more_workers(finding, analysis, needs_cores=False),) if c is not None),
    ]


def _straggler(finding: Finding, analysis: Analysis) -> list[SuggestedChange]:
    # Another node only helps where the ranks are on several.
    has_nodes = int(analysis.value("num_nodes", 1) or 1) > 1
    if has_nodes:
        title = "move the slow rank to another node, or take that node out"
        command = "exclude the node (srun --exclude=NODE) and look at its clocks and neighbours"
    else:
        title = "free the slow rank of what else runs on its cores or its GPU"
        command = "top; nvidia-smi; taskset -pc PID  # what runs where the slow rank runs"
    return [
        SuggestedChange(
            title=title,
            settings={"replace_rank": True},
            command=command,
            left=0.0,
            cost="another node" if has_nodes else "none",
            is_certain=True,
        )
    ]


def _skewed(finding: Finding, analysis: Analysis) -> list[SuggestedChange]:
    # The slow rank gets faster by what the others take over: with N ranks, 1/N of the excess stays.
    left = 1 / max(2, analysis.num_ranks) if analysis.num_ranks > 1 else 0.2
    return [
        SuggestedChange(
            title="deal the data out evenly: by bytes, in turns, or shuffled over all ranks",
            settings={"rebalance_shards": True},
            command="files[rank::world_size], or penstock.Loader(..., shuffle='global')",
            left=left,
            cost="none",
            gain=_gain_balanced(finding, analysis, left),
            is_certain=analysis.num_ranks > 1,
        )
    ]


def _gain_balanced(
    finding: Finding, analysis: Analysis, left: float
) -> tuple[float, float, float] | None:
    """Return the gain of ranks whose batches take the same time on average.

    At best a step takes as long as the own work of the late rank, or as the mean batch of all. But
    single batches still differ, and all ranks wait for the slowest: the truth lies between that and
    the share of the wait that remains if the excess is dealt out.
    """
    pipe, table = pipeline_of(analysis), analysis.steps
    if pipe is None or analysis.num_ranks < 2:
        return None
    kept = settled_real(table)
    rows = [kept & (table.rank == rank) for rank in np.unique(table.rank)]
    late = min(rows, key=lambda of: float(table.parts["barrier"][of].mean()))
    own_s = float((table.wall_s - table.wait_s)[late].mean())
    best = pipe.step_s / replace(pipe, own_s=own_s).step() - 1
    least = 1 / (1 - min(0.95, finding.share * (1 - left))) - 1
    low, high = sorted((best, least))
    return math.sqrt((1 + low) * (1 + high)) - 1, 0.75 * low, high


def _communication(finding: Finding, analysis: Analysis) -> list[SuggestedChange]:
    backward = BACKWARD * analysis.parts.get("compute", 0.0)
    # The last piece is there only when the backward pass has ended.
    pieces = analysis.collectives_per_step or BUCKETS
    hidden = min(0.9, backward * (1 - 1 / max(1.0, pieces)) / max(1e-6, finding.share))
    return [
        SuggestedChange(
            title="overlap communication with the backward pass",
            settings={"overlap_communication": True},
            command="torch.nn.parallel.DistributedDataParallel(model), or penstock.step.attach",
            left=1 - hidden,
            cost="none",
        ),
        SuggestedChange(
            title="send gradients in bfloat16",
            settings={"wire_dtype": "bf16"},
            command="from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import "
            "bf16_compress_hook; model.register_comm_hook(None, bf16_compress_hook)",
            left=0.5,
            cost="rounds gradients to 8 bits of mantissa",
            what_if={"communicate_factor": 0.5},
            is_certain=True,
        ),
    ]


def _checkpoint(finding: Finding, analysis: Analysis) -> list[SuggestedChange]:
    # A state is copied before it is saved in the background: where the file takes bytes as fast as
    # memory does, the copy takes as long as saving.
    left = min(0.95, 0.1 + analysis.checkpoint_bytes_s / COPY_BYTES_S)
    every = max(1, round(analysis.num_steps / max(1, len(analysis.checkpoints))))
    changes = [
        SuggestedChange(
            title="save checkpoints in the background",
            settings={"async_checkpoint": True},
            command="torch.distributed.checkpoint.async_save(state, checkpoint_id=FOLDER)",
            left=left,
            cost="memory for a copy of the state",
            is_certain=analysis.checkpoint_bytes_s > 0,
        ),
        SuggestedChange(
            title=f"save half as often: every {2 * every} steps instead of every {every}",
            settings={"checkpoint_every": 2 * every},
            command=f"save the state every {2 * every} steps",
            left=0.5,
            cost="twice as many steps are lost if the job dies",
            is_certain=True,
        ),
    ]
    return changes if left <= 0.5 else changes[::-1]


def _lock(finding: Finding, analysis: Analysis) -> list[SuggestedChange]:
    return [
        SuggestedChange(
            title="move the loader's work into processes of its own",
            settings={"workers": "processes"},
            command="penstock.Loader(..., workers='processes')"
            if not _is_torch(analysis)
            else "DataLoader(..., num_workers=N) instead of threads in the data set",
            left=0.1,
            cost="memory for worker processes",
            gain=_gain_without_lock(finding, analysis),
            is_certain=True,
        )
    ]


def _gain_without_lock(finding: Finding, analysis: Analysis) -> tuple[float, float, float] | None:
    """Return the gain of a step that waits for no lock; None: only the share of the wait is known.

    Resident windows measure it. On a GPU, a step then takes as long as the host issues work or as
    the device computes: what else the host was blocked for came of issuing late.
    """
    seen, system = analysis.interference, analysis.system
    if seen.method == "differential" and seen.resident_s:
        left_s = analysis.step_s - (seen.real_s - seen.resident_s)
        gain = analysis.step_s / max(left_s, 0.05 * analysis.step_s) - 1
        return gain, 0.75 * gain, 1.25 * gain
    if system.gpu_busy is None:
        return None
    host = (1 - analysis.wait) * (seen.on_core + seen.no_core)
    gain = 1 / max(0.05, analysis.wait + max(host, system.gpu_busy)) - 1
    low = 1 / (1 - min(0.95, finding.low)) - 1
    return gain, min(gain, low), max(gain, 1 / max(0.05, system.gpu_busy) - 1)


def _oversubscribed(finding: Finding, analysis: Analysis) -> list[SuggestedChange]:
    cores = max(1, int(analysis.cores_per_rank))
    return [
        SuggestedChange(
            title=f"use {cores} workers with one thread each",
            settings={"num_workers": cores, "threads_per_worker": 1},
            command=f"DataLoader(..., num_workers={cores}, worker_init_fn=lambda _: "
            "torch.set_num_threads(1))"
            if _is_torch(analysis)
            else f"penstock.Loader(..., workers={cores})",
            # With no more threads than cores, only the training thread shares its core.
            left=0.03,
            cost="none",
            what_if={"workers": cores, "interference": False},
        )
    ]


def _launch(finding: Finding, analysis: Analysis) -> list[SuggestedChange]:
    return [
        SuggestedChange(
            title="compile the step, so that it issues fewer and larger operations",
            settings={"compile_step": True},
            command="model = torch.compile(model, mode='reduce-overhead')",
            left=0.1,
            cost="a minute of compilation at the start",
        ),
        SuggestedChange(
            title="use larger batches",
            settings={"batch_size": 2 * int(analysis.value("batch_size", 1) or 1)},
            command="double the batch size, and adapt the learning rate",
            left=0.5,
            cost="changes the training recipe",
        ),
    ]


def _prefetch(finding: Finding, analysis: Analysis) -> list[SuggestedChange]:
    now = int(analysis.value("prefetch_factor", 2) or 2)
    if not _is_torch(analysis):
        return [
            SuggestedChange(
                title="look further ahead",
                settings={"prefetch_factor": 4 * now},
                command="penstock.Loader(..., look_ahead='2GB')",
                left=0.3,
                cost="memory for batches on their way",
            )
        ]
    return [
        SuggestedChange(
            title=f"prefetch {4 * now} batches a worker instead of {now}",
            settings={"prefetch_factor": 4 * now},
            command=f"DataLoader(..., prefetch_factor={4 * now}, persistent_workers=True)",
            left=0.3,
            cost="memory for the batches",
            what_if={"prefetch_factor": 4 * now},
        )
    ]


def _hand_over(finding: Finding, analysis: Analysis) -> list[SuggestedChange]:
    pinned = SuggestedChange(
        title="hand batches over in page-locked memory, from a thread",
        settings={"pin_memory": True},
        command="DataLoader(..., pin_memory=True)",
        left=0.4,
        cost="page-locked memory for a few batches",
    )
    why = "Penstock hands batches over in shared memory, without a copy."
    if not _is_torch(analysis):
        return []
    has_device = str(analysis.value("device", "cpu")).startswith("cuda")
    return [*([pinned] if has_device else []), _to_penstock(analysis, why)]


def _copy(finding: Finding, analysis: Analysis) -> list[SuggestedChange]:
    return [
        SuggestedChange(
            title="copy batches to the device from page-locked memory while the step computes",
            settings={"pin_memory": True},
            command="DataLoader(..., pin_memory=True) and batch.to(device, non_blocking=True)",
            left=0.2,
            cost="page-locked memory for a few batches",
        )
    ]


_BY_CAUSE: dict[str, Callable[[Finding, Analysis], list[SuggestedChange]]] = {
    "too-few-workers": _too_few_workers,
    "heavy-decode": _heavy_decode,
    "slow-store": _slow_store,
    "cache-too-small": _cache_too_small,
    "slow-disk": _slow_disk,
    "cold-page-cache": _cold,
    "tiny-files": _tiny_files,
    "straggler-rank": _straggler,
    "skewed-shards": _skewed,
    "communication-bound": _communication,
    "checkpoint-interference": _checkpoint,
    "interpreter-lock": _lock,
    "oversubscribed-cores": _oversubscribed,
    "launch-bound": _launch,
    "prefetch-too-short": _prefetch,
    "slow-hand-over": _hand_over,
    "slow-copy": _copy,
}
