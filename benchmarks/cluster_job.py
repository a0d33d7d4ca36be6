"""Jobs of `cluster_worker` on the hosts of an emulated network, and what they delivered."""

import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from testkit.network import Host
from testkit.network_job import Launch, NetworkJob

from penstock.order import GlobalOrder, StreamHash
from penstock.testing.servers import ServerError

ROOT = Path(__file__).parents[1]
WORKER = [sys.executable, str(ROOT / "benchmarks" / "cluster_worker.py")]
POLL_S = 0.01
STACKS_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What every rank does; nothing in it depends on the number of nodes."""

    uri: str
    endpoint: str
    folder: str
    """Of the job: tiers, results and logs."""
    global_batch_size: int
    epochs: int = 1
    seed: int = 7
    disk: int = 0
    """Bytes of the disk tier of each node; 0 has none."""
    memory: int = 0
    """The same in memory."""
    options: dict = field(default_factory=dict)
    """More options of the loader: peers, assignment, shuffle."""
    look_ahead: str = "512MB"
    threads: int | None = None
    step_s: float = 0.0
    """How long the training step itself takes."""
    is_paced: bool = False
    """Steps come at fixed times: a rank that was held up is as far as the others again soon."""
    is_lockstep: bool = False
    """Ranks agree after every step, through a process group, and save a checkpoint."""
    is_dry: bool = False
    """Nothing is read after the first batch; the loop sees it again and again."""
    verify: bool = True
    """Look at the bytes of each sample."""
    hold_at: tuple[int, int] | None = None
    """After this step of this epoch, wait for `go`."""
    attempt: int = 0
    state: dict | None = None
    """Where to begin."""


class Job(NetworkJob):
    """A task on some hosts."""

    def __init__(self, task: Task, hosts: Sequence[Host], launch: Launch | None = None) -> None:
        self.task = task
        self.path = Path(task.folder)
        self.path.mkdir(parents=True, exist_ok=True)
        described = self.path / f"task-{task.attempt}.json"
        described.write_text(json.dumps(asdict(task)))
        folder = self.path / f"logs-{task.attempt}"
        super().__init__(hosts, [*WORKER, str(described)], folder=folder, launch=_in_root(launch))

    def go(self) -> None:
        """Let ranks that hold go on."""
        (self.path / "go").touch()

    def wait_for_step(self, step: int, ranks: Sequence[int], *, timeout_s: float = 60.0) -> None:
        """Wait until ranks have finished a step, counted from the start of this attempt."""
        deadline_s = time.monotonic() + timeout_s
        while any(len(self.lines(rank)) <= step for rank in ranks):
            died = [p for each in self.processes.values() for p in each if p.poll()]
            assert not died, self.logs()
            assert time.monotonic() < deadline_s, self.stacks()
            time.sleep(POLL_S)

    def wait(self, *, timeout_s: float, hosts: Sequence[Host] | None = None) -> None:
        try:
            super().wait(timeout_s=timeout_s, hosts=hosts)
        except ServerError as error:
            raise ServerError(f"{error}\n{self.stacks()}") from error

    def stacks(self) -> str:
        """Let ranks that still run print where they are, and return what all have printed."""
        for process in (p for each in self.processes.values() for p in each):
            if self._launch.by == "hand" and process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        time.sleep(STACKS_S)
        return self.logs()

    def lines(self, rank: int) -> list[dict]:
        return lines_of(self.path, self.task.attempt, rank)

    def ends(self, attempt: int | None = None) -> list[dict]:
        """Return what ranks said at their end, those that came so far."""
        number = self.task.attempt if attempt is None else attempt
        return [json.loads(path.read_text()) for path in sorted(self.path.glob(f"ends/{number}-*"))]


def _in_root(launch: Launch | None) -> Launch:
    wanted = launch or Launch()
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1", **wanted.env}
    return Launch(
        by=wanted.by,
        ranks_per_host=wanted.ranks_per_host,
        hosts_min=wanted.hosts_min,
        restarts=wanted.restarts,
        env=env,
        private_shm=wanted.private_shm,
    )


def lines_of(path: Path, attempt: int, rank: int) -> list[dict]:
    """Return the steps that a rank had finished; a line cut short by a kill does not count."""
    try:
        text = (path / "steps" / f"{attempt}-{rank}.jsonl").read_text()
    except OSError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


Steps = dict[tuple[int, int], StreamHash]


def delivered(path: Path) -> Steps:
    """Return the hash of each step of a job, whatever was restarted in between.

    A later attempt begins where all ranks of the earlier one had been: what those did beyond that
    place is done again, and does not count.
    """
    attempts: dict[int, list[list[dict]]] = {}
    for file in sorted(path.glob("steps/*.jsonl")):
        attempt, rank = map(int, file.stem.split("-"))
        attempts.setdefault(attempt, []).append(lines_of(path, attempt, rank))
    out: Steps = {}
    for _, ranks in sorted(attempts.items()):
        steps = _merged(ranks)
        if steps:
            out = {key: value for key, value in out.items() if key < min(steps)}
        out |= steps
    return out


def _merged(ranks: list[list[dict]]) -> Steps:
    out: Steps = {}
    for line in (line for lines in ranks for line in lines):
        key = (line["epoch"], line["step"])
        mine = StreamHash(total=line["total"], num_samples=line["num"])
        out[key] = out.get(key, StreamHash()).merge(mine)
    return out


def expected(num_samples: int, task: Task) -> Steps:
    """Return the hash of each step by the order alone, without any loader."""
    order = GlobalOrder(num_samples=num_samples, seed=task.seed)
    return dict(_expected_steps(order, task))


def _expected_steps(order: GlobalOrder, task: Task) -> Iterator[tuple[tuple[int, int], StreamHash]]:
    size = task.global_batch_size
    for epoch in range(task.epochs):
        for step, start in enumerate(range(0, order.num_samples, size)):
            stop = min(start + size, order.num_samples)
            ids = order.ids(epoch, start, stop)
            yield (epoch, step), StreamHash().update(epoch, range(start, stop), ids)


def stream_hash(steps: Steps) -> str:
    """Return one hash of all steps."""
    whole = StreamHash()
    for part in steps.values():
        whole = whole.merge(part)
    return whole.hexdigest()


def last_common(job: Job, ranks: Sequence[int]) -> dict:
    """Return the state after the last step that all ranks had finished: the job's checkpoint."""
    lines = [job.lines(rank) for rank in ranks]
    return lines[0][min(map(len, lines)) - 1]["state"]


def total(ends: Sequence[dict], name: str) -> int:
    """Return the sum over ranks of one thing that they said at their end."""
    return sum(end[name] for end in ends)


def peer_bytes(ends: Sequence[dict]) -> int:
    return sum(end["sources"].get("peers", 0) for end in ends)
