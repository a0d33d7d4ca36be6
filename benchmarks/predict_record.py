"""Records the runs of `predict_runs`: each case as a traced job on a shaped store."""

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks.predict_cases import PENSTOCK, TORCH, Case
from penstock.testing.shaper import Shape, Shaper

TIMEOUT_S = 180
NUM_SHARDS = 4


def write_objects(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(TORCH["num_samples"]):
        (folder / f"{number:06}.bin").write_bytes(rng.bytes(TORCH["sample_bytes"]))


def write_shards(folder: Path) -> None:
    # Other bytes every time: tiers that a killed run left behind must not know them.
    rng = np.random.default_rng()
    sizes = shard_sizes()
    for shard in range(NUM_SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for i, size in enumerate(sizes[shard::NUM_SHARDS].tolist()):
                member = tarfile.TarInfo(f"{shard}-{i:05}.bin")
                member.size = size
                archive.addfile(member, io.BytesIO(rng.bytes(size)))


def shard_sizes() -> np.ndarray:
    rng = np.random.default_rng(2)
    mean = PENSTOCK["sample_bytes"]
    return rng.integers(int(0.6 * mean), int(1.4 * mean), PENSTOCK["num_samples"])


def record(cases: list[Case], out: Path, rounds: int) -> None:
    """Run all cases, round by round, each into a folder of its own; what is there is kept."""
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        (root / "objects").mkdir()
        (root / "shards").mkdir()
        write_objects(root / "objects")
        write_shards(root / "shards")
        with (
            Shaper.of_folder(root / "objects", Shape()) as objects,
            Shaper.of_folder(root / "shards", Shape()) as shards,
        ):
            _warm(shards, root)
            for turn in range(rounds):
                for case in cases:
                    folder = out / f"{case.name}.{turn}"
                    if not (folder / "load.json").exists():
                        shaper = shards if case.base == "penstock" else objects
                        _run(case, shaper, folder, root)


def _warm(shards: Shaper, root: Path) -> None:
    """Make the index of the shards once: the runs are about reading, not about indexing."""
    import penstock

    os.environ["PENSTOCK_CACHE"] = str(root / "cache")
    penstock.open(shards.uri, store=shards.options)


def _run(case: Case, shaper: Shaper, folder: Path, root: Path) -> None:
    task = case.task | {"trace": str(folder), "sample_sd_bytes": 0.0}
    if case.base == "penstock":
        sizes = shard_sizes()
        task |= {
            "uri": shaper.uri,
            "options": {"endpoint": shaper.options.endpoint, "anonymous": True},
            "cache_bytes": int(task["cache"] * sizes.sum()),
            "sample_bytes": float(sizes.mean()),
            "sample_sd_bytes": float(sizes.std()),
        }
    else:
        host, port = shaper.endpoint.removeprefix("http://").split(":")
        task |= {"host": host, "port": int(port), "path": "/data"}
    shaper.reshape(case.shape)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    path = root / "task.json"
    path.write_text(json.dumps(task))
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.predict_job", str(path)],
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
