"""Steps in bulk: a run as one sum per step and node, vectorised, for jobs of any size.

Training is bulk-synchronous: a step ends when the slowest node has ended it. So a run is a
recurrence over steps. With D the end of a step on all nodes and F the time at which a node has
fetched its part,

    F[k] = max(F[k-1], D[k-1-depth]) + read[k]        fetched ahead, in the order of steps
    D[k] = max over nodes of max(F[k], D[k-1]) + used[k]

where depth is the number of steps that the stage holds, `read` is the time that devices need for
bytes that may be read ahead, and `used` is computing plus what the training loop reads itself.
Latency and throughput are averages here; `predict`, which drives the real flow, has tails, retries
and adaptation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import OptionError
from penstock.flow.bound import epoch_bound, epochs_bound
from penstock.simulate.devices import Devices
from penstock.simulate.in_turn import in_turn_s, overtaking_s
from penstock.simulate.job import Floats, SimulatedJob
from penstock.simulate.policies import POLICIES, Policy, make_policy
from penstock.simulate.reads import EpochReads, Flags, StepTraffic, traffic_of
from penstock.simulate.result import PolicyResult
from penstock.simulate.scenario import Scenario


def run(scenario: Scenario, policy: str | type[Policy]) -> PolicyResult:
    """Simulate a policy in a scenario; a policy is a name or a class of your own."""
    job = SimulatedJob(scenario)
    made = make_policy(policy, job) if isinstance(policy, str) else policy(job)
    name = policy if isinstance(policy, str) else made.title
    share = job.capacity_bytes / job.size_bytes
    why_not = made.why_not()
    if why_not:
        return PolicyResult(policy=name, nodes=job.num_nodes, cache_share=share, why_not=why_not)
    running = _BulkRun(job, made)
    running.start()
    for epoch in range(scenario.job.epochs):
        running.epoch(made.reads(epoch))
    return running.result(name)


def sweep(
    scenario: Scenario,
    *,
    policies: Sequence[str | type[Policy]] = (),
    nodes: Sequence[int] = (),
    cache: Sequence[float] = (),
) -> Iterator[PolicyResult]:
    """Yield a result for every combination of policies, nodes and capacity, as soon as it is known.

    What is not given is the scenario's: its `[sweep]`, else all policies, its own nodes and its own
    tiers. `cache` is the capacity of all nodes together as a share of the data set.
    """
    plan = scenario.sweep
    size_bytes = int(scenario.sizes().sum())
    shares: Sequence[float | None] = cache or plan.cache or (None,)
    for num_nodes in nodes or plan.nodes or (scenario.job.nodes,):
        for share in shares:
            here = scenario.with_nodes(num_nodes)
            if share is not None:
                here = here.with_cache(share, size_bytes)
            for policy in policies or plan.policies or POLICIES:
                yield run(here, policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepSeconds:
    """How long steps take, by step and node."""

    read: Floats
    """Reading ahead."""
    used: Floats
    """From the arrival of what was read ahead to the end of the step."""
    is_filling: bool
    """Whether nodes fill their tiers for each other."""

    def of(self, step: int) -> _StepSeconds:
        return _StepSeconds(
            read=self.read[step],
            used=self.used[step],
            is_filling=self.is_filling,
        )


class _BulkRun:
    """The state of a run: the time up to which each node has fetched, and the ends of steps."""

    def __init__(self, job: SimulatedJob, policy: Policy) -> None:
        self._job, self._policy = job, policy
        self._devices = Devices(job)
        self._in_turn = job.scenario.model.readers == "in_turn"
        if self._in_turn and job.ranks > 1:
            raise OptionError(
                f"model.readers = 'in_turn' knows one rank a node, job.ranks is "
                f"{job.ranks}; leave [model] out"
            )
        whole = job.size_bytes * job.scenario.job.epochs / job.num_nodes
        self._is_all_staged = job.scenario.loader.stage_bytes >= whole
        self._fetched = np.zeros(job.num_nodes)
        self._ends = [0.0]
        self._epoch_s: list[float] = []
        self._start_s = self._bound_s = 0.0
        self._bytes = np.zeros(job.store + 1)
        self._filled = 0.0
        self._visited = np.zeros(len(job.sizes), np.bool_)

    def start(self) -> None:
        """Load what the policy needs before the first step."""
        begin = self._policy.start()
        if begin is None:
            return
        job, devices = self._job, self._devices
        mean = job.size_bytes / len(job.sizes)
        seconds = devices.fill_s(begin.store_bytes, mean, job.store)
        seconds = seconds + devices.fill_s(begin.peer_bytes, mean, job.num_tiers + begin.tier)
        self._start_s = float(seconds.max())
        self._filled += float(begin.store_bytes.sum())
        self._bytes[job.num_tiers + begin.tier] += begin.peer_bytes.sum()
        self._ends = [self._start_s]
        self._fetched[:] = self._start_s

    def epoch(self, reads: EpochReads) -> None:
        """Simulate the steps of one epoch."""
        job = self._job
        self._visited[reads.ids] = True
        compute = job.compute_s(reads.steps, reads.workers, job.sizes[reads.ids])
        self._bound_s += float(compute.max(axis=1).sum())
        compute = compute.reshape(-1, job.num_nodes, job.ranks).max(axis=2)
        began_s = self._ends[-1]
        if not self._policy.across_epochs:
            # Nothing of this epoch was read during the last one.
            self._fetched = np.maximum(self._fetched, began_s)
        # Step by step only while sources still change: a whole epoch at once is much faster.
        if reads.options and self._fetched.min() < max(o.settled_s for o in reads.options):
            self._late_epoch(reads, compute)
        else:
            self._plain_epoch(reads.decided(began_s) if reads.options else reads, compute)
        self._epoch_s.append(self._ends[-1] - began_s)

    def result(self, policy: str) -> PolicyResult:
        """Return the result of a run that is over."""
        job, time_s = self._job, self._ends[-1]
        own, peer, store = np.split(self._bytes, [job.num_tiers, job.store])
        more_store, more_peer = self._policy.background_bytes(time_s)
        epochs = job.scenario.job.epochs
        bound_bytes = epochs_bound(job.size_bytes, job.capacity_bytes, epochs)
        later_bytes = epoch_bound(job.size_bytes, job.capacity_bytes)
        rate = self._devices.all_bytes_s()
        return PolicyResult(
            policy=policy,
            nodes=job.num_nodes,
            cache_share=job.capacity_bytes / job.size_bytes,
            time_s=time_s,
            start_s=self._start_s,
            epoch_s=tuple(self._epoch_s),
            bound_s=self._bound_s,
            least_s=self._least_s(bound_bytes, rate),
            least_later_s=max(self._bound_s / epochs, later_bytes / rate),
            store_bytes=float(store.sum()) + self._filled + more_store,
            bound_bytes=bound_bytes,
            local_bytes=float(own.sum()),
            peer_bytes=float(peer.sum()) + more_peer,
            num_visited=int(self._visited.sum()),
            num_samples=len(self._visited),
        )

    def _least_s(self, bound_bytes: int, rate: float) -> float:
        """Return the least time of any loader: the fewest bytes at the full rate, or computing.

        The first epoch has to read all bytes of the set, and the other epochs compute after it.
        """
        epochs = self._job.scenario.job.epochs
        later_s = self._bound_s * (epochs - 1) / epochs
        return max(self._bound_s, bound_bytes / rate, self._job.size_bytes / rate + later_s)

    # -- epochs --------------------------------------------------------------------------------

    def _plain_epoch(self, reads: EpochReads, compute: Floats) -> None:
        """Simulate an epoch whose sources are known: the seconds of all its steps at once."""
        seconds = self._seconds(reads, compute, 1.0)
        depth = self._depth(reads, len(compute))
        for step in range(len(compute)):
            self._advance(self._begin(depth), seconds.of(step))

    def _late_epoch(self, reads: EpochReads, compute: Floats) -> None:
        """Simulate an epoch in which tiers fill up: sources depend on the time of each step."""
        bounds = np.searchsorted(reads.steps, np.arange(len(compute) + 1)).tolist()
        depth = self._depth(reads, len(compute))
        for step in range(len(compute)):
            begin = self._begin(depth)
            part = reads.part(bounds[step], bounds[step + 1])
            decided = part.decided(begin[self._job.nodes_of(part.workers)])
            left = self._policy.store_left(float(begin.min()))
            seconds = self._seconds(decided, compute[step : step + 1], left)
            self._advance(begin, seconds.of(0))

    # -- seconds of steps ----------------------------------------------------------------------

    def _seconds(self, reads: EpochReads, compute: Floats, left: float) -> _StepSeconds:
        zero = np.zeros_like(compute)
        if reads.free:
            return _StepSeconds(read=zero, used=compute, is_filling=False)
        ahead = reads.is_ahead()
        if ahead.all():
            load = self._load(reads, None, len(compute))
            wait = zero
        else:
            load = self._load(reads, ahead, len(compute))
            wait = self._waited(reads, ~ahead, compute, load)
        read = self._read(reads, load, left)
        is_filling = bool(load.filled.any())
        return _StepSeconds(read=read, used=compute + wait, is_filling=is_filling)

    def _load(self, reads: EpochReads, chosen: Flags | None, num_steps: int) -> StepTraffic:
        load = traffic_of(self._job, reads, chosen, num_steps)
        self._bytes += load.bytes.sum(axis=(0, 1))
        self._filled += float(load.filled.sum())
        return load

    def _read(self, reads: EpochReads, load: StepTraffic, left: float) -> Floats:
        """Return the seconds that reading ahead takes."""
        job, devices = self._job, self._devices
        threads = (reads.threads or job.scenario.loader.threads) * job.ranks
        other_s, from_store = devices.thread_s(load)
        readers = (from_store > 0).sum(axis=1).astype(np.float64)
        if reads.background:
            readers = np.full(len(readers), float(job.num_nodes))
        if self._in_turn and not reads.background:
            turns = in_turn_s if self._is_all_staged else overtaking_s
            mine = turns(from_store, other_s, devices.store_byte_s, threads)
        else:
            mine = (other_s + from_store * devices.store_byte_s(readers)[:, None]) / threads
        return np.maximum(mine, devices.limits_s(load, readers, threads, left))

    def _waited(
        self, reads: EpochReads, late: Flags, compute: Floats, ahead: StepTraffic
    ) -> Floats:
        """Return the seconds that the training loop waits for its own reads."""
        job, devices = self._job, self._devices
        load = self._load(reads, late, len(compute))
        other_s, from_store = devices.thread_s(load)
        if self._in_turn:
            used = in_turn_s(from_store, other_s + compute, devices.store_byte_s, 1)
            return used - compute
        readers = ((from_store + ahead.bytes[..., job.store]) > 0).sum(axis=1).astype(np.float64)
        # Ranks of a node read at the same time, one sample each.
        ranks = job.ranks
        byte_s = np.maximum(
            devices.store_byte_s(readers), ranks / devices.node_bytes_s(readers, ranks)
        )
        mine = (other_s + from_store * byte_s[:, None]) / ranks
        return np.maximum(mine, devices.limits_s(load, readers, ranks, 1.0))

    # -- the recurrence ------------------------------------------------------------------------

    def _depth(self, reads: EpochReads, num_steps: int) -> int:
        """Return how many steps the stage holds."""
        stage = reads.stage_bytes
        if stage is None:
            stage = float(self._job.scenario.loader.stage_bytes)
        total = float(self._job.sizes[reads.ids[reads.is_ahead()]].sum())
        step_bytes = total / num_steps / self._job.num_nodes
        return max(1, int(min(stage / max(step_bytes, 1.0), 1e9)))

    def _begin(self, depth: int) -> Floats:
        """Return when each node can begin to fetch its next step."""
        # The stage has room for a step when the step `depth` before it has left.
        freed = max(0, len(self._ends) - 1 - depth)
        return np.maximum(self._fetched, self._ends[freed])

    def _advance(self, begin: Floats, step: _StepSeconds) -> None:
        self._fetched = begin + step.read
        now = self._ends[-1]
        # A sample that its home has to fetch first arrives, at the latest, when the slowest node
        # has fetched: which node waits for which is not modelled.
        ready = np.maximum(self._fetched.max() if step.is_filling else self._fetched, now)
        self._ends.append(float((ready + step.used).max()))
