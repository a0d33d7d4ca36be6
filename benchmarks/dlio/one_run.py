"""One run of DLIO: a workload, a way to load it, a store; and what came out of it."""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

from benchmarks.dlio.store import forget, limited, warm
from penstock.loader.dlio.ledger import read_ledgers

ROOT = Path(__file__).resolve().parents[2]
CONF = Path(__file__).parent / "conf"
WAYS = {
    "no data": {
        "data_loader_classname": "benchmarks.dlio.control.NoDataLoader",
        "data_loader_sampler": "index",
    },
    "DLIO torch": {},
    "DLIO torch, mended": {"reader_classname": "benchmarks.dlio.control.MendedReader"},
    "Penstock": {
        "data_loader_classname": "penstock.loader.dlio.loader.PenstockDataLoader",
        "data_loader_sampler": "index",
    },
    "DLIO torch, our reader": {"reader_classname": "penstock.loader.dlio.reader.PenstockReader"},
}
TIME_LIMIT_S = 600


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A workload file, and where its data lies."""

    name: str
    folder: Path

    @property
    def conf(self) -> dict:
        conf = OmegaConf.load(CONF / "workload" / f"scaled_{self.name}.yaml")
        return OmegaConf.to_container(conf)

    @property
    def files(self) -> list[Path]:
        """All samples, in DLIO's numbering."""
        return sorted((self.folder / "train").glob("*." + self.conf["dataset"]["format"]))

    @property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    def demand(self, ranks: int) -> float:
        """Return the bytes a second that accelerators would use if they never waited."""
        samples_per_s = self.conf["reader"]["batch_size"] / self.conf["train"]["computation_time"]
        return ranks * samples_per_s * self.size_bytes / len(self.files)

    def generate(self) -> None:
        if len(self.files) != self.conf["dataset"]["num_files_train"]:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            with tempfile.TemporaryDirectory() as output:
                workflow = {"workflow.generate_data": True, "workflow.train": False}
                call(self, Path(output), workflow, ranks=1, limit=None)


def call(workload: Workload, output: Path, changes: dict, *, ranks: int, limit) -> None:
    """Run DLIO with changes to the workload's file; raise with its last lines if it fails."""
    changes = {"dataset.data_folder": workload.folder, "output.folder": output} | changes
    command = [sys.executable, "-m", "penstock.loader.dlio", f"--config-dir={CONF}"]
    command += [f"workload=scaled_{workload.name}", f"hydra.run.dir={output}"]
    command += [f"++workload.{key}={value}" for key, value in changes.items()]
    if ranks > 1:
        # Ranks that wait in a barrier must leave the cores to their workers.
        flags = ["--allow-run-as-root", "--bind-to", "none", "--oversubscribe"]
        flags += ["--mca", "mpi_yield_when_idle", "1"]
        command = [str(Path(sys.executable).parent / "mpirun"), *flags, "-np", str(ranks), *command]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        limit.inside(command) if limit else command,
        cwd=output,  # DLIO makes a folder for checkpoints where it runs
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"DLIO returned {done.returncode}:\n{done.stderr[-4000:]}")


def measure(
    workload: Workload, way: str, *, ranks: int, epochs: int, bytes_per_s: float | None
) -> dict:
    """Return what DLIO and the ledgers say of one run; a limit means an empty page cache, too."""
    (forget if bytes_per_s else warm)(workload.files)
    changes = {f"reader.{key}": value for key, value in WAYS[way].items()}
    with (
        tempfile.TemporaryDirectory() as output,
        limited(workload.folder, bytes_per_s) as limit,
    ):
        before = cpu_s(), time.perf_counter()
        call(workload, Path(output), changes | {"train.epochs": epochs}, ranks=ranks, limit=limit)
        others = (cpu_s() - before[0]) / (time.perf_counter() - before[1]) / (os.cpu_count() or 1)
        check_ledgers(workload, way, Path(output), epochs)
        served = limit.served_bytes / workload.size_bytes / epochs if limit else None
        told = outcome(Path(output), ranks)
        step_samples = ranks * workload.conf["reader"]["batch_size"]
        steps_per_s = told["samples_per_s"] / step_samples
        whole = 100 * steps_per_s * workload.conf["train"]["computation_time"]
        return told | {"whole": whole, "served": served, "others": others}


def cpu_s() -> float:
    """Return the processor time that all programs but the children of this one have used."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _idle, _wait, irq, soft_irq, _stolen = map(int, fields)
    all_s = (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return all_s - children.ru_utime - children.ru_stime


def outcome(output: Path, ranks: int) -> dict:
    """Return DLIO's utilisation and rate, and the waits of all steps but the first of an epoch."""
    metric = json.loads((output / "summary.json").read_text())["metric"]
    stalls = []
    for rank in range(ranks):
        told = json.loads((output / f"{rank}_output.json").read_text())
        epochs = [value for key, value in told.items() if key.isdigit()]
        stalls += [wait for epoch in epochs for wait in epoch["load"]["block1"][1:]]
    p50, p99 = np.percentile(stalls, [50, 99]) * 1e3
    return {
        "au": metric["train_au_mean_percentage"],
        "samples_per_s": metric["train_throughput_mean_samples_per_second"],
        "stall_p50_ms": p50,
        "stall_p99_ms": p99,
    }


def check_ledgers(workload: Workload, way: str, output: Path, epochs: int) -> None:
    """Raise unless the named way ran, and has read each sample once in each epoch, all of it."""
    loader, reader = (read_ledgers(output, f"{kind}_train") for kind in ("loader", "reader"))
    found = {"Penstock": loader, "DLIO torch, our reader": reader}.get(way, [])
    if len(loader) + len(reader) != len(found):
        raise RuntimeError(f"{way!r} was to run, but another loader of ours has left a ledger")
    if way not in ("Penstock", "DLIO torch, our reader"):
        return
    sizes = [path.stat().st_size for path in workload.files]
    conf = workload.conf["reader"]
    if len(sizes) % conf["batch_size"]:
        raise RuntimeError("an epoch of this workload is not a whole number of batches")
    expected = sorted((i, size) for i, size in enumerate(sizes))
    by_epoch: dict[int, list[tuple[int, int]]] = {}
    for entry in found:
        pairs = zip(entry.ids, entry.sizes_bytes, strict=True)
        by_epoch.setdefault(entry.epoch, []).extend(pairs)
    # A reader is not told the epoch, so its epochs are counted together.
    times = epochs if way == "DLIO torch, our reader" else 1
    for epoch, pairs in by_epoch.items():
        if sorted(pairs) != sorted(expected * times):
            raise RuntimeError(f"{way!r}: epoch {epoch} has not read each sample once, all of it")
    if len(by_epoch) != (1 if times > 1 else epochs):
        raise RuntimeError(f"{way!r}: {len(by_epoch)} epochs in the ledger, not {epochs}")
