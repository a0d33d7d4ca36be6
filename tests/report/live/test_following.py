"""Ranks from a trace: what rows and counters add up to, and who is still there."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.engine.snapshot import LiveRank
from penstock.report.live.following import RECENT_S, FollowedRun
from penstock.trace import Flag, Kind, Recorder

SECOND = 1_000_000_000


def recorded(folder: Path, ends_s: list[float], *, wait_s: float, rank: int = 0) -> Recorder:
    """Record batches that were handed over so many seconds ago."""
    recorder = Recorder(folder, role="train", rank=rank)
    now_ns = time.perf_counter_ns()
    for ago_s in sorted(ends_s, reverse=True):
        end_ns = now_ns - int(ago_s * SECOND)
        start_ns = end_ns - int(wait_s * SECOND)
        recorder.span(
            Kind.NEXT, start_ns, end_ns, wait_ns=end_ns - start_ns, count=10, step=0, epoch=2
        )
    return recorder


def test_the_last_seconds_are_told_from_the_run(tmp_path: Path) -> None:
    recorder = recorded(tmp_path, [ago + 0.5 for ago in range(40)], wait_s=0.25)
    [rank] = FollowedRun(tmp_path).look()
    assert (rank.now.state, rank.now.epoch, rank.now.counts.batches) == ("running", 2, 40)
    assert rank.now.counts.samples == 400
    assert rank.now.counts.stall_share == pytest.approx(0.25, abs=0.02)
    assert rank.recent.batches == pytest.approx(RECENT_S, abs=1)
    assert rank.samples_per_s == pytest.approx(10, abs=1.5)
    assert rank.recent.stall_share == pytest.approx(0.25, abs=0.03)
    recorder.close()


def test_a_wait_longer_than_the_last_seconds_counts_only_inside_them(tmp_path: Path) -> None:
    recorder = recorded(tmp_path, [60, 2.0], wait_s=50)
    [rank] = FollowedRun(tmp_path).look()
    assert rank.recent.stall_share == pytest.approx((RECENT_S - 2) / RECENT_S, abs=0.05)
    recorder.close()


def test_sources_decoding_and_cores_are_those_of_all_processes_of_a_rank(tmp_path: Path) -> None:
    train = recorded(tmp_path, [9.9, 0.1], wait_s=0)
    engine = Recorder(tmp_path, role="engine")
    now_ns = time.perf_counter_ns()
    begin_ns = now_ns - 8 * SECOND
    s3, tier = engine.name("s3"), engine.name("tier:memory")
    for kind, source, flags in (
        (Kind.FETCH, s3, 0),
        (Kind.FETCH, s3, Flag.ERROR),
        (Kind.TIER_READ, tier, 0),
        (Kind.PEER_REQUEST, engine.name("peer:1"), 0),
        (Kind.READ, 0, 0),  # Seen by a hook as well: it must not count twice.
    ):
        engine.span(kind, begin_ns, now_ns, source_id=source, size_bytes=1000, flags=flags)
    engine.span(Kind.DECODE, begin_ns, begin_ns + 5 * SECOND)
    engine.span(Kind.HAND_OVER, begin_ns, begin_ns + 4 * SECOND)
    for at_s, used_s in ((-9, 1.0), (-1, 17.0)):
        values = {"cpu.user_s": used_s, "cpu.system_s": 0.0, "memory.rss_bytes": 5e6}
        engine.counters(now_ns + at_s * SECOND, values)
    [rank] = FollowedRun(tmp_path).look()
    sources = rank.now.counts.sources
    assert {name: s.size_bytes for name, s in sources.items()} == {
        "s3": 1000, "tier:memory": 1000, "peers": 1000,
    }  # fmt: skip
    assert rank.recent.reads_in_flight == pytest.approx(3 * 8 / 9.9, rel=0.1)
    assert rank.recent.decodes_at_a_time == pytest.approx(0.5, abs=0.1)
    assert rank.recent.loader_cores == pytest.approx(1.6, abs=0.2)
    assert rank.now.ready_batches == pytest.approx(0.4, abs=0.1)
    assert rank.now.memory_bytes == 5_000_000
    train.close()
    engine.close()


def test_a_foreign_loader_is_followed_by_what_hooks_saw(tmp_path: Path) -> None:
    train = recorded(tmp_path, [5, 1], wait_s=0.5)
    worker = Recorder(tmp_path, role="worker")
    now_ns = time.perf_counter_ns()
    worker.span(Kind.BATCH, now_ns - 3 * SECOND, now_ns)
    worker.span(Kind.READ, now_ns - 3 * SECOND, now_ns - 2 * SECOND, size_bytes=700)
    worker.span(Kind.READ, now_ns - 3 * SECOND, now_ns, size_bytes=900, flags=Flag.NATIVE)
    [rank] = FollowedRun(tmp_path).look()
    assert {n: s.size_bytes for n, s in rank.now.counts.sources.items()} == {"files (native)": 900}
    train.close()
    worker.close()


TRAINS = """
import sys, time
from penstock.trace import Kind, Recorder
recorder = Recorder(sys.argv[1], role="train", rank=int(sys.argv[2]))
now_ns = time.perf_counter_ns()
recorder.span(Kind.NEXT, now_ns - 1000, now_ns, count=4)
print("there", flush=True)
sys.stdin.read()
recorder.close()
"""


def states(ranks: list[LiveRank]) -> dict[int, str]:
    return {rank.now.rank: rank.now.state for rank in ranks}


def test_ranks_that_were_killed_or_have_ended_are_told_apart(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TRAINS, str(tmp_path), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for rank in range(3)
    ]
    for process in ranks:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
    run = FollowedRun(tmp_path)
    assert states(run.look()) == {0: "running", 1: "running", 2: "running"}
    os.kill(ranks[1].pid, signal.SIGKILL)
    for process in ranks[1:]:
        process.communicate()  # The other one reads the end of its input, and ends in order.
    after = run.look()
    assert states(after) == {0: "running", 1: "killed", 2: "ended"}
    assert [rank.now.counts.samples for rank in after] == [4, 4, 4]
    ranks[0].communicate()
