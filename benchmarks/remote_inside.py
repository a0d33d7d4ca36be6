"""What runs in the environment of a loader of the remote set: read epochs, write down every step.

    python -m benchmarks.remote_inside '{"mode": "read", "peer": "mosaic", "uri": ...}'

The answer goes into a file of the task's scratch folder. At its marks (opened, epoch over) the
process waits for its caller, who counts at the store what was read up to there.
"""

import importlib
import json
import os
import sys
import time
from itertools import chain
from multiprocessing.connection import Client, Connection
from pathlib import Path

import numpy as np

from benchmarks import look, loops, tree
from benchmarks.inside import about
from benchmarks.peers_remote import Opened, Unsupported
from benchmarks.remote import WORK, open_source, write_own
from benchmarks.works import Ragged

CPU_FIELDS = slice(tree.UTIME, tree.UTIME + 4)
"""Own and waited-for children's time, user and system."""


class Run:
    """Epochs of one loader, step by step."""

    def __init__(self, task: dict, opened: Opened) -> None:
        self.task, self.opened = task, opened
        self.source = open_source(Path(task["root"])) if task["check"] else None
        self.steps: list[tuple[float, float, float]] = []
        """For each batch: when it was asked for, when it came, when the step was over."""
        self.epochs: list[list[np.ndarray]] = []
        self.num_wrong = 0
        self.private_peak_bytes = 0

    def epoch(self, number: int, asked: float) -> float:
        """Train one epoch; return when its last step was over."""
        ids: list[np.ndarray] = []
        self.epochs.append(ids)
        for batch in self.opened.start(number):
            got = time.perf_counter()
            loops.touch(batch)
            ids.append(look.ids_of(WORK, batch))
            if self.source is not None:
                self.num_wrong += differing(ids[-1], batch, self.source)
            private = tree.memory_bytes(tree.descendants())["private_bytes"]
            self.private_peak_bytes = max(self.private_peak_bytes, private)
            # Reading and looking take from the step's own time.
            step_s = self.task["step_s"] * len(ids[-1]) / WORK.batch_size
            time.sleep(max(0.0, got + step_s - time.perf_counter()))
            del batch  # else giving it back would count as waiting for the next one
            self.steps.append((asked, got, time.perf_counter()))
            asked = self.steps[-1][2]
        return asked

    def answer(self) -> dict:
        ids = [np.concatenate(batches) for batches in self.epochs]
        return {
            "steps": self.steps,
            "epoch_steps": [len(batches) for batches in self.epochs],
            "epoch_samples": [len(of) for of in ids],
            "epoch_distinct": [len(np.unique(of)) for of in ids],
            "mixing": look.mixing(list(chain.from_iterable(self.epochs)), WORK.num_samples),
            "wrong": self.num_wrong,
            "private_peak_bytes": self.private_peak_bytes,
        }


def differing(ids: np.ndarray, batch: object, source: Ragged) -> int:
    """Return how many samples differ from their source in any byte."""
    got = look.samples_of(WORK, batch)
    return sum(not np.array_equal(data, source[i]) for i, data in zip(ids, got, strict=True))


def read(task: dict) -> dict:
    """Read all epochs with the loader of a task."""
    module = importlib.import_module(f"benchmarks.peers_remote.{task['peer']}")
    start = {"start_rss_bytes": tree.memory_bytes([])["peak_rss_bytes"]}
    start["start_private_bytes"] = tree.memory_bytes([])["private_bytes"]
    cpu_at = time.process_time()
    with Client(task["marks"]) as caller:
        opens_at = time.perf_counter()
        opened = module.open_loader(task)
        mark(caller)
        run = Run(task, opened)
        asked = time.perf_counter()
        for number in range(task["epochs"]):
            run.epoch(number, asked)
            mark(caller)
            asked = run.steps[-1][2]
    children = tree.descendants()
    spent = {"cpu_s": time.process_time() - cpu_at + children_s(children)}
    spent |= {"peak_rss_bytes": tree.memory_bytes(children)["peak_rss_bytes"]}
    first_at = run.steps[0][1]
    return (
        start
        | run.answer()
        | spent
        | {
            "first_batch_s": first_at - opens_at,
            "process_first_batch_s": time.time() - task["started_at"] - age(first_at),
            "own": opened.close(),
        }
        | about(task)
    )


def age(moment: float) -> float:
    return time.perf_counter() - moment


def mark(caller: Connection) -> None:
    caller.send(True)
    caller.recv()


def children_s(children: list[int]) -> float:
    """Return the CPU seconds of processes below this one, and of those that it has waited for."""
    stats = [stat for pid in children if (stat := tree.stat_of(pid))]
    ticks = sum(int(field) for stat in stats for field in stat[CPU_FIELDS])
    waited = os.times()
    return ticks / tree.TICKS_PER_S + waited.children_user + waited.children_system


def write(task: dict) -> dict:
    """Write a format into a folder that is there and empty."""
    root, folder = Path(task["root"]), Path(task["folder"])
    if task["peer"] == "ours":
        write_own(root, task["format"], folder)
    else:
        module = importlib.import_module(f"benchmarks.peers_remote.{task['peer']}")
        module.write(open_source(root), folder)
    return {}


def index(task: dict) -> dict:
    """Make the index that the formats of others are written with."""
    importlib.import_module(f"benchmarks.peers_remote.{task['peer']}").open_dataset(task)
    return {}


def rest(task: dict) -> dict:
    """Do the steps without a loader: what no input at all takes."""
    began = time.perf_counter()
    for _ in range(task["num_steps"]):
        time.sleep(task["step_s"])
    return {"seconds": age(began)}


MODES = {"read": read, "write": write, "index": index, "rest": rest}


def main() -> None:
    task = json.loads(sys.argv[1])
    try:
        answer = MODES[task["mode"]](task)
    except Unsupported as error:
        answer = {"failed": str(error)}
    Path(task["scratch"], "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
