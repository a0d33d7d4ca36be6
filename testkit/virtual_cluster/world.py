"""A whole cluster in virtual time: nodes, ranks, their training loops, and the faults.

The ranks of a killed node restart with it, from the last step that they took, like a job that saves
its cursor with each step. After the last batch the nodes go on exchanging messages for a while, as
they would in the next epoch, to show whether they agree in the end.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial

from penstock.engine.peers.base import Address
from penstock.engine.peers.members import Member, Members
from penstock.order import StreamHash
from penstock.simulate.virtual import SharedPipe, VirtualTime
from testkit.virtual_cluster.faults import DEADLY, SLOW, ClusterFault
from testkit.virtual_cluster.job import ClusterJob
from testkit.virtual_cluster.net import LATENCY_S, NodeReachability, SharedStore
from testkit.virtual_cluster.node import ClusterNode
from testkit.virtual_cluster.rank import ClusterRank

GIVE_UP_S = 900.0
"""A schedule that takes longer is stuck."""
CODA_S = 120.0
"""How long nodes exchange messages after the last step and the last fault."""
_TALK_S = 1.0


@dataclass(slots=True)
class ClusterLog:
    """What happened in a run."""

    hashes: list[StreamHash] = field(default_factory=list)
    """Hash of what each rank delivered in all its lives."""
    steps: list[int] = field(default_factory=list)
    """Steps that each rank has taken."""
    waits_s: list[tuple[int, float, float]] = field(default_factory=list)
    """For each batch: the rank, when it asked, and how long it waited."""
    taken_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """When each batch was taken, by rank and step."""
    lost_sets: set[frozenset[int]] = field(default_factory=set)
    """The sets of lost nodes that any rank has believed in."""
    silences: list[tuple[int, int, float]] = field(default_factory=list)
    """Rank, server and time of each time-out of a request that a step needed."""
    peer_bytes: int = 0
    done_s: float = 0.0


class ClusterWorld:
    """A cluster that carries out a job while faults strike it."""

    def __init__(self, job: ClusterJob) -> None:
        self.job = job
        self.time = VirtualTime()
        self.reachability = NodeReachability(job.nodes)
        self.store = SharedStore(self.time, job.store_bytes_s, job.seed)
        self.log = ClusterLog(
            hashes=[StreamHash()] * job.num_ranks,
            steps=[0] * job.num_ranks,
        )
        self.nodes = [
            ClusterNode(
                number=number,
                name=job.name_of(number),
                time=self.time,
                reachability=self.reachability,
                lengths=job.lengths,
                egress=SharedPipe(self.time, job.node_bytes_s),
            )
            for number in range(job.nodes)
        ]
        self.ranks: dict[int, ClusterRank] = {}
        """Ranks that live, by number."""
        self._asked_s: dict[int, float] = {}
        self._at_barrier: dict[int, int] = {}
        self._num_slow = [0] * job.nodes
        self._talk = random.Random(job.seed)
        self._has_ended = False

    def run(self) -> ClusterLog:
        """Run the job to its end, or give up."""
        for node in self.nodes:
            self._start(node)
        for fault in self.job.faults:
            self.time.at(fault.start_s, partial(self._strike, fault))
            if fault.stop_s < GIVE_UP_S:
                self.time.at(fault.stop_s, partial(self._heal, fault))
        # Time moves from event to event: without one at the limit, a stuck run would never reach
        # it.
        self.time.at(GIVE_UP_S, lambda: None)
        self.time.run(lambda: self._has_ended or self.time.now_s >= GIVE_UP_S)
        self.log.done_s = self.time.now_s
        self._collect()
        return self.log

    def _look_for_end(self) -> None:
        """End the run if every rank that lives, or will live again, has delivered everything."""
        num_steps = self.job.num_steps
        self._has_ended = all(
            self.log.steps[rank] == num_steps or self._is_gone(rank // self.job.ranks)
            for rank in range(self.job.num_ranks)
        )

    def _is_gone(self, node: int) -> bool:
        """Whether a node is dead for good."""
        return not self.nodes[node].is_up and not any(
            fault.kind in DEADLY and fault.node == node and fault.stop_s < GIVE_UP_S
            for fault in self.job.faults
        )

    # -- lives -------------------------------------------------------------------------------

    def _start(self, node: ClusterNode) -> None:
        job = self.job
        node.is_up = True
        members = [self._member(other.number, 1) for other in self.nodes]
        ranks = []
        for local in range(job.ranks):
            view = Members(members, me=node.name)
            if node.life > 1:
                view.announce(self._member(node.number, node.life), self.time.now_s)
            rank = ClusterRank(
                job,
                node,
                local,
                view,
                store=self.store,
                others=self.nodes,
                step=self.log.steps[node.number * job.ranks + local],
            )
            rank.on_views = self.log.lost_sets.add
            ranks.append(rank)
            self.ranks[rank.number] = rank
        node.gossip = ranks[0]
        # The first rank of a node carries its server.
        node.progress_mark = ranks[0].progress_mark
        node.is_coming = ranks[0].is_coming
        for rank in ranks:
            # A loader plans and fills from its start: other nodes may wait for units at home here
            # before its own training loop asks for anything.
            node.do(node.life, rank.look)
            node.do(node.life, partial(self._ask, rank))

    def _member(self, node: int, life: int) -> Member:
        return Member(
            name=self.job.name_of(node),
            node=node,
            addresses=(Address(host="::1", port=node + 1),),
            capacity_bytes=1,
            incarnation=life,
            host=f"host{node}",
        )

    def _collect(self, node: ClusterNode | None = None) -> None:
        """Move the records of ranks into the log, before the ranks are gone."""
        for rank in list(self.ranks.values()):
            if node is not None and rank.node is not node:
                continue
            number = rank.number
            hashed = self.job.hash_of_steps(number, rank.delivered)
            self.log.hashes[number] = self.log.hashes[number].merge(hashed)
            self.log.peer_bytes += rank.reads.peer_bytes
            rank.reads.peer_bytes = 0
            rank.delivered.clear()
            for server, link in rank.links.items():
                self.log.silences += [(number, server, at_s) for at_s in link.silences_s]
                link.silences_s.clear()

    # -- training ----------------------------------------------------------------------------

    def _ask(self, rank: ClusterRank) -> None:
        """Let a rank's training loop ask for its next batch, once all ranks are that far."""
        if rank.step == self.job.num_steps:
            self._at_barrier.pop(rank.number, None)
            self._look_for_end()
            self._release()
            return
        self._at_barrier[rank.number] = rank.step
        self._release()

    def _release(self) -> None:
        """Release the ranks at the barrier that no other rank is behind."""
        behind = min(
            (rank.step for rank in self.ranks.values() if rank.step < self.job.num_steps),
            default=0,
        )
        for number, step in list(self._at_barrier.items()):
            if not self.job.lockstep or step <= behind:
                del self._at_barrier[number]
                rank = self.ranks[number]
                rank.node.do(rank.node.life, partial(self._take, rank))

    def _take(self, rank: ClusterRank) -> None:
        self._asked_s[rank.number] = self.time.now_s
        rank.take(partial(self._taken, rank))

    def _taken(self, rank: ClusterRank) -> None:
        now_s, number = self.time.now_s, rank.number
        asked_s = self._asked_s[number]
        self.log.waits_s.append((number, asked_s, now_s - asked_s))
        self.log.steps[number] = rank.step
        self.log.taken_s[number, rank.step - 1] = now_s
        rank.node.after(self.job.compute_s, partial(self._ask, rank))

    # -- faults ------------------------------------------------------------------------------

    def _strike(self, fault: ClusterFault) -> None:
        now_s, node = self.time.now_s, self.nodes[fault.node] if fault.node >= 0 else None
        if fault.kind == "cut":
            self.reachability.close(fault.node, fault.other, now_s)
            self.reachability.close(fault.other, fault.node, now_s)
        elif fault.kind == "one-way":
            self.reachability.close(fault.node, fault.other, now_s)
        elif fault.kind == "refuse":
            self.store.refuse(1)
        elif fault.kind == "lag":
            self.store.lag(1, SLOW)
        elif node is None:
            raise AssertionError(fault)
        elif fault.kind in DEADLY:
            self._kill(node, fault)
        elif fault.kind == "freeze":
            node.freeze()
        elif fault.kind == "slow":
            self._num_slow[fault.node] += 1
            node.egress.slow_down(SLOW)
        elif fault.kind == "corrupt":
            node.is_corrupt = True
        elif fault.kind == "dry":
            self.store.refuse(1, fault.node)
        elif fault.kind == "full":
            node.is_full = True
            node.look_at_parked()

    def _heal(self, fault: ClusterFault) -> None:
        node = self.nodes[fault.node] if fault.node >= 0 else None
        if fault.kind == "cut":
            self.reachability.open(fault.node, fault.other)
            self.reachability.open(fault.other, fault.node)
        elif fault.kind == "one-way":
            self.reachability.open(fault.node, fault.other)
        elif fault.kind == "refuse":
            self.store.refuse(-1)
        elif fault.kind == "lag":
            self.store.lag(-1, SLOW)
        elif node is None:
            raise AssertionError(fault)
        elif fault.kind in DEADLY:
            self._start(node)
            if fault.kind == "vanish":
                for way in self.reachability.to_and_from(node.number):
                    self.reachability.open(*way)
        elif fault.kind == "freeze":
            node.thaw()
        elif fault.kind == "slow":
            self._num_slow[fault.node] -= 1
            node.egress.slow_down(SLOW if self._num_slow[fault.node] else 1.0)
        elif fault.kind == "corrupt":
            node.is_corrupt = False
        elif fault.kind == "dry":
            self.store.refuse(-1, fault.node)

    def _kill(self, node: ClusterNode, fault: ClusterFault) -> None:
        self._collect(node)
        for number in [n for n, rank in self.ranks.items() if rank.node is node]:
            del self.ranks[number]
            self._at_barrier.pop(number, None)
        node.die(keeps_tier=fault.kind != "wipe")
        for rank in self.ranks.values():
            link = rank.links[node.number]
            if fault.kind != "vanish" and link.outstanding:
                way = rank.node.number, node.number
                tell = partial(self.reachability.pass_on, *way, partial(link.reset, link.life))
                self.time.after(LATENCY_S, tell)
        if fault.kind == "vanish":
            for way in self.reachability.to_and_from(node.number):
                self.reachability.close(*way, self.time.now_s)
        self._look_for_end()
        self._release()

    # -- afterwards --------------------------------------------------------------------------

    def talk(self) -> None:
        """Let the nodes that are left exchange messages, for a while or until they agree."""
        last_s = max(
            [self.time.now_s]
            + [fault.stop_s for fault in self.job.faults if fault.stop_s < GIVE_UP_S]
        )
        end_s = last_s + CODA_S
        for rank in self.ranks.values():
            self._greet(rank, end_s)
        self.time.run(lambda: self.time.now_s >= end_s or self._is_quiet(last_s))

    def _is_quiet(self, last_s: float) -> bool:
        """Return whether all agree, after the last fault."""
        return self.time.now_s > last_s and all(map(self.knows, self.ranks.values()))

    def knows(self, rank: ClusterRank) -> bool:
        """Return whether a rank knows which nodes are dead, and suspects no other."""
        dead = {node.name for node in self.nodes if not node.is_up}
        return rank.members.lost == dead and rank.members.suspects <= dead

    def _greet(self, rank: ClusterRank, end_s: float) -> None:
        if self.time.now_s >= end_s:
            return
        usable = [
            node
            for node in rank.links
            if rank.members.is_usable(self.job.name_of(node), self.time.now_s)
        ]
        if usable:
            rank.greet(self._talk.choice(usable))
        rank.node.after(_TALK_S, partial(self._greet, rank, end_s))
