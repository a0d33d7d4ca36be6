"""Steps in bulk: a run as one sum per step and node, vectorised. Made for scale.

Training is bulk-synchronous: a step ends when the slowest node has ended it. So a run is a
recurrence over steps. With D the end of a step on all nodes and F when a node has fetched its part,

    F[k] = max(F[k-1], D[k-1-depth]) + read[k]        fetched ahead, in the order of steps
    D[k] = max over nodes of max(F[k], D[k-1]) + used[k]

where depth is how many steps the stage holds, `read` what the devices need for bytes that may come
ahead, and `used` computing plus whatever the training loop reads itself. Latency and throughput are
averages here: tails, retries and adaptation are `predict`'s, which drives the real flow.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.dataset.part import Ints
from penstock.errors import OptionError
from penstock.simulate.devices import Devices, Load
from penstock.simulate.in_turn import in_turn_s
from penstock.simulate.job import Codes, Floats, Job
from penstock.simulate.policies import Policy, make_policy
from penstock.simulate.reads import Reads
from penstock.simulate.result import Result
from penstock.simulate.scenario import Scenario


def run(scenario: Scenario, policy: str) -> Result:
    """Return what a policy comes to in a scenario."""
    job = Job(scenario)
    made = make_policy(policy, job)
    share = job.capacity_bytes / job.size_bytes
    why_not = made.why_not()
    if why_not:
        return Result(policy=policy, nodes=job.num_nodes, cache_share=share, why_not=why_not)
    running = _Run(job, made)
    running.start()
    for epoch in range(scenario.job.epochs):
        running.epoch(made.reads(epoch))
    return running.result(policy)


def load_of(job: Job, reads: Reads, chosen: npt.NDArray[np.bool_] | None, num_steps: int) -> Load:
    """Return bytes and requests by step and node of the chosen accesses."""
    sources, nodes = reads.sources, job.nodes_of(reads.workers)
    sizes, steps = job.sizes[reads.ids].astype(np.float64), reads.steps
    holders, fillers = reads.holders, reads.fillers
    if chosen is not None:
        sources, nodes, sizes, steps = sources[chosen], nodes[chosen], sizes[chosen], steps[chosen]
        holders = holders[chosen] if holders is not None else None
        fillers = fillers[chosen] if fillers is not None else None
    cells, kinds = num_steps * job.num_nodes, job.store + 1
    shape = (num_steps, job.num_nodes)
    rows = steps * job.num_nodes
    keys = (rows + nodes) * kinds + sources
    served = np.zeros((*shape, job.num_tiers))
    if holders is not None:
        served = _served(job, rows, sources, holders, sizes).reshape(*shape, job.num_tiers)
    filled, num_filled = np.zeros(cells), np.zeros(cells)
    if fillers is not None:
        real = fillers >= 0
        filled = np.bincount((rows + fillers)[real], sizes[real], cells)
        num_filled = np.bincount((rows + fillers)[real], minlength=cells).astype(np.float64)
    return Load(
        bytes=np.bincount(keys, sizes, cells * kinds).reshape(*shape, kinds),
        counts=np.bincount(keys, minlength=cells * kinds).reshape(*shape, kinds).astype(float),
        served=served,
        filled=filled.reshape(shape),
        num_filled=num_filled.reshape(shape),
    )


def _served(job: Job, rows: Ints, sources: Codes, holders: Ints, sizes: Floats) -> Floats:
    """Return what each node reads from its tiers for others."""
    tiers = job.num_tiers
    peers = (sources >= tiers) & (sources < 2 * tiers)
    keys = (rows[peers] + holders[peers]) * tiers + sources[peers] - tiers
    cells = (int(rows.max(initial=0)) + job.num_nodes) * tiers
    return np.bincount(keys, sizes[peers], cells)


class _Run:
    """The state of a run: when each node has fetched, when each step has ended."""

    def __init__(self, job: Job, policy: Policy) -> None:
        self._job, self._policy = job, policy
        self._devices = Devices(job)
        self._in_turn = job.scenario.model.readers == "in_turn"
        if self._in_turn and job.scenario.job.ranks > 1:
            raise OptionError(
                f"model.readers = 'in_turn' knows one rank a node, job.ranks is "
                f"{job.scenario.job.ranks}; leave [model] out"
            )
        self._fetched = np.zeros(job.num_nodes)
        self._ends = [0.0]
        self._epoch_ends: list[float] = []
        self._start_s = self._bound_s = self._stall_s = 0.0
        self._bytes = np.zeros(job.store + 1)
        self._filled = 0.0
        self._visited = np.zeros(len(job.sizes), np.bool_)

    def start(self) -> None:
        """Load what the policy wants to have before the first step."""
        begin = self._policy.start()
        if begin is None:
            return
        job, devices = self._job, self._devices
        mean = job.size_bytes / len(job.sizes)
        seconds = devices.fill_s(begin.store_bytes, begin.store_bytes.max() / mean, job.store)
        if begin.peer_bytes.any():
            peer = job.num_tiers + begin.tier
            seconds = seconds + devices.fill_s(
                begin.peer_bytes, begin.peer_bytes.max() / mean, peer
            )
        self._start_s = float(seconds.max())
        self._filled += float(begin.store_bytes.sum())
        self._bytes[job.num_tiers + begin.tier] += begin.peer_bytes.sum()
        self._ends = [self._start_s]
        self._fetched[:] = self._start_s

    def epoch(self, reads: Reads) -> None:
        """Go through the steps of one epoch."""
        self._visited[reads.ids] = True
        compute = self._job.compute_s(
            reads.steps, reads.workers, self._job.sizes[reads.ids]
        ).reshape(-1, self._job.num_nodes, self._job.scenario.job.ranks)
        self._bound_s += float(compute.max(axis=(1, 2)).sum())
        first = len(self._ends)
        if not self._policy.across_epochs:
            self._fetched = np.maximum(self._fetched, self._ends[-1])
        if reads.options and not self._settled(reads):
            self._late_epoch(reads, compute)
        else:
            if reads.options:
                reads = _resolved(reads, np.full(len(reads.ids), self._ends[-1]))
            self._plain_epoch(reads, compute)
        self._epoch_ends.append(self._ends[-1] - self._ends[first - 1])

    def result(self, policy: str) -> Result:
        """Return what it all came to."""
        job, time_s = self._job, self._ends[-1]
        own, peer, store = np.split(self._bytes, [job.num_tiers, job.store])
        more_store, more_peer = self._policy.background_bytes(time_s)
        capacity = job.capacity_bytes
        epochs = job.scenario.job.epochs
        return Result(
            policy=policy,
            nodes=job.num_nodes,
            cache_share=capacity / job.size_bytes,
            time_s=time_s,
            start_s=self._start_s,
            epoch_s=tuple(self._epoch_ends),
            bound_s=self._bound_s,
            store_bytes=float(store.sum()) + self._filled + more_store,
            bound_bytes=job.size_bytes + (epochs - 1) * max(0, job.size_bytes - capacity),
            local_bytes=float(own.sum()),
            peer_bytes=float(peer.sum()) + more_peer,
            stall_share=(self._stall_s + self._start_s) / time_s,
            num_visited=int(self._visited.sum()),
            num_samples=len(self._visited),
        )

    # -- epochs whose sources are known ------------------------------------------------------

    def _plain_epoch(self, reads: Reads, compute: Floats) -> None:
        read_s, used_s, wait_s, size_bytes, waits = self._seconds(reads, compute, 1.0)
        depth = self._depth(reads, size_bytes.mean())
        for step in range(len(compute)):
            begin = self._begin(depth)
            self._advance(begin, read_s[step], used_s[step], wait_s[step], waits)

    # -- epochs in which tiers fill up meanwhile ---------------------------------------------

    def _settled(self, reads: Reads) -> bool:
        """Return whether everything that will ever be there is there already."""
        last = max(float(o.from_s[np.isfinite(o.from_s)].max(initial=0.0)) for o in reads.options)
        return self._fetched.min() >= last

    def _late_epoch(self, reads: Reads, compute: Floats) -> None:
        bounds = np.searchsorted(reads.steps, np.arange(len(compute) + 1))
        mean = float(self._job.sizes[reads.ids].sum()) / len(compute) / self._job.num_nodes
        depth = self._depth(reads, mean)
        for step in range(len(compute)):
            begin = self._begin(depth)
            part = _cut(reads, int(bounds[step]), int(bounds[step + 1]))
            now = begin[self._job.nodes_of(part.workers)]
            left = self._policy.store_left(float(begin.min()))
            read_s, used_s, wait_s, _, waits = self._seconds(
                _resolved(part, now), compute[step : step + 1], left
            )
            self._advance(begin, read_s[0], used_s[0], wait_s[0], waits)

    # -- seconds of steps --------------------------------------------------------------------

    def _seconds(
        self, reads: Reads, compute: Floats, left: float
    ) -> tuple[Floats, Floats, Floats, Floats, bool]:
        """Return by step and node: reading ahead, using, the reads in that; and bytes ahead."""
        job = self._job
        if reads.free:
            zero = np.zeros(compute.shape[:2])
            return zero, compute.max(axis=2), zero, zero, False
        ahead = reads.ahead if isinstance(reads.ahead, np.ndarray) else None
        everything = ahead is None and bool(reads.ahead)
        nothing = ahead is None and not reads.ahead
        load = load_of(job, reads, np.zeros(len(reads.ids), bool) if nothing else ahead, len(compute))
        self._tally(load)
        used_s = compute.max(axis=2)
        wait_s = np.zeros_like(used_s)
        if not everything:
            late = np.ones(len(reads.ids), bool) if ahead is None else ~ahead
            used_s, wait_s = self._used(reads, late, compute, load)
        read_s = self._read(reads, load, used_s, left)
        return read_s, used_s, wait_s, load.bytes.sum(axis=2), bool(load.filled.any())

    def _read(self, reads: Reads, load: Load, busy_s: Floats, left: float) -> Floats:
        """Return the seconds that reading ahead takes."""
        job, devices = self._job, self._devices
        per_rank = reads.threads or job.scenario.loader.threads
        threads = per_rank * job.scenario.job.ranks
        other_s, from_store = devices.thread_s(load)
        readers = (from_store > 0).sum(axis=1).astype(np.float64)
        if reads.background:
            readers = np.full(len(readers), float(job.num_nodes))
        if self._in_turn and not reads.background:
            mine = in_turn_s(from_store, other_s, busy_s, devices.store_byte_s, threads)
        else:
            mine = (other_s + from_store * devices.store_byte_s(readers)[:, None]) / threads
        return np.maximum(mine, devices.limits_s(load, readers, threads, left))

    def _used(
        self, reads: Reads, late: npt.NDArray[np.bool_], compute: Floats, ahead: Load
    ) -> tuple[Floats, Floats]:
        """Return the seconds of steps whose reads the training loop waits for, and the waiting."""
        job, devices = self._job, self._devices
        load = load_of(job, reads, late, len(compute))
        self._tally(load)
        ranks = job.scenario.job.ranks
        other_s, from_store = devices.thread_s(load)
        readers = ((from_store + ahead.bytes[..., job.store]) > 0).sum(axis=1).astype(np.float64)
        computing = compute.max(axis=2)
        if self._in_turn:
            zero = np.zeros_like(other_s)
            used = in_turn_s(from_store, other_s + computing, zero, devices.store_byte_s, 1)
            return used, used - computing
        # Ranks of a node read beside each other, one sample at a time each.
        mine = (other_s + from_store * devices.store_byte_s(readers)[:, None]) / ranks
        wait = np.maximum(mine, devices.limits_s(load, readers, ranks, 1.0))
        return wait + computing, wait

    def _tally(self, load: Load) -> None:
        self._bytes += load.bytes.sum(axis=(0, 1))
        self._filled += float(load.filled.sum())

    # -- the recurrence ----------------------------------------------------------------------

    def _depth(self, reads: Reads, step_bytes: float) -> int:
        """Return how many steps the stage holds."""
        stage = reads.stage_bytes
        if stage is None:
            stage = float(self._job.scenario.loader.stage_bytes)
        return max(1, int(min(stage / max(step_bytes, 1.0), 1e9)))

    def _begin(self, depth: int) -> Floats:
        """Return when each node can begin to fetch its next step."""
        freed = len(self._ends) - 1 - depth
        return np.maximum(self._fetched, self._ends[freed] if freed >= 0 else self._ends[0])

    def _advance(
        self, begin: Floats, read: Floats, used: Floats, wait: Floats, waits: bool
    ) -> None:
        self._fetched = begin + read
        now = self._ends[-1]
        # What a peer has to fetch first is there when the slowest of them has it.
        there = np.full_like(begin, self._fetched.max()) if waits else self._fetched
        ready = np.maximum(there, now)
        self._stall_s += float((ready - now + wait).mean())
        self._ends.append(float((ready + used).max()))


def _resolved(reads: Reads, now: Floats) -> Reads:
    """Return the reads with every option decided at the given time of each access."""
    sources, holders = reads.sources.copy(), np.zeros(len(reads.ids), np.int64)
    for option in reversed(reads.options):
        there = option.from_s <= now
        sources = np.where(there, option.sources, sources)
        holders = np.where(there, option.holders, holders)
    return _changed(reads, sources=sources, holders=holders)


def _cut(reads: Reads, start: int, stop: int) -> Reads:
    """Return the reads of one step, as step 0."""
    from dataclasses import replace

    from penstock.simulate.reads import Option

    part = slice(start, stop)
    return replace(
        reads,
        ids=reads.ids[part],
        steps=np.zeros(stop - start, np.int64),
        workers=reads.workers[part],
        sources=reads.sources[part],
        ahead=reads.ahead[part] if isinstance(reads.ahead, np.ndarray) else reads.ahead,
        options=tuple(
            Option(sources=o.sources[part], holders=o.holders[part], from_s=o.from_s[part])
            for o in reads.options
        ),
    )


def _changed(reads: Reads, *, sources: Codes, holders: Ints) -> Reads:
    from dataclasses import replace

    return replace(reads, sources=sources, holders=holders, options=())
