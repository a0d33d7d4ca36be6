"""What does a trace cost the fastest loops?

    python -m benchmarks.trace_overhead [--rounds 15] [--gigabytes 4] [--works tokens,blobs]
                                        [--workers here,4]

A loop that reads a byte of every page of its batches, traced and not traced in turns, each pair of
runs in random order. Printed: microseconds a batch (median of all rounds), processor time of all
processes a batch, and the ratio traced / not traced with a 90 % interval (bootstrap over pairs).
Tokens are rows of 2 kB from a mapped array, 256 a batch; blobs are about 110 kB, 64 a batch. Both
are in the page cache. The first batches, for which processes start and parameters are recorded, do
not count. Runs should take several seconds: counters of the machine are sampled once a second.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import penstock
from benchmarks.loops import touch

SEED = 7
NUM_TOKENS, ROW_LENGTH = 100_000, 512
NUM_BLOBS = 2_048
RESAMPLES = 2_000
NUM_FIRST = 200
Run = tuple[float, float]
"""Wall and processor seconds a batch."""


def write_tokens(folder: Path) -> Any:
    rng = np.random.default_rng(SEED)
    rows = rng.integers(0, 50_257, (NUM_TOKENS, ROW_LENGTH), dtype=np.int32)
    np.save(folder / "tokens.npy", rows)
    return penstock.open(folder / "tokens.npy"), 256


def write_blobs(folder: Path) -> Any:
    rng = np.random.default_rng(SEED)
    with penstock.Writer(folder / "blobs", shard_size="64MB") as writer:
        for _ in range(NUM_BLOBS):
            writer.write({"bin": rng.bytes(int(np.clip(rng.gamma(9, 12_222), 20_000, 400_000)))})
    return penstock.open(folder / "blobs"), 64


WORKS = {"tokens": write_tokens, "blobs": write_blobs}


def family(root: int) -> list[int]:
    """Return a process and all that descend from it."""
    parents = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdecimal():
            try:
                text = Path(f"/proc/{name}/stat").read_text()
            except OSError:
                continue
            parents[int(name)] = int(text.rpartition(")")[2].split()[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def cpu_s(pids: list[int]) -> float:
    """Return the processor time of processes so far, which Linux has a clock of each for."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


def measured(dataset: Any, batch_size: int, trace: Path | None, args: dict[str, Any]) -> Run:
    """Take some batches."""
    count = args.pop("count")
    with penstock.Loader(
        dataset, batch_size=batch_size, epochs=None, output="numpy", trace=trace, **args
    ) as loader:
        batches = iter(loader)
        for _ in range(NUM_FIRST):  # Until all processes are there.
            next(batches)
        pids = family(os.getpid())
        begin_s, begin_cpu_s = time.perf_counter(), cpu_s(pids)
        for _ in range(count):
            touch(next(batches))
        return (time.perf_counter() - begin_s) / count, (cpu_s(pids) - begin_cpu_s) / count


def ratio(pairs: list[tuple[Run, Run]], which: int) -> tuple[float, float, float]:
    """Return traced / not traced, and a 90 % interval."""
    draw = random.Random(SEED)

    def of(some: list[tuple[Run, Run]]) -> float:
        on = statistics.median(pair[1][which] for pair in some)
        return on / statistics.median(pair[0][which] for pair in some)

    drawn = sorted(of(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return of(pairs), drawn[RESAMPLES // 20], drawn[-RESAMPLES // 20]


def compare(name: str, workers: str, folder: Path, args: argparse.Namespace) -> None:
    dataset, batch_size = WORKS[name](folder)
    batch_bytes = dataset.size_bytes / len(dataset) * batch_size
    number = int(workers) if workers.isdecimal() else workers
    options = {"workers": number, "seed": SEED, "count": int(args.gigabytes * 1e9 / batch_bytes)}
    draw = random.Random(SEED)
    pairs: list[tuple[Run, Run]] = []
    for number in range(-1, args.rounds):
        kinds: list[tuple[bool, Callable[[], Path | None]]] = [
            (False, lambda: None),
            (True, lambda number=number: folder / f"run{number}"),  # type: ignore[misc]
        ]
        draw.shuffle(kinds)
        found = {on: measured(dataset, batch_size, path(), dict(options)) for on, path in kinds}
        if number >= 0:  # The round before warms everything up.
            pairs.append((found[False], found[True]))
    for which, what in enumerate(("wall", "processor")):
        off, on = (1e6 * statistics.median(pair[i][which] for pair in pairs) for i in range(2))
        best, low, high = ratio(pairs, which)
        print(
            f"{name:7} {workers:10} {what:10} off {off:8.1f} us  on {on:8.1f} us  "
            f"ratio {best:.4f} ({low:.4f} to {high:.4f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="read in each run")
    parser.add_argument("--works", default="tokens,blobs")
    parser.add_argument(
        "--workers", default="here,4", help="a number, so that all runs have as many"
    )
    args = parser.parse_args()
    for name in args.works.split(","):
        for workers in args.workers.split(","):
            with tempfile.TemporaryDirectory() as folder:
                os.environ["PENSTOCK_CACHE"] = f"{folder}/cache"
                compare(name, workers, Path(folder), args)


if __name__ == "__main__":
    main()
