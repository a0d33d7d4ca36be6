"""What does kill -9 of the training process, the engine or a worker leave, and what does it lose?

    python -m benchmarks.kills [--kinds front,engine,worker] [--moments 50] [--seed 7]
                               [--workers processes]

A program trains (`kills_program`), is hit at random moments of its start and its run, and goes on
from its checkpoint. For each kind of process: how often it was hit; how often the program went on
by itself, and how often it ended and was started again; processes, shared memory and files that
were left after an end; and, of the whole epochs at the end, samples that are missing or came twice.
The exit status is 1 if anything was left or lost, if a kind of process was never there to hit, or
if no program outlived a hit that was not its own.

As root, the benchmark has a /dev/shm of its own; else what others leave there meanwhile is counted.
"""

import argparse
import contextlib
import ctypes
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.formats import labelled, write_shards
from benchmarks.kills_program import RECORD
from benchmarks.peers.setup import ROOT

NUM_SAMPLES, BLOB_BYTES = 2000, 6000
MARK = "PENSTOCK_BENCHMARK_RUN"
"""A variable of the program's environment: every process below it, orphans too, has it in /proc."""
COMM = {
    "engine": "penstock-engine",
    "worker": "penstock-worker",
    "spawner": "penstock-spawne",  # the kernel keeps 15 characters
}
START_S, RUN_S = 1.5, 1.0
"""Half of the moments are so far after the program's start, half after a step that it made."""
MISSES_MAX = 3
"""For each moment at which a process of the kind was there."""
PATIENCE_S = 20.0
"""For processes to end and for the program to go on; longer is a finding."""
END_S = 120.0
"""For the program to come to the end of an epoch."""
SHARED_MEMORY = Path("/dev/shm")
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 1 << 18


def write(folder: Path) -> None:
    """Write samples whose bytes begin with their number, and the number as the label."""
    rng = np.random.default_rng(0)
    blobs = (i.to_bytes(8, "little") + rng.bytes(BLOB_BYTES - 8) for i in range(NUM_SAMPLES))
    write_shards(folder, labelled("bin", blobs), shard_bytes=NUM_SAMPLES * BLOB_BYTES // 4)


class Program:
    """The program, in a folder that it keeps over its starts."""

    def __init__(self, folder: Path, workers: str) -> None:
        self.folder, self.workers = folder, workers
        self.temporary, self.cache = folder / "tmp", folder / "cache"
        self.temporary.mkdir()
        write(folder / "data")
        self.run_id = ""
        self.process: subprocess.Popen | None = None

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        self.run_id = uuid.uuid4().hex
        own = {MARK: self.run_id, "TMPDIR": str(self.temporary), "PENSTOCK_CACHE": str(self.cache)}
        command = [sys.executable, "-m", "benchmarks.kills_program", str(self.folder), self.workers]
        with (self.folder / "said").open("wb") as said:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | own, stdout=said, stderr=said
            )

    def steps(self) -> int:
        """Return how far its checkpoint is."""
        with contextlib.suppress(OSError):
            return json.loads((self.folder / "state.json").read_text())["log_bytes"]
        return 0

    def processes(self, name: str | None = None) -> list[int]:
        """Return the processes of this start, all or those of a name, the first one too."""
        mark = f"{MARK}={self.run_id}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    comm = (entry / "comm").read_text().strip()
                    if name is None or comm == name:
                        found.append(int(entry.name))
        return found

    def last_words(self) -> str:
        """Return the error with which the program ended."""
        text = (self.folder / "said").read_text(errors="replace").strip()
        return text or f"exit status {self.process.returncode}"


@dataclass
class Findings:
    """What was seen of one kind of kill."""

    hits: int = 0
    missed: int = 0
    """Moments at which no such process was there."""
    went_on: int = 0
    started_again: int = 0
    left: Counter = field(default_factory=Counter)
    """Processes, shared memory, files."""
    said: Counter = field(default_factory=Counter)
    """Last words of programs that ended though they were not hit themselves. A few are allowed: a
    loader starts its engine again a bounded number of times."""
    epochs: int = 0
    missing: int = 0
    twice: int = 0

    @property
    def is_clean(self) -> bool:
        ended = sum(self.said.values())
        return self.hits > ended and not (self.left or self.missing or self.twice)


def waited(is_so: Callable[[], bool]) -> bool:
    """Wait until something is so; return whether it came to that in time."""
    ends_at = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > ends_at:
            return False
        time.sleep(0.01)
    return True


def victims(program: Program, kind: str) -> list[int]:
    return [program.process.pid] if kind == "front" else program.processes(COMM[kind])


def hit(program: Program, kind: str, rng: random.Random, found: Findings) -> None:
    """Kill one process of a kind, and see what becomes of the program."""
    pids = victims(program, kind)
    if not pids:
        found.missed += 1
        return
    steps = program.steps()
    with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(pids), signal.SIGKILL)
    found.hits += 1
    if kind == "front":
        program.process.wait()
    else:
        waited(lambda: not program.is_running or program.steps() > steps)
        if program.is_running and program.steps() > steps:
            found.went_on += 1
            return
        if program.is_running:
            found.left["programs that neither went on nor ended"] += 1
            program.process.kill()
            program.process.wait()
        ended_unhit(program, found)
        return
    found.started_again += 1
    look_for_rest(program, found)


def ended_unhit(program: Program, found: Findings) -> None:
    """Note that the program ended because of a hit that was not its own."""
    words = program.last_words()
    last = re.sub(r"\d+", "N", words.splitlines()[-1])  # numbers of processes differ
    if found.said[last] == 0:
        print(words, file=sys.stderr)
    found.said[last] += 1
    found.started_again += 1
    look_for_rest(program, found)


def look_for_rest(program: Program, found: Findings) -> None:
    """Count what a program that has ended left; take it away, so that it is counted once."""
    if not waited(lambda: not program.processes()):
        for pid in program.processes():
            found.left["processes"] += 1
            os.kill(pid, signal.SIGKILL)
    for name, folder in (("temporary files", program.temporary), ("shared memory", SHARED_MEMORY)):
        for path in set(folder.rglob("*")) - BEFORE:
            found.left[name] += 1
            print(f"  left: {path}", file=sys.stderr)
            path.unlink(missing_ok=True)


BEFORE = set(SHARED_MEMORY.rglob("*"))


def measure(kind: str, options: argparse.Namespace, folder: Path) -> Findings:
    """Hit one kind of process at as many moments as asked, then let the program end and count."""
    rng, found = random.Random(f"{options.seed} {kind}"), Findings()
    program = Program(folder, options.workers)
    try:
        for number in range(MISSES_MAX * options.moments):
            if found.hits == options.moments:
                break
            wait_for_moment(program, rng)
            if program.is_running:
                hit(program, kind, rng, found)
            else:
                ended_unhit(program, found)
            samples = program.steps() // RECORD.itemsize
            progress = f"{kind}: moment {number + 1}, {found.hits} hits, {samples:,} samples"
            print(progress, file=sys.stderr, flush=True)
        (folder / "finish").touch()
        end(program, found)
        kept = set(program.cache.rglob("*"))
        shutil.rmtree(program.cache)
        end(program, found)  # Once more, so that the cache has what an undisturbed run keeps.
        for path in kept - set(program.cache.rglob("*")):
            found.left["files of the cache"] += 1
            print(f"  left: {path.relative_to(program.cache)}", file=sys.stderr)
    finally:
        if program.is_running:
            program.process.kill()
    count(folder / "log", found)
    return found


def wait_for_moment(program: Program, rng: random.Random) -> None:
    """Start the program unless it runs, and wait for a random time; it may end meanwhile."""
    if not program.is_running:
        program.start()
    longest_s = START_S
    if rng.random() < 0.5:
        steps, longest_s = program.steps(), RUN_S
        waited(lambda: not program.is_running or program.steps() > steps)
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.process.wait(timeout=rng.uniform(0, longest_s))


def end(program: Program, found: Findings) -> None:
    """Let the program finish its epoch."""
    if not program.is_running:
        program.start()
    if program.process.wait(timeout=END_S) != 0:
        raise RuntimeError(f"the program did not end well: {program.last_words()}")
    look_for_rest(program, found)


def count(log: Path, found: Findings) -> None:
    """Count samples that an epoch lacks or has twice; all of them are whole by now."""
    records = np.fromfile(log, RECORD)
    for epoch in range(int(records["epoch"].max()) + 1):
        times = np.bincount(records["id"][records["epoch"] == epoch], minlength=NUM_SAMPLES)
        found.epochs += 1
        found.missing += int((times == 0).sum())
        found.twice += int((times > 1).sum())


def own_shared_memory() -> None:
    """Mount a /dev/shm of our own, where that is allowed: others use the machine's meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0:
        return
    libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    if libc.mount(b"tmpfs", bytes(SHARED_MEMORY), b"tmpfs", 0, None) == 0:
        BEFORE.clear()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default="front,engine,worker", help="there is spawner, too")
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--workers", default="processes", help="the Loader's option")
    options = parser.parse_args()
    own_shared_memory()
    rows = {}
    for kind in options.kinds.split(","):
        with tempfile.TemporaryDirectory() as folder:
            rows[kind] = measure(kind, options, Path(folder))
    print(
        "| killed | hits | not there | went on | started again | left | epochs | missing | twice |"
    )
    print(f"|---|{'---:|' * 8}")
    for kind, found in rows.items():
        left = ", ".join(f"{number} {name}" for name, number in found.left.items()) or "nothing"
        print(
            f"| {kind} | {found.hits} | {found.missed} | {found.went_on} | {found.started_again} "
            f"| {left} | {found.epochs} | {found.missing} | {found.twice} |"
        )
        for words, times in found.said.items():
            print(f"  {kind}: ended {times} times with {words}", file=sys.stderr)
    return 0 if all(found.is_clean for found in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
