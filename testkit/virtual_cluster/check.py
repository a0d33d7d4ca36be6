"""The invariants that every schedule must keep, whatever goes wrong in it.

* *Right*: each rank that lives has delivered exactly its samples, in order. The hash of what it
  delivered is the closed form's.
* *Live*: the job ends in a bounded time. No step waits longer than one silence for each fault that
  happens without a word (and the flow's patience, where a node gets nothing from the store) plus
  the time in which the store brings a stage instead.
* *Patient once*: for each server that it strikes, a fault costs a rank at most one time-out that
  its steps wait for.
* *Agreed*: some time after the last fault, every rank knows which nodes are dead and uses all
  others, and no node was ever declared lost without a cause.
* *Frugal*: with S_X the bytes at home on node X,

    store bytes  <=  B + R + D + G + H

    B   every placed byte once, and every use of a byte that has no place: S + (E-1)(S-C)
    R   for each set of nodes that a rank believed lost, S_X of each node X in it, because its new
        home reads it once more; and S_X where a tier was wiped
    D   for each fault that keeps replies of X from ranks, the bytes at home on X that they use
        while it lasts and until they may have tried again (`_window`)
    G   what a process had in flight when it was killed, at most its stage; the same of all ranks
        where the store itself failed, because what nodes wait for from each other may come too late
    H   second copies from the store, which are rationed: 5 % and a few for each rank
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.engine.peers.client_link import SILENCE_S
from penstock.engine.peers.members import QUORUM, RETRY_MAX_S
from penstock.flow.fallback import PATIENCE_S
from penstock.flow.hedge import TOKEN_SHARE, TOKENS_MAX
from penstock.flow.layout.homes import NOBODY
from penstock.storage.retry import RetryPolicy
from testkit.virtual_cluster.faults import DEADLY, ClusterFault
from testkit.virtual_cluster.job import STAGE_BYTES, ClusterJob
from testkit.virtual_cluster.world import GIVE_UP_S, ClusterLog, ClusterWorld

_AGREE_S = 3.0
"""After a silence: until all ranks have heard of it."""
_START_S = 1.0
"""Until the first batch, when nothing goes wrong."""
_STAGES = 2
"""Stages of all ranks that the store may bring before the batch that a step waits for."""
_LAST_S = 15.0
"""What a fault may cost beyond its own length."""
_RETRY_S = RetryPolicy().wait_max_s
"""The longest wait between two tries at the store."""
_OWN = ("freeze", "dry")
"""Faults that stop the ranks of the node themselves."""
_SILENT = ("vanish", "freeze", "cut", "one-way")
"""Faults that happen without a word: others notice them by a silence."""
_LOSING = (*DEADLY, "freeze", "cut", "one-way", "corrupt")
"""Faults for which a node may rightly be declared lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterVerdict:
    """The result of a schedule."""

    failures: tuple[str, ...]
    """Invariants that were broken, in sentences."""
    store_ratio: float
    """Bytes from the store over those that are allowed."""
    extra_share: float
    """Bytes from the store beyond B, as a share of the data set."""
    wait_max_s: float
    """The longest wait of a rank whose own node was neither frozen nor cut off from the store."""
    time_s: float


def judged(world: ClusterWorld) -> ClusterVerdict:
    """Run a world and check every invariant."""
    log = world.run()
    job, faults = world.job, world.job.faults
    failures: list[str] = []
    if log.done_s >= GIVE_UP_S:
        failures.append(f"not done after {log.done_s:.0f} s: steps {log.steps}")
    else:
        failures += _wrong(world, log)
        failures += _slow(job, log)
    failures += _impatient(job, log)
    failures += _disowned(job, log)
    allowed, bound = _allowed(job, log), _bound(job)
    again = world.store.read_bytes.pop("again", 0)
    store_bytes = sum(world.store.read_bytes.values())
    if store_bytes > allowed:
        failures.append(
            f"{store_bytes} bytes from the store, {allowed:.0f} are explained: "
            f"{dict(world.store.read_bytes)}"
        )
    rationed = TOKEN_SHARE * store_bytes + TOKENS_MAX * max(job.lengths) * job.num_ranks * (
        1 + sum(fault.kind in DEADLY for fault in faults)
    )
    if again > rationed:
        failures.append(f"{again} bytes of second copies, {rationed:.0f} are allowed")
    world.talk()
    failures += _divided(world)
    return ClusterVerdict(
        failures=tuple(failures),
        store_ratio=store_bytes / allowed,
        extra_share=max(0.0, store_bytes - bound) / job.size_bytes,
        wait_max_s=max(
            (wait_s for rank, _, wait_s in log.waits_s if not _own_s(job, rank)), default=0.0
        ),
        time_s=log.done_s,
    )


def _wrong(world: ClusterWorld, log: ClusterLog) -> Iterator[str]:
    job = world.job
    for rank in range(job.num_ranks):
        if log.steps[rank] == job.num_steps and log.hashes[rank] != job.hash_of(rank):
            yield f"rank {rank} delivered other samples than it should have"
        elif log.steps[rank] < job.num_steps and world.nodes[rank // job.ranks].is_up:
            yield f"rank {rank} lives and took {log.steps[rank]} of {job.num_steps} steps"


def _slow(job: ClusterJob, log: ClusterLog) -> Iterator[str]:
    lasting_s = sum(_lasts_s(fault) + _LAST_S for fault in job.faults)
    limit_s = 3 * job.quick_s + lasting_s
    if log.done_s > limit_s:
        yield f"it took {log.done_s:.1f} s, {limit_s:.1f} s are explained"
    stage_s = _STAGES * job.num_ranks * STAGE_BYTES / job.store_bytes_s
    patience_s = PATIENCE_S if any(fault.kind == "dry" for fault in job.faults) else 0.0
    silence_s = SILENCE_S * sum(fault.kind in _SILENT for fault in job.faults)
    store_s = sum(2 * _lasts_s(fault) + _RETRY_S for fault in job.faults if fault.node < 0)
    for rank, at_s, wait_s in log.waits_s:
        limit_s = silence_s + patience_s + stage_s + _START_S + store_s + _own_s(job, rank)
        if wait_s > limit_s:
            yield f"a step waited {wait_s:.1f} s at {at_s:.1f} s, {limit_s:.1f} s are explained"


def _impatient(job: ClusterJob, log: ClusterLog) -> Iterator[str]:
    for rank in range(job.num_ranks):
        node = rank // job.ranks
        lives = 1 + sum(f.kind in DEADLY and f.node == node for f in job.faults)
        for server in set(range(job.nodes)) - {node}:
            times = [at_s for r, s, at_s in log.silences if (r, s) == (rank, server)]
            causes = sum(_may_silence(fault, node, server) for fault in job.faults)
            if len(times) > causes * lives:
                yield (
                    f"rank {rank} waited for node {server} in vain at {times}, and there were "
                    f"{causes} causes"
                )


def _may_silence(fault: ClusterFault, asker: int, server: int) -> bool:
    """Return whether a fault explains a time-out.

    A restarted node is tried again at once, also where a link to it is cut meanwhile.
    """
    is_new = fault.kind in DEADLY and fault.stop_s < math.inf
    return (fault.kind in _SILENT or is_new) and fault.strikes(asker, server)


def _disowned(job: ClusterJob, log: ClusterLog) -> Iterator[str]:
    for lost in log.lost_sets:
        quorum = max(1, min(QUORUM, job.nodes - len(lost)))
        for node in sorted(lost):
            witnesses = {
                asker
                for asker in set(range(job.nodes)) - {node}
                if any(f.kind in _LOSING and f.strikes(asker, node) for f in job.faults)
            }
            if len(witnesses) < quorum:
                yield f"node {node} was declared lost without a fault: {sorted(lost)}"


def _divided(world: ClusterWorld) -> Iterator[str]:
    dead = {node.name for node in world.nodes if not node.is_up}
    for rank in world.ranks.values():
        if not world.knows(rank):
            yield (
                f"in the end rank {rank.number} believes {sorted(rank.members.lost)} lost and "
                f"suspects {sorted(rank.members.suspects)}; dead are {sorted(dead)}"
            )


# -- bytes -----------------------------------------------------------------------------------------


def _bound(job: ClusterJob) -> float:
    bare = sum(s for s, home in zip(job.lengths, job.home_of, strict=True) if home == NOBODY)
    return job.size_bytes + (job.epochs - 1) * bare


def _allowed(job: ClusterJob, log: ClusterLog) -> float:
    home_bytes = [job.home_bytes(node) for node in range(job.nodes)]
    again = sum(home_bytes[node] for lost in log.lost_sets for node in lost)
    again += sum(home_bytes[fault.node] for fault in job.faults if fault.kind == "wipe")
    under_way = sum(job.ranks * STAGE_BYTES for fault in job.faults if fault.kind in DEADLY)
    under_way += sum(job.num_ranks * STAGE_BYTES for fault in job.faults if fault.node < 0)
    direct = sum(_direct_bytes(job, log, fault) for fault in job.faults if fault.node >= 0)
    return _bound(job) + again + under_way + direct


def _direct_bytes(job: ClusterJob, log: ClusterLog, fault: ClusterFault) -> int:
    """Return the bytes that ranks use of nodes whose replies a fault keeps from them."""
    total = 0
    for rank in range(job.num_ranks):
        node = rank // job.ranks
        servers = {server for server in range(job.nodes) if fault.strikes(node, server)}
        for step in _steps_in(job, log, rank, *_window(fault)):
            for unit in job.batch_of(rank, step):
                if job.home_of[unit] in servers:
                    total += job.lengths[unit]
    return total


def _window(fault: ClusterFault) -> tuple[float, float]:
    """Return the start and end of the time in which a fault may keep ranks from using a node.

    A node that is dead for good is known to be dead after a silence. One that returns is tried
    again after waits that double: at the latest as long after its return as it was away, or after
    the longest wait.
    """
    if fault.kind == "full":
        return fault.start_s, math.inf
    if fault.stop_s == math.inf:
        return fault.start_s, fault.start_s + SILENCE_S + _AGREE_S
    lasts_s = fault.stop_s - fault.start_s
    return fault.start_s, fault.stop_s + min(RETRY_MAX_S, 2 * lasts_s) + SILENCE_S + _AGREE_S


def _steps_in(
    job: ClusterJob, log: ClusterLog, rank: int, start_s: float, stop_s: float
) -> Iterator[int]:
    """Yield the steps of a rank that were taken after a time and planned before another."""
    ahead = math.ceil(STAGE_BYTES / (job.batch * min(job.lengths))) + 1
    before = [step for step in range(job.num_steps) if log.taken_s.get((rank, step), 0) <= stop_s]
    last = max(before, default=0) + ahead
    for step in range(job.num_steps):
        if step <= last and log.taken_s.get((rank, step), math.inf) >= start_s:
            yield step


def _own_s(job: ClusterJob, rank: int) -> float:
    """Return how long a rank may wait because of faults of its own node."""
    node = rank // job.ranks
    own = [fault for fault in job.faults if fault.kind in _OWN and fault.node == node]
    return sum(2 * _lasts_s(fault) + _RETRY_S for fault in own)


def _lasts_s(fault: ClusterFault) -> float:
    return 0.0 if fault.stop_s == math.inf else fault.stop_s - fault.start_s
