"""Causes: what takes time away from a run, each with its share and the evidence for it.

The shares come from the attribution. A rule here only decides which *name* a share gets, by what
the run itself shows: first epoch against later ones, one rank against the others, slow objects
against the rest, threads that want a core against cores. The few fixed numbers are constants below.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.report.analysis.epoch_starts import epoch_start_wait
from penstock.report.analysis.ground import SKEW_MIN, StepBasis, ground_of, make_finding
from penstock.report.analysis.interference import share_band
from penstock.report.analysis.pipeline import own_hand_over, pipeline_of
from penstock.report.analysis.sources import NOT_SEEN, is_peer, is_remote
from penstock.report.analysis.values import Analysis, Finding
from penstock.units import show_seconds

CORES_FULL = 0.8
"""Threads of the job that want a core, by cores: from here on more workers find no core."""
OVERSUBSCRIBED = 1.5
"""The same: from here on threads spend as much time waiting for a core as they gain from it."""
TINY_BYTES = 8 << 10
"""Two pages: a request for so little takes a disk as long as one for many times as much."""
COLD_FACTOR = 3.0
"""A first epoch whose reads take this many times longer a byte than later ones was cold."""
IDLE_MIN = 0.3
"""Workers that idle this much while the loop waits could have worked ahead."""
CACHE_LOSS = 0.02
"""Share of the time of later epochs from which on the cache is to blame, not the cold start."""
CACHE_NEAR = 0.5
"""A cache that holds at least this share of the data set is too small; a smaller one is something
else than a cache for it."""
DEVICE_READS = 0.5
"""From this share of bytes on that come from the device, the page cache does not hold the data."""
EXPLAINED = 0.5
"""Share of a measured interference from which on the lock or the cores explain it."""


def findings_of(analysis: Analysis) -> list[Finding]:
    """Return all causes with a share above 0, largest first."""
    ground = ground_of(analysis)
    found = [f for f in (ground.checkpoint, ground.straggler) if f is not None]
    found += _input_findings(ground)
    found += _work_findings(ground)
    return sorted((f for f in found if f.share > 0), key=lambda f: -f.share)


def _input_findings(ground: StepBasis) -> list[Finding]:
    """Return the causes of waits for batches."""
    analysis = ground.analysis
    names = list(analysis.steps.fetch_by_source)
    remote = [n for n in names if is_remote(n)]
    local = [n for n in names if not is_remote(n) and n != NOT_SEEN]
    waiting = ground.band("fetch", "open", "decode", "cpu-starved", "queue", "head-of-line")
    if (
        analysis.workers.idle >= IDLE_MIN
        and ground.band("queue", "head-of-line")[0] > waiting[0] / 2
    ):
        return [_too_short(ground, waiting), _hand_over(ground)]
    if local and _cold(analysis) is not None:
        return _cold_findings(ground, local)
    fetched, decoded = _leave_one_out(ground, local)
    return [
        _remote(ground, remote),
        _scaled(_local(ground, local), fetched),
        _scaled(_cpu(ground), decoded),
        _too_short(ground, ground.band("queue", "head-of-line")),
        _hand_over(ground),
        _unseen(ground),
    ]


def _leave_one_out(ground: StepBasis, sources: list[str]) -> tuple[float, float]:
    """Return the factors that turn time spent in reads and in decoding into time lost to them.

    A worker that reads from a disk which is busy all the time would gain nothing by decoding
    faster, although a part of every wait is spent decoding. What counts is what a step would take
    without the one, and without the other.
    """
    pipe = pipeline_of(ground.analysis)
    reads, decodes = ground.band("open", sources=sources)[0], ground.band("decode")[0]
    if pipe is None or not pipe.workers or min(reads, decodes) <= 0:
        return 1.0, 1.0
    fetch, decode = pipe.without(fetch=0.0), pipe.without(decode=0.0)
    if fetch + decode <= 0:
        return 1.0, 1.0
    both = (reads + decodes) / (fetch + decode)
    return both * fetch / reads, both * decode / decodes


def _scaled(found: Finding, factor: float) -> Finding:
    """Return a finding with another share; its sentence says the share."""
    share = found.share * factor
    return replace(
        found,
        share=share,
        low=found.low * factor,
        high=min(1.0, found.high * factor),
        sentence=found.sentence.replace(f"{found.share:.0%}", f"{share:.0%}", 1),
    )


def _too_short(ground: StepBasis, band: tuple[float, float, float]) -> Finding:
    idle = ground.analysis.workers.idle
    return make_finding(
        "prefetch-too-short",
        band,
        f"{band[0]:.0%} of the time goes to waiting for batches although workers idle {idle:.0%} "
        "of theirs: they do not work far enough ahead",
        ("idle share of the workers", idle),
    )


def _hand_over(ground: StepBasis) -> Finding:
    own = own_hand_over(ground.analysis)
    share, low, high = ground.band("hand-over")
    band = share * own, low * own, high * own
    return make_finding(
        "slow-hand-over",
        band,
        f"{band[0]:.0%} of the time goes to taking batches that are finished",
    )


def _remote(ground: StepBasis, sources: list[str]) -> Finding:
    """Name waits for bytes that come over a network."""
    analysis = ground.analysis
    band = ground.band(sources=sources)
    of = "peers" if sources and all(map(is_peer, sources)) else "the store"
    bound, slow = analysis.bound, analysis.sharing.slow_share
    latency = next(
        (d for d in analysis.distributions if d.name in {f"latency of {s}" for s in sources}), None
    )
    if slow >= SKEW_MIN:
        return _skewed(ground, band, slow)
    if bound is not None and bound.num_epochs > 1.2 and 0 < bound.cache_bytes < bound.dataset_bytes:
        held = bound.cache_bytes / bound.dataset_bytes
        # A first epoch reads everything, with any cache.
        later = ground.later().band(sources=sources)
        if held >= CACHE_NEAR and later[0] >= CACHE_LOSS:
            return make_finding(
                "cache-too-small",
                later,
                f"{later[0]:.0%} of the time of later epochs goes to waiting for {of}: the cache "
                f"holds {held:.0%} of the data set, and the rest is read again each time",
                ("share of the data set that the cache holds", held),
                ("hits after the first epoch", bound.hits),
            )
    later_share = ground.later().band(sources=sources)[0]
    is_cold = len(analysis.epochs) > 1 and later_share < band[0] / 10
    when = ", nearly all of it in the first epoch, which fills the cache" if is_cold else ""
    shown = f" ({latency.p50 * 1e3:.3g} ms a request at the median)" if latency else ""
    return make_finding(
        "slow-store",
        band,
        f"{band[0]:.0%} of the time goes to waiting for {of}{shown}{when}",
        ("median latency of a request, s", latency.p50 if latency else None),
        ("p99 latency of a request, s", latency.p99 if latency else None),
    )


def _skewed(ground: StepBasis, band: tuple[float, float, float], slow: float) -> Finding:
    worst = max(ground.analysis.sharing.slowest, key=lambda found: found.slowdown)
    return make_finding(
        "skewed-shards",
        band,
        f"{band[0]:.0%} of the time goes to waiting for reads, and a few slow objects take "
        f"{slow:.0%} of all reading time, e.g. {worst.name} ({worst.slowdown:.1f} times the usual)",
        ("share of reading time that slow objects take", slow),
    )


def _local(ground: StepBasis, sources: list[str]) -> Finding:
    """Name waits for files of this machine."""
    analysis = ground.analysis
    band = ground.band("open", sources=sources)
    if analysis.sharing.slow_share >= SKEW_MIN:
        return _skewed(ground, band, analysis.sharing.slow_share)
    opens = max((p.opens_per_sample for p in analysis.patterns), default=0.0)
    size = float(np.median([p.size_p50 for p in analysis.patterns])) if analysis.patterns else 0.0
    open_share = ground.band("open")[0]
    if opens >= 0.5 and (size <= TINY_BYTES or open_share > band[0] / 2):
        return make_finding(
            "tiny-files",
            band,
            f"{band[0]:.0%} of the time goes to opening and reading files of {size / 1e3:.3g} kB: "
            f"{opens:.1f} are opened for each sample",
            ("files opened a sample", opens),
            ("median bytes of a read", size),
            ("share of the time in open and stat", open_share),
        )
    memory, size_bytes = analysis.value("memory_bytes", 0), analysis.value("dataset_bytes", 0)
    later = [v for e, v in analysis.system.device_read_by_epoch.items() if e > 0]
    if (
        later
        and min(later) >= DEVICE_READS
        and memory
        and CACHE_NEAR <= memory / max(1, size_bytes) < 1.2
    ):
        return make_finding(
            "cache-too-small",
            band,
            f"{band[0]:.0%} of the time goes to reading files: later epochs read {min(later):.0%} "
            "of their bytes from the disk again, because the data set is larger than the memory "
            "that is free for the page cache",
            ("device reads by reads in later epochs", min(later)),
        )
    device = analysis.system.device_read_share
    return make_finding(
        "slow-disk",
        band,
        f"{band[0]:.0%} of the time goes to waiting for reads of local files",
        ("bytes from the device by bytes read", device),
        ("share of the time the disk is busy", analysis.system.disk_busy),
    )


def _cold_findings(ground: StepBasis, sources: list[str]) -> list[Finding]:
    """Name waits where the first epoch reads slowly: what it waits longer than later epochs do.

    The rest of the waiting has the causes that it has in later epochs.
    """
    table, rows = ground.analysis.steps, ground.rows
    is_first = table.epoch[rows] == table.epoch[rows].min()
    wait_s = table.wait_s[rows]
    usual_s = float(wait_s[~is_first].mean()) if (~is_first).any() else 0.0
    excess = np.where(is_first, np.maximum(0.0, wait_s - usual_s), 0.0)
    share, low, high = (x * ground.scale for x in share_band(excess, table.wall_s[rows]))
    factor = _cold(ground.analysis) or 1.0
    cold = make_finding(
        "cold-page-cache",
        (share, low, high),
        f"{share:.0%} of the time goes to reading files for the first time: the first epoch reads "
        f"{factor:.1f} times slower than later ones, which come from the page cache",
        ("time a byte in the first epoch, by later ones", factor),
    )
    later = replace(ground, rows=rows[~is_first], scale=ground.scale * (1 - share))
    if not len(later.rows):
        return [cold]
    rest = [_local(later, sources), _cpu(later), _hand_over(later), _unseen(later)]
    return [cold, *rest, _too_short(later, later.band("queue", "head-of-line"))]


def _cold(analysis: Analysis) -> float | None:
    """Return how much slower the first epoch reads a byte than later ones; None: it does not."""
    costs = analysis.read_cost_by_epoch
    if len(costs) < 2:
        return None
    first, *later = [costs[epoch] for epoch in sorted(costs)]
    factor = first / max(1e-15, float(np.median(later)))
    return factor if factor >= COLD_FACTOR else None


def _cpu(ground: StepBasis) -> Finding:
    """Name waits for samples to be decoded, or for a core to do it on."""
    analysis = ground.analysis
    band = ground.band("decode", "cpu-starved")
    starved = ground.band("cpu-starved")[0]
    runnable, workers = analysis.system.runnable, analysis.workers
    cores = analysis.system.cores
    has_room = runnable is not None and runnable < CORES_FULL
    evidence = (
        ("threads that want a core, by cores", runnable),
        ("busy share of the workers", workers.busy),
        ("processor time of a sample, s", workers.cpu_per_sample_s or None),
    )
    of = f"{workers.num_workers} workers" if workers.num_workers else "the training process"
    if has_room and workers.num_workers < max(1, cores):
        return make_finding(
            "too-few-workers",
            band,
            f"{band[0]:.0%} of the time goes to waiting for batches; decoding in {of} cannot keep "
            f"up, and the job uses {runnable:.0%} of {cores:g} cores",
            *evidence,
        )
    if runnable is not None and runnable >= OVERSUBSCRIBED and starved > band[0] / 2:
        return make_finding(
            "oversubscribed-cores",
            band,
            f"{band[0]:.0%} of the time goes to waiting for batches, most of it for a core: the "
            f"threads of the job want {runnable:.1f} times the {cores:g} cores there are",
            *evidence,
        )
    starts = epoch_start_wait(analysis)
    if starts.is_most:
        first = "step" if starts.num_steps == 1 else f"{starts.num_steps} steps"
        tail = (
            f"decoding in {of} cannot keep up at the start of epochs: {starts.share_of_waits:.0%} "
            f"of the waiting falls into their first {first}, when each worker "
            f"begins anew and makes its first batch for {show_seconds(workers.batch_s_p50)}"
        )
    elif has_room:
        tail = f"decoding in {of} cannot keep up, and there are no more cores than workers"
    else:
        tail = f"decoding in {of} cannot keep up, and the {cores:g} cores are in use"
    return make_finding(
        "heavy-decode",
        band,
        f"{band[0]:.0%} of the time goes to waiting for batches; {tail}",
        ("share of the waiting in the first steps of epochs", starts.share_of_waits or None),
        *evidence,
    )


def _unseen(ground: StepBasis) -> Finding:
    """Name waits inside of a loader that the trace cannot look into."""
    analysis = ground.analysis
    blocked = [n for n in analysis.steps.fetch_by_source if n == NOT_SEEN]
    band = ground.band("loader", sources=blocked)
    what = "a loader that the trace cannot look into"
    if ground.band(sources=blocked)[0] > band[0] / 2:
        what = "workers that are blocked by something that the trace does not see"
    runnable, device = analysis.system.runnable, analysis.system.device_read_share
    if runnable is not None and runnable >= CORES_FULL:
        cause, guess = "heavy-decode", "the cores are in use, so decoding is the likely cause"
    elif device is not None and device >= DEVICE_READS:
        cause, guess = "slow-disk", "most bytes come from the disk, which is the likely cause"
    else:
        cause, guess = "too-few-workers", "cores are free, so more workers are likely to help"
    return make_finding(
        cause,
        band,
        f"{band[0]:.0%} of the time goes to waiting for {what}; {guess}",
        ("threads that want a core, by cores", runnable),
    )


def _work_findings(ground: StepBasis) -> list[Finding]:
    """Return the causes of time that steps take although they have their batch."""
    copy, launch = ground.band("copy"), ground.band("launch")
    communicate, validation = ground.band("communicate"), ground.band("validation")
    between, unexplained = ground.band("between-epochs"), ground.band("unexplained")
    return [
        make_finding("slow-copy", copy, f"{copy[0]:.0%} of the time goes to copies to the device"),
        make_finding(
            "launch-bound",
            launch,
            f"{launch[0]:.0%} of the time the device is idle while the host issues its work",
            ("share of the time the device computes", ground.band("compute")[0]),
        ),
        make_finding(
            "communication-bound",
            communicate,
            f"{communicate[0]:.0%} of the time goes to collectives",
        ),
        make_finding(
            "validation-interference",
            validation,
            f"{validation[0]:.0%} of the time goes to validation between steps",
        ),
        make_finding(
            "between-epochs",
            between,
            f"{between[0]:.0%} of the time passes between epochs, in neither the loader nor a step",
        ),
        make_finding(
            "unexplained",
            unexplained,
            f"{unexplained[0]:.0%} of the time is not explained by the trace",
        ),
        _disturbed(ground),
    ]


def _disturbed(ground: StepBasis) -> Finding:
    """Name the interference of the loader's work with the step."""
    analysis, seen = ground.analysis, ground.analysis.interference
    band = ground.band("interference")
    if seen.method == "differential":
        band = seen.share * ground.scale, seen.low, seen.high
    lock = seen.lock
    shares_process = not analysis.has_worker_processes
    own_no_core = seen.no_core * analysis.system.own_delay
    is_lock = lock is not None and lock >= own_no_core
    is_known = True
    if seen.method == "differential":
        work = 1 - analysis.wait
        is_known = max(lock or 0.0, own_no_core) * work >= EXPLAINED * band[0]
        if lock is None and shares_process and not is_known:
            # Nobody measured the lock: it is the one thing that threads of the process share.
            is_lock = is_known = True
    evidence = (
        ("share of the step's work that waits for the interpreter's lock", lock),
        ("share of the step's work that has no core", seen.no_core),
        ("median of a step's work with the loader, s", seen.real_s),
        ("the same without it, s", seen.resident_s or None),
    )
    if not is_known:
        return make_finding(
            "loader-interference",
            band,
            f"{band[0]:.0%} of the time is lost inside of the step while the loader works beside "
            "it, and neither the interpreter's lock nor a want of cores explains it: memory, "
            "caches or a device may be shared",
            *evidence,
        )
    if is_lock:
        return make_finding(
            "interpreter-lock",
            band,
            f"{band[0]:.0%} of the time is lost inside of the step: the training thread waits for "
            "the interpreter's lock, which threads of the loader hold",
            *evidence,
        )
    return make_finding(
        "oversubscribed-cores",
        band,
        f"{band[0]:.0%} of the time is lost inside of the step: the training thread has no core, "
        "because more threads want one than there are",
        ("threads that want a core, by cores", analysis.system.runnable),
        *evidence,
    )
