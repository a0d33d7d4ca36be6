"""Failures, each done for real to the last node of a job whose ranks wait in mid-epoch."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from testkit.network import Host
from testkit.shaper import Fault, Shape

from benchmarks.cluster_job import Job
from benchmarks.failures_run import EPOCHS, JOB_S, SMALL_DISK, Case, Scene

AWAY_S = 4.0
"""How long a node is frozen or behind a cut link: twice the timeout."""
LONG_S = 12.0
"""How long a node is behind a cut link in the long form: its tries have become rare by then."""
OUTAGE_S = 30.0
"""How long the store answers 503."""
PAGE_BYTES = 4096


def nothing(scene: Scene, job: Job) -> None:
    job.go()
    job.wait(timeout_s=JOB_S)


def killed(scene: Scene, job: Job) -> None:
    scene.victim.kill()
    job.go()
    job.wait(timeout_s=JOB_S, hosts=scene.others)


def frozen(scene: Scene, job: Job) -> None:
    send(scene.victim, signal.SIGSTOP)
    job.go()
    time.sleep(AWAY_S)
    send(scene.victim, signal.SIGCONT)
    job.wait(timeout_s=JOB_S)


def cut(scene: Scene, job: Job, away_s: float = AWAY_S) -> None:
    scene.victim.cut()
    job.go()
    try:
        time.sleep(away_s)
    finally:
        scene.victim.join()
    job.wait(timeout_s=JOB_S)


def slow(scene: Scene, job: Job) -> None:
    """The victim's link has a tenth of its rate."""
    usual = scene.victim.link.rate
    scene.victim.reshape(rate="100mbit")
    job.go()
    try:
        job.wait(timeout_s=JOB_S)
    finally:
        scene.victim.reshape(rate=usual)


def corrupt(scene: Scene, job: Job) -> None:
    """Every page that the victim has kept has a wrong byte; it must see that as others do."""
    spoil(scene.victims_tier)
    job.go()
    job.wait(timeout_s=JOB_S)


def full(scene: Scene, job: Job) -> None:
    """Nothing more can be written to the file system of the victim's tier, a small one."""
    fill = "dd if=/dev/zero of=/dev/shm/filler bs=64K || true"
    scene.victim.run(["sh", "-c", fill], private_shm=SMALL_DISK)
    job.go()
    job.wait(timeout_s=JOB_S)


def in_memory(scene: Scene) -> None:
    """Let the victim's tier lie in a file system of its own."""
    scene.victims_tier.parent.mkdir(parents=True)
    scene.victims_tier.symlink_to("/dev/shm")


def unavailable(scene: Scene, job: Job) -> None:
    storm = Fault(kind="unavailable", start_s=0.0, stop_s=OUTAGE_S)
    scene.front.reshape(Shape(faults=(storm,)))
    job.go()
    job.wait(timeout_s=JOB_S)


def all_killed(scene: Scene, job: Job) -> None:
    for host in scene.nodes:
        host.kill()


def meeting_lost(scene: Scene, job: Job) -> None:
    """The process where nodes met is gone; they know each other by now."""
    assert scene.meeting is not None
    scene.meeting.kill()
    job.go()
    job.wait(timeout_s=JOB_S)


def send(host: Host, what: signal.Signals) -> None:
    for pid in host.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)


def spoil(folder: Path) -> int:
    """Change a byte in every page that a tier has written; return how many."""
    count = 0
    for path in (p for p in folder.rglob("*") if p.is_file() and p.stat().st_size > 1 << 20):
        with path.open("r+b") as file:
            for at in written_pages(file.fileno(), path.stat().st_size):
                old = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([old[0] ^ 0xFF]), at)
                count += 1
    assert count > 0, f"{folder} holds nothing to spoil"
    return count


def written_pages(descriptor: int, size_bytes: int) -> Iterator[int]:
    at = 0
    while at < size_bytes:
        try:
            at = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError:
            return  # nothing but a hole up to the end
        yield at
        at += PAGE_BYTES


CASES = {
    "nothing": Case(do=nothing),
    "killed": Case(do=killed, num_lost=1, restart=lambda scene: scene.others),
    "frozen": Case(do=frozen, num_lost=1),
    "cut": Case(do=cut, num_lost=1),
    "cut long": Case(do=partial(cut, away_s=LONG_S), num_lost=1, step_s=0.5),
    "slow": Case(do=slow, num_lost=1),
    "corrupt": Case(do=corrupt, num_lost=1),
    # What has no place any more is read again in each later epoch.
    "full": Case(do=full, num_lost=EPOCHS - 1, prepare=in_memory),
    "restarted": Case(do=all_killed, restart=lambda scene: scene.nodes),
    "fewer": Case(do=all_killed, num_lost=1, restart=lambda scene: scene.others),
    "more": Case(
        do=all_killed, num_lost=1, restart=lambda scene: scene.site.nodes[: scene.num_nodes + 1]
    ),
    "503": Case(do=unavailable, outage_s=OUTAGE_S),
    "meeting": Case(do=meeting_lost, has_torch_store=True),
}
