"""Whatever happens to a cluster, its job goes on: nothing lost or doubled, little read twice."""

from __future__ import annotations

import math
import sys

import pytest
from testkit.virtual_cluster import ClusterVerdict, judged, play, replay_line
from testkit.virtual_cluster.__main__ import main
from testkit.virtual_cluster.faults import ClusterFault, Kind
from testkit.virtual_cluster.job import STAGE_BYTES, ClusterJob
from testkit.virtual_cluster.rank import ClusterRank
from testkit.virtual_cluster.reads import ClusterReads
from testkit.virtual_cluster.world import ClusterWorld

from penstock.engine.peers.members import Members


def judge(job: ClusterJob) -> tuple[ClusterWorld, ClusterVerdict]:
    world = ClusterWorld(job)
    verdict = judged(world)
    assert verdict.failures == (), f"{job}: {verdict.failures}"
    return world, verdict


@pytest.mark.parametrize(
    ("nodes", "faults", "seeds"),
    [
        (2, None, range(50)),
        (3, None, range(50, 110)),
        (4, 3, range(110, 150)),
        (None, 6, range(150, 175)),
        (None, None, range(175, 210)),
    ],
)
def test_every_schedule_of_faults_ends_well(
    nodes: int | None, faults: int | None, seeds: range
) -> None:
    failed = [
        f"{replay_line(seed, nodes=nodes, faults=faults)}: {failure}"
        for seed in seeds
        for failure in play(seed, nodes=nodes, faults=faults).failures
    ]
    assert failed == []


@pytest.mark.parametrize("capacity", [0.6, 1.05, 2.5])
def test_where_nothing_goes_wrong_every_placed_byte_is_read_once(capacity: float) -> None:
    for seed in range(3):
        _, verdict = judge(ClusterJob(seed=seed, capacity=capacity))
        assert (verdict.store_ratio, verdict.extra_share) == (1.0, 0.0)


def test_the_same_seed_is_the_same_run_to_the_last_event() -> None:
    logs = []
    for _ in range(2):
        world = ClusterWorld(ClusterJob.drawn(11, faults=4))
        logs.append((judged(world), world.log, world.store.read_bytes))
    assert logs[0] == logs[1]


@pytest.mark.parametrize("kind", ["kill", "vanish"])
def test_a_lost_node_costs_its_share_of_the_store_once(kind: Kind) -> None:
    """And what was asked of it before everybody knew: about a stage of each rank."""
    fault = ClusterFault(kind=kind, start_s=9.0, node=1)
    job = ClusterJob(seed=5, steps=64, capacity=1.5, faults=(fault,))
    world, verdict = judge(job)
    extra_bytes = verdict.extra_share * job.size_bytes
    assert 0 < extra_bytes <= job.home_bytes(1) + job.num_ranks * STAGE_BYTES
    assert world.log.lost_sets == {frozenset({1})}
    assert verdict.wait_max_s <= (2.5 if kind == "vanish" else 1.0)


@pytest.mark.parametrize("kind", ["freeze", "kill", "wipe", "vanish", "cut", "corrupt"])
def test_a_node_that_comes_back_is_used_again(kind: Kind) -> None:
    other = 2 if kind == "cut" else -1
    fault = ClusterFault(kind=kind, start_s=2.0, stop_s=5.0, node=1, other=other)
    job = ClusterJob(seed=3, steps=64, lockstep=False, faults=(fault,))
    world, _ = judge(job)
    served_s = [rank.links[1].served_s for rank in world.ranks.values() if 1 in rank.links]
    assert min(served_s) > 10.0


def test_a_store_that_refuses_for_half_a_minute_makes_nobody_lose_anybody() -> None:
    fault = ClusterFault(kind="refuse", start_s=0.3, stop_s=30.3)
    job = ClusterJob(seed=1, nodes=6, capacity=1.5, faults=(fault,))
    world, verdict = judge(job)
    assert world.log.lost_sets == set()
    assert verdict.time_s < 30.3 + job.quick_s + 12.0, "the last wait of a request is up to 10 s"


def test_a_node_ten_times_slower_holds_up_no_step() -> None:
    fault = ClusterFault(kind="slow", start_s=4.0, stop_s=12.0, node=1)
    plain = judge(ClusterJob(seed=2, steps=64, capacity=1.5))[1]
    slow = judge(ClusterJob(seed=2, steps=64, capacity=1.5, faults=(fault,)))[1]
    assert slow.time_s < 1.05 * plain.time_s
    assert slow.wait_max_s < plain.wait_max_s + 0.3


def test_a_full_tier_costs_what_it_does_not_hold_and_no_more() -> None:
    fault = ClusterFault(kind="full", start_s=0.0, node=1)
    job = ClusterJob(seed=4, capacity=1.05, faults=(fault,))
    _, verdict = judge(job)
    uses = job.epochs * job.home_bytes(1)
    assert 0 < verdict.extra_share * job.size_bytes <= uses
    assert verdict.wait_max_s < 2.0


def test_a_node_that_gets_nothing_from_the_store_costs_others_one_long_wait() -> None:
    fault = ClusterFault(kind="dry", start_s=0.3, stop_s=60.0, node=1)
    job = ClusterJob(seed=6, capacity=1.05, lockstep=False, faults=(fault,))
    world, _ = judge(job)
    for rank in (0, 2, 3):
        long = [wait_s for who, _, wait_s in world.log.waits_s if who == rank and wait_s > 2.0]
        assert len(long) <= 1
        assert world.log.taken_s[rank, job.num_steps - 1] < 20.0


# -- that it would be noticed ----------------------------------------------------------------------


def noticed(what: str) -> bool:
    """Whether one of a few schedules fails with this."""
    return any(
        what in failure for seed in range(60) for failure in play(seed, nodes=3, faults=4).failures
    )


def test_a_peer_that_is_never_tried_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Members, "due", lambda self, at_s: ())
    assert noticed("in the end")


def test_samples_that_are_delivered_twice_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ClusterRank._plan

    def doubled(self: ClusterRank) -> None:
        plan(self)
        batch = self._stage[-1]
        if batch.step == 20:
            batch.units = [batch.units[0], *batch.units[:-1]]

    monkeypatch.setattr(ClusterRank, "_plan", doubled)
    assert noticed("other samples")


def test_waiting_for_who_is_known_to_be_silent_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = ClusterReads._begin

    def trusting(self: ClusterReads, action: object) -> None:
        self.is_usable = lambda name: name != self._node.name  # type: ignore[method-assign]
        begin(self, action)  # type: ignore[arg-type]
        del self.is_usable

    monkeypatch.setattr(ClusterReads, "_begin", trusting)
    assert noticed("in vain")


def test_a_failure_is_printed_with_what_went_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = replay_line(11, nodes=3, faults=4)
    monkeypatch.setattr(sys, "argv", line.split()[2:])
    assert main() == 0
    assert "3 nodes" in capsys.readouterr().out
    monkeypatch.setattr(Members, "due", lambda self, at_s: ())
    monkeypatch.setattr("testkit.virtual_cluster.world.CODA_S", 5.0)
    assert main() == 1
    assert "FAILED: in the end" in capsys.readouterr().out


def test_a_fault_without_end_says_so() -> None:
    assert str(ClusterFault(kind="full", start_s=1.0, node=2)) == "full 2 1.00.."
    assert (
        str(ClusterFault(kind="cut", start_s=0.0, stop_s=2.5, node=0, other=3))
        == "cut 0-3 0.00..2.50"
    )
    assert ClusterFault(kind="kill", start_s=0.0).stop_s == math.inf
