"""Records the runs of `predict_runs`: each case as a traced job on a shaped store."""

import io
import itertools
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np
from testkit.shaper import Shape, Shaper

from benchmarks.predict_cases import PENSTOCK, TORCH, Case
from benchmarks.predict_links import linked_nodes

TIMEOUT_S = 180
NUM_SHARDS = 4
SHARED_MEMORY = "/dev/shm"


def write_objects(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(TORCH["num_samples"]):
        (folder / f"{number:06}.bin").write_bytes(rng.bytes(TORCH["sample_bytes"]))


def write_shards(folder: Path, num_samples: int) -> None:
    # Other bytes every time: tiers that a killed run left behind must not know them.
    rng = np.random.default_rng()
    sizes = shard_sizes(num_samples)
    for shard in range(NUM_SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for i, size in enumerate(sizes[shard::NUM_SHARDS].tolist()):
                member = tarfile.TarInfo(f"{shard}-{i:05}.bin")
                member.size = size
                archive.addfile(member, io.BytesIO(rng.bytes(size)))


def shard_sizes(num_samples: int) -> np.ndarray:
    """Return sizes of samples; those of a larger set have the same mean and spread."""
    rng = np.random.default_rng(2)
    mean = PENSTOCK["sample_bytes"]
    sizes = rng.integers(int(0.6 * mean), int(1.4 * mean), PENSTOCK["num_samples"])
    return np.resize(sizes, num_samples)


def dataset_bytes(task: dict) -> int:
    return int(shard_sizes(task["num_samples"]).sum())


class Site:
    """Stores on loopback for runs, made when the first run wants them."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self._root, self._stack = root, stack
        self._shapers: dict[str, Shaper] = {}

    def data_of(self, case: Case) -> Path:
        """Return the folder that the store serves."""
        return self._root / self._name(case)

    def _name(self, case: Case) -> str:
        return f"shards-{case.task['num_samples']}" if case.base == "penstock" else "objects"

    def shaper_of(self, case: Case) -> Shaper:
        """Return the store that has the data of a case."""
        name, is_shards = self._name(case), case.base == "penstock"
        os.environ["PENSTOCK_CACHE"] = str(self._root / f"index-of-{name}")
        if name not in self._shapers:
            folder = self.data_of(case)
            folder.mkdir()
            if is_shards:
                write_shards(folder, case.task["num_samples"])
            else:
                write_objects(folder)
            shaper = self._stack.enter_context(Shaper.of_folder(folder, Shape()))
            self._shapers[name] = shaper
            if is_shards:
                _make_index(shaper)
        return self._shapers[name]


def _make_index(shards: Shaper) -> None:
    """Make the index of the shards once: the runs are about reading, not about indexing."""
    import penstock

    penstock.open(shards.uri, store=shards.options)


def record(cases: list[Case], out: Path, rounds: int) -> None:
    """Run all cases, round by round, each into a folder of its own; what is there is kept."""
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        site = Site(Path(root), stack)
        for turn, case in itertools.product(range(rounds), cases):
            folder = out / f"{case.name}.{turn}"
            if not (folder / "load.json").exists():
                record_one(case, site, folder)


def record_one(case: Case, site: Site, folder: Path) -> None:
    """Run a case; its tiers are empty at first and gone afterwards."""
    shaper = site.shaper_of(case)
    with (
        tempfile.TemporaryDirectory() as tiers,
        tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as memory,
    ):
        task = _task(case, shaper) | {"trace": str(folder), "tiers": tiers, "memory": memory}
        shaper.reshape(case.shape)
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        path = Path(tiers) / "task.json"
        with ExitStack() as stack:
            if task.get("link_bytes_s"):
                task |= stack.enter_context(linked_nodes(case, site.data_of(case)))
            path.write_text(json.dumps(task))
            _run(case, path, folder)


def _task(case: Case, shaper: Shaper) -> dict:
    task = case.task | {"sample_sd_bytes": 0.0}
    if case.base == "penstock":
        sizes = shard_sizes(task["num_samples"])
        return task | {
            "uri": shaper.uri,
            "options": {"endpoint": shaper.options.endpoint, "anonymous": True},
            "cache_bytes": int(task["cache"] * sizes.sum()),
            "disk_bytes": int(task["disk"] * sizes.sum()),
            "sample_bytes": float(sizes.mean()),
            "sample_sd_bytes": float(sizes.std()),
        }
    host, port = shaper.endpoint.removeprefix("http://").split(":")
    return task | {"host": host, "port": int(port), "path": "/data"}


def _run(case: Case, task: Path, folder: Path) -> None:
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.predict_job", str(task)],
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - begin
    if done.returncode:
        print(f"{case.name} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
        return
    load = os.getloadavg()[0]
    facts = {"load": load, "case": asdict(case), "seconds": seconds}
    (folder / "load.json").write_text(json.dumps(facts))
    print(f"{case.name}: {seconds:.1f} s, load {load:.1f}", file=sys.stderr, flush=True)
