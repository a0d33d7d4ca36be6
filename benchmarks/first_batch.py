"""How soon does the first batch come?

    python -m benchmarks.first_batch [--rounds 5] [--loaders ours,fork,spawn] [--json F]

Each number is the median of fresh processes, which take turns. A process has imported torch and
Penstock and opened its data (82 MB of rows in .npy) before the clock starts; the clock stops when
the first batch of 256 was handed over and read. `second` is a second loader of the same process,
made while the first still runs.

`imports` is the time of a fresh interpreter that imports what the transform uses: no loader with
worker processes that start anew can be sooner. `fork` and `spawn` are torch's DataLoader with two
workers started that way; a forked worker has the imports of its parent.

Bytecode of modules is written and used, as it is wherever a package was installed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.loops import touch

NUM_ROWS, ROW_LENGTH, BATCH_SIZE = 20_000, 1024, 256
IMPORTS = {"none": "pass", "lambda": "pass", "torch": "import torch"}
"""What a transform needs, by its name."""
NAMES = "from penstock import Loader, open"
FRESH = ("pass", "import numpy", "import penstock", NAMES, "import torch")
LOADERS = ("ours", "fork", "spawn")
TIMEOUT_S = 120


def flipped(sample: dict) -> dict:
    import torch

    return {name: torch.from_numpy(np.array(value)).flip(0) for name, value in sample.items()}


TRANSFORMS: dict[str, Callable[[dict], dict] | None] = {
    "none": None,
    "lambda": lambda sample: sample,
    "torch": flipped,
}


class Rows:
    """What torch's DataLoader reads: the same rows, and the same transform."""

    def __init__(self, path: str, name: str) -> None:
        self.rows = np.load(path, mmap_mode="r")
        self.transform = TRANSFORMS[name]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        sample = {"data": np.array(self.rows[index])}
        return sample if self.transform is None else self.transform(sample)


def ours_of(path: str, transform: str) -> Callable[[], object]:
    import penstock
    from penstock import Loader  # Names are imported when they are used: not on the clock.

    dataset = penstock.open(path)
    return lambda: Loader(dataset, batch_size=BATCH_SIZE, seed=7, transform=TRANSFORMS[transform])


def torch_of(path: str, transform: str, start: str) -> Callable[[], object]:
    import torch.utils.data

    dataset = Rows(path, transform)
    return lambda: torch.utils.data.DataLoader(
        dataset, batch_size=BATCH_SIZE, shuffle=True, num_workers=2, multiprocessing_context=start
    )


def one_process(loader: str, transform: str, path: str) -> dict[str, float]:
    """Return seconds to the first batch of the first and the second loader of this process."""
    import torch  # noqa: F401 - the training process has it

    make = ours_of(path, transform) if loader == "ours" else torch_of(path, transform, loader)
    found, kept = {}, []
    for which in ("first", "second"):
        begin = time.perf_counter()
        batches = iter(make())
        touch(dict(next(batches)))
        found[which] = time.perf_counter() - begin
        kept.append(batches)
    return found


# -- the table ---------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def seconds_of(code: str) -> float:
    """Return how long a fresh interpreter takes to run something."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(), timeout=TIMEOUT_S)
    return time.perf_counter() - begin


def measured(loader: str, transform: str, path: Path) -> dict[str, float]:
    """Return what a fresh process has measured; nothing where it fails."""
    command = [sys.executable, "-m", "benchmarks.first_batch"]
    done = subprocess.run(
        [*command, "--one", loader, transform, str(path)],
        env=environment(),
        check=False,
        capture_output=True,
        timeout=TIMEOUT_S,
    )
    return json.loads(done.stdout) if done.returncode == 0 else {}


def rounds_of(options: argparse.Namespace, path: Path) -> dict[str, float]:
    """Return the medians of everything, by name."""
    found: dict[str, list[float]] = {}

    def add(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    for number in range(options.rounds + 1):
        for code in FRESH:
            seconds = seconds_of(code)
            if number:  # The first round writes bytecode, and warms the page cache.
                add(code, seconds)
        for transform in IMPORTS:
            for loader in options.loaders.split(","):
                for which, seconds in measured(loader, transform, path).items():
                    if number:
                        add(f"{loader} {transform} {which}", seconds)
    return {name: statistics.median(values) for name, values in found.items()}


def show(found: dict[str, float], loaders: list[str]) -> None:
    cores = len(os.sched_getaffinity(0))
    print(f"seconds to the first batch, {cores} cores\n")
    print("| transform | loader | first | second | imports | first - imports |")
    print("|---|---|---:|---:|---:|---:|")
    for transform, code in IMPORTS.items():
        for loader in loaders:
            first = found.get(f"{loader} {transform} first")
            if first is None:
                print(f"| {transform} | {loader} | fails | | | |")
                continue
            second, imports = found[f"{loader} {transform} second"], found[code]
            numbers = " | ".join(f"{s:.2f}" for s in (first, second, imports, first - imports))
            print(f"| {transform} | {loader} | {numbers} |")
    print("\n| a fresh interpreter | s |\n|---|---:|")
    for code in FRESH:
        print(f"| `{code}` | {found[code]:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loaders", default=",".join(LOADERS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one_process(*options.one)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.npy"
        np.save(path, np.zeros((NUM_ROWS, ROW_LENGTH), np.int32))
        found = rounds_of(options, path)
    show(found, options.loaders.split(","))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
