"""Makes the three runs of the gallery in docs/guides/reports.md, their reports and pictures.

    python tools/gallery.py RUNS [--only torch,cold,nodes] [--pictures docs/images]

`torch` is examples/torch_images.py under `penstock trace`; `cold` is Penstock on a store with 20 ms
latency and 100 MB/s behind an empty disk tier; `nodes` is Penstock on four nodes that are network
namespaces (needs root). A run whose folder is there already is not made again.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cluster_job import Task, TracedJob
from benchmarks.cluster_site import open_site
from testkit.browser import Browser, why_no_browser
from testkit.network import Link
from testkit.network_job import Launch
from testkit.shaper import Fixed, Shape, Shaper

import penstock

ROOT = Path(__file__).resolve().parents[1]
COLOURS = 64
WIDTH, HEIGHT = 900, 100
SECTIONS: dict[str, dict[str, str]] = {
    "torch": {
        "verdict": "Verdict,What to change",
        "time": "Where a step's time goes",
        "access": "Access pattern",
    },
    "cold": {"verdict": "Verdict,What to change", "sources": "Sources", "cache": "Cache"},
    "nodes": {"verdict": "Verdict,What to change", "ranks": "Ranks", "sources": "Sources"},
}
"""Of each run: names of pictures, and the sections of the report that they show."""


def run_torch(folder: Path) -> None:
    """Trace a job that knows nothing of Penstock."""
    job = [sys.executable, str(ROOT / "examples" / "torch_images.py"), str(folder.parent / "jpeg")]
    subprocess.run([*job, "--epochs", "0"], check=True)
    trace = [sys.executable, "-m", "penstock", "trace", "--out", str(folder)]
    subprocess.run([*trace, "--", *job], check=True)


def run_cold(folder: Path) -> None:
    """Read from a far store through a disk tier that is empty at first."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as scratch:
        shards, tier = Path(scratch, "shards"), Path(scratch, "tier")
        tier.mkdir()
        with penstock.Writer(shards, shard_size="16MB") as writer:
            for number in range(3000):
                writer.write({"bin": rng.bytes(100_000), "cls": number % 10})
        far = Shape(latency=Fixed(0.020), bandwidth_bytes_s=100e6)
        with Shaper.of_folder(shards, far) as shaper:
            dataset = penstock.open(shaper.uri, store=shaper.options, check=False)
            with penstock.Loader(
                dataset,
                batch_size=50,
                epochs=3,
                seed=7,
                tiers=[penstock.Disk(tier, "240MB")],
                output="numpy",
                trace=folder,
            ) as loader:
                for _ in loader:
                    time.sleep(0.03)


def run_nodes(folder: Path) -> None:
    """Train on four nodes, with a link of 1 Gbit/s to the store and 10 Gbit/s between them."""
    links = {f"n{number}": Link(rate="10gbit") for number in range(4)}
    with (
        tempfile.TemporaryDirectory() as scratch,
        open_site(
            links, num_samples=3000, sample_bytes=100_000, store_rate="1gbit", shard_size="16MB"
        ) as site,
    ):
        task = Task(
            uri=site.uri,
            endpoint=site.store.access.endpoint,
            folder=scratch,
            global_batch_size=64,
            epochs=3,
            step_s=0.05,
            is_lockstep=True,
            threads=1,
            look_ahead="64MB",
            disk=int(0.3 * site.size_bytes),
            options={"peers": True, "trace": str(folder)},
            verify=False,
        )
        with TracedJob(task, site.nodes, Launch(by="torchrun")) as job:
            job.wait(timeout_s=300)


RUNS: dict[str, Callable[[Path], None]] = {
    "torch": run_torch,
    "cold": run_cold,
    "nodes": run_nodes,
}


def main() -> None:
    """Make runs, reports and pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--only", type=lambda names: names.split(","), default=list(RUNS))
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs" / "images")
    args = parser.parse_args()
    if why_no_browser():
        sys.exit(why_no_browser())
    args.runs.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        folder = (args.runs / name).resolve()
        if not folder.exists():
            _made(RUNS[name], folder)
        report = [sys.executable, "-m", "penstock", "report", str(folder)]
        subprocess.run(report, check=True)
        with tempfile.TemporaryDirectory() as scratch, Browser(Path(scratch)) as browser:
            for part, titles in SECTIONS[name].items():
                picture = args.pictures / f"report_{name}_{part}.png"
                take(browser, folder / "report.html", titles.split(","), picture)


def _made(make: Callable[[Path], None], folder: Path) -> None:
    """Make a run; one that fails leaves nothing that would pass for a run."""
    try:
        make(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def take(browser: Browser, page: Path, titles: list[str], picture: Path) -> None:
    """Save some sections of a page as a picture."""
    text = page.read_text(encoding="utf-8")
    browser.look(width=WIDTH, height=HEIGHT)
    browser.show(text, text.count('class="chart"'))
    browser.keep_sections(titles)
    browser.picture(picture)
    Image.open(picture).convert("RGB").quantize(COLOURS).save(picture, optimize=True)
    sys.stdout.write(f"{picture}: {picture.stat().st_size / 1000:.0f} kB\n")


if __name__ == "__main__":
    main()
