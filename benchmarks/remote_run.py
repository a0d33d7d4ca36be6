"""One run of one loader against the store, and what the store saw of it.

The store is a process of its own that serves the folder of a format with a latency and a bandwidth,
and counts. A run has a cache folder of its own, empty at first and gone afterwards.
"""

import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Listener
from pathlib import Path

from testkit.shaper import Counts, Shape, Shaper

from benchmarks.peers_remote import REMOTE
from benchmarks.process import interpreter, last_words, run_to_end
from benchmarks.remote import (
    SIZE_BYTES,
    Writing,
    files_bytes,
    folder_of,
    stored_bytes,
)
from penstock.flow.bound import epochs_bound

WRITE_TIMEOUT_S = 600
LOOK_EVERY_S = 0.1
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A loader, its variant, and the cache it may use as a share of the set."""

    peer: str
    variant: str
    share: float

    def __str__(self) -> str:
        return f"{self.peer} {self.variant} {self.share:.0%}"

    @property
    def bound_bytes(self) -> int:
        """The least that any loader could read."""
        return epochs_bound(SIZE_BYTES, int(self.share * SIZE_BYTES), EPOCHS)

    def limit_bytes(self, root: Path) -> int:
        """Return the limit to set: a share of the files, so that all of them fit where it is 1."""
        return int(self.share * max(SIZE_BYTES, stored_bytes(root, format_of(self.peer))))


EPOCHS = 3


def format_of(peer: str) -> str:
    return REMOTE[peer].formats["remote"]


@contextlib.contextmanager
def scratch_in(root: Path) -> Iterator[dict[str, str]]:
    """Yield the folders of one run, by the names that a task has for them."""
    (root / "scratch").mkdir(parents=True, exist_ok=True)
    memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with contextlib.ExitStack() as held:
        names = {"scratch": root / "scratch", "memory": memory}
        made = {
            name: held.enter_context(tempfile.TemporaryDirectory(dir=place, prefix="run-"))
            for name, place in names.items()
        }
        made["cache"] = f"{made['scratch']}/cache"
        Path(made["cache"]).mkdir()
        yield made


def ask(root: Path, task: dict, *, timeout_s: float) -> dict:
    """Return the answer of a task, or why there is none."""
    python = interpreter(root, task["peer"])
    if not python.exists():
        return {"failed": f"no {python}: run python -m benchmarks.peers.setup"}
    index = str(folder_of(root, "index"))
    task = {"root": str(root), "index": index, "started_at": time.time()} | task
    answer = Path(task["scratch"], "answer.json")
    with tempfile.TemporaryFile("w+") as said:
        command = [str(python), "-m", "benchmarks.remote_inside", json.dumps(task)]
        code = run_to_end(command, said, said, timeout_s=timeout_s)
        if answer.exists():
            return json.loads(answer.read_text())
        said.seek(0)
        return {"failed": last_words(said.read(), code)} if code is not None else {"late": True}


def ensure_written(root: Path, peer: str) -> str | None:
    """Write what a peer reads unless it is there; return why that failed."""
    for format_name in ("source", format_of(peer)):
        folder = folder_of(root, format_name)
        if folder.exists():
            continue
        writer = peer if format_name in ("mds", "litdata") else "ours"
        with scratch_in(root) as scratch, contextlib.suppress(Failed), Writing(folder) as partial:
            task = {"mode": "write", "peer": writer, "format": format_name, "folder": str(partial)}
            answer = ask(root, task | scratch, timeout_s=WRITE_TIMEOUT_S)
            if answer:
                raise Failed
        if answer:
            return f"{format_name} not written: {answer.get('failed', 'no end of it')}"
    if peer == "ours" and not folder_of(root, "index").exists():
        make_index(root)
    return None


def make_index(root: Path) -> None:
    """Make the index of the shards once, as the writers of other formats do, and note its cost."""
    with (
        scratch_in(root) as scratch,
        Writing(folder_of(root, "index")) as partial,
        Shaper.of_folder(folder_of(root, "tar")) as shaper,
    ):
        task = {"mode": "index", "peer": "ours", "index": str(partial), "uri": shaper.uri}
        ask(root, task | scratch | {"endpoint": shaper.endpoint}, timeout_s=WRITE_TIMEOUT_S)
        counts = shaper.counts()
        cost = {"body_bytes": counts.body_bytes, "requests": counts.requests}
        (partial / "cost.json").write_text(json.dumps(cost))


class Failed(Exception):  # noqa: N818
    """A format was not written; its partial folder keeps its name."""


class Watch:
    """What happens beside a run: counts at its marks, and the largest size of its cache."""

    def __init__(self, shaper: Shaper, scratch: dict[str, str]) -> None:
        self.shaper = shaper
        self.folders = [Path(scratch["cache"]), Path(scratch["memory"])]
        self.address = f"{scratch['scratch']}/marks"
        self.counts: list[Counts] = []
        self.cache_peak_bytes = 0
        self.is_over = threading.Event()

    def __enter__(self) -> "Watch":
        self.listener = Listener(self.address)
        for work in (self.listen, self.look):
            threading.Thread(target=work, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self.listener.close()

    def listen(self) -> None:
        with contextlib.suppress(OSError, EOFError), self.listener.accept() as runner:
            while runner.recv():
                self.counts.append(self.shaper.counts())
                runner.send(True)

    def look(self) -> None:
        while not self.is_over.wait(LOOK_EVERY_S):
            size = sum(map(files_bytes, self.folders))
            self.cache_peak_bytes = max(self.cache_peak_bytes, size)


def measure(root: Path, row: Row, shape: Shape, *, timeout_s: float, **more: object) -> dict:
    """Return one run of three epochs; a failed one is a result too."""
    task = {"mode": "read", "peer": row.peer, "variant": row.variant, "epochs": EPOCHS, **more}
    with (
        scratch_in(root) as scratch,
        Shaper.of_folder(folder_of(root, format_of(row.peer)), shape) as shaper,
        Watch(shaper, scratch) as watch,
    ):
        task |= scratch | {"marks": watch.address, "limit_bytes": row.limit_bytes(root)}
        task |= {"uri": shaper.uri, "endpoint": shaper.endpoint, "url": shaper.url}
        answer = ask(root, task, timeout_s=timeout_s)
        counts = shaper.counts()
    if "late" in answer:
        so_far = f"{max(0, len(watch.counts) - 1)} epochs and {counts.body_bytes / 1e6:,.0f} MB"
        return {"failed": f"stopped after {timeout_s:.0f} s: {so_far} so far"}
    if "failed" in answer:
        return answer
    if answer["wrong"]:
        return {"failed": f"{answer['wrong']} samples differ from the source"}
    return answer | seen_of(row, watch, counts)


def seen_of(row: Row, watch: Watch, counts: Counts) -> dict:
    """Return what the store saw: in all, until the loader was open, and epoch by epoch."""
    opened, *ends = [*watch.counts[:-1], counts]  # what came after the last mark is its epoch's
    epochs = [later - earlier for earlier, later in zip([opened, *ends], ends, strict=False)]
    return {
        "body_bytes": counts.body_bytes,
        "bound_bytes": row.bound_bytes,
        "bound_ratio": counts.body_bytes / row.bound_bytes,
        "open_bytes": opened.body_bytes,
        "epoch_bytes": [epoch.body_bytes for epoch in epochs],
        "requests": counts.requests,
        "open_requests": opened.requests,
        "epoch_requests": [epoch.requests for epoch in epochs],
        "concurrency_max": counts.concurrency_max,
        "store_cpu_s": counts.cpu_s,
        "store_late_max_s": counts.late_max_s,
        "cache_peak_bytes": watch.cache_peak_bytes,
    }
