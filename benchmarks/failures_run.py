"""One job with one failure, and what it cost."""

import contextlib
import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from testkit.network import Host
from testkit.network_job import Launch
from testkit.network_store import Front

from benchmarks.cluster_job import Job, Task, delivered, expected, last_common
from benchmarks.cluster_site import Site

EPOCHS = 3
BATCH = 64
BATCHES_AHEAD = 2.5
"""What is on its way when a node is lost is read twice: little beside the share of a node."""
STEP_S = 0.15
HOLD_AT = (0, 4)
"""Early enough that the tiers are not full yet."""
JOB_S = 240.0
SMALL_DISK = "256MB"
BY_HAND = Launch(by="hand", private_shm=SMALL_DISK, env={"TORCHELASTIC_USE_AGENT_STORE": "True"})
SAID_CHARS = 76
TORCH_STORE = """
import signal
from torch.distributed import TCPStore
store = TCPStore("0.0.0.0", 29400, is_master=True, wait_for_workers=False)
print("ready", flush=True)
signal.pause()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a failure came to."""

    said: str
    """By the summary of a rank."""
    longest_s: float = 0.0
    sent_bytes: int = 0
    """By the store, until the first job had ended."""
    resent_bytes: int = 0
    """By the store, to the job that went on in its place."""
    victim_bytes: int | None = None
    """Of it, what the victim has read, where it lived to say so."""
    is_right: bool = False
    seconds: float = 0.0
    num_lost: int = 0
    outage_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Scene:
    """A job on the first nodes of a site; something is about to happen to the last of them."""

    site: Site
    num_nodes: int
    folder: Path
    front: Front
    meeting: subprocess.Popen | None = None
    """Torch's store, where nodes met in one."""

    @property
    def nodes(self) -> list[Host]:
        return self.site.nodes[: self.num_nodes]

    @property
    def victim(self) -> Host:
        return self.nodes[-1]

    @property
    def others(self) -> list[Host]:
        return self.nodes[:-1]

    @property
    def victims_tier(self) -> Path:
        return self.folder / "tiers" / self.victim.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is done, to how many nodes it is final, and what follows."""

    do: Callable[[Scene, Job], None]
    num_lost: int = 0
    """Nodes whose share others have to read again."""
    restart: Callable[[Scene], Sequence[Host]] | None = None
    """The nodes that a job which died goes on with."""
    outage_s: float = 0.0
    """How long no node could have gone on, whatever it did."""
    step_s: float = STEP_S
    """Long enough that the others are still at work when the victim is back."""
    prepare: Callable[[Scene], None] = lambda scene: None
    has_torch_store: bool = False
    """Nodes meet in a store of torch on the first of them, not in a folder."""


def outcome_of(case: Case, site: Site, num_nodes: int, folder: Path) -> Outcome:
    """Run the job with one failure and return what it cost."""
    began_s = time.monotonic()
    before = site.store.host.counters()
    with Front(site.store) as front:
        scene = Scene(site=site, num_nodes=num_nodes, folder=folder, front=front)
        case.prepare(scene)
        task = task_of(scene, case)
        with meeting(scene, case), Job(task, scene.nodes, BY_HAND) as job:
            job.wait_for_step(HOLD_AT[1], range(num_nodes))
            case.do(scene, job)
        between = site.store.host.counters()
        attempts = [job, *resumed(scene, case, job)]
    after = site.store.host.counters()
    ends = [end for each in attempts for end in each.ends()]
    return Outcome(
        said=said(ends),
        longest_s=longest_s(attempts),
        sent_bytes=(between - before).out_bytes,
        resent_bytes=(after - between).out_bytes,
        victim_bytes=next(
            (e["store_bytes"] for e in job.ends() if e["rank"] == num_nodes - 1), None
        ),
        is_right=delivered(folder) == expected(site.num_samples, task)
        and not any(end["num_wrong"] for end in ends),
        seconds=time.monotonic() - began_s,
        num_lost=case.num_lost,
        outage_s=case.outage_s,
    )


def task_of(scene: Scene, case: Case) -> Task:
    return Task(
        uri=scene.site.uri,
        endpoint=scene.front.access.endpoint,
        folder=str(scene.folder),
        global_batch_size=BATCH,
        epochs=EPOCHS,
        # Room for the share of a lost node too.
        disk=int(1.3 * scene.site.size_bytes / max(1, scene.num_nodes - 1)),
        options={"peers": case.has_torch_store or str(scene.folder / "meet")},
        threads=1,
        look_ahead=str(int(BATCHES_AHEAD * BATCH * scene.site.sizes.mean() / scene.num_nodes)),
        step_s=case.step_s,
        is_paced=True,
        hold_at=HOLD_AT,
    )


@contextlib.contextmanager
def meeting(scene: Scene, case: Case) -> Iterator[None]:
    """Run a store of torch on the first node, as torchrun's agent would."""
    if not case.has_torch_store:
        yield
        return
    store = scene.nodes[0].popen([sys.executable, "-c", TORCH_STORE], stdout=subprocess.PIPE)
    store.stdout.readline()
    scene.meeting = store
    try:
        yield
    finally:
        store.kill()
        store.communicate()


def resumed(scene: Scene, case: Case, job: Job) -> list[Job]:
    """Start a job that died once more, where all of its ranks had been."""
    if case.restart is None:
        return []
    state = last_common(job, range(scene.num_nodes))
    task = dataclasses.replace(job.task, attempt=1, state=state, hold_at=None)
    with Job(task, case.restart(scene), BY_HAND) as again:
        again.wait(timeout_s=JOB_S)
    return [again]


def longest_s(attempts: list[Job]) -> float:
    """Return the longest wait after the failure, of any rank that nothing was done to.

    The first batch of a job waits for the store and for others to start: it does not count.
    """
    first, *later = attempts
    untouched = range(len(first.hosts) - 1)
    lines = [line for rank in untouched for line in first.lines(rank)[HOLD_AT[1] + 1 :]]
    lines += [line for job in later for r in range(len(job.hosts)) for line in job.lines(r)[1:]]
    return max((line["wait_s"] for line in lines), default=0.0)


def said(ends: list[dict]) -> str:
    """Return what summaries tell of other nodes: the first of their last sentences."""
    for end in ends:
        lines = [line.strip() for line in end["summary"].splitlines()]
        told = [line for line in lines if line.startswith("node ") and " sent " not in line]
        if told:
            return told[-1][:SAID_CHARS]
    return "-"
