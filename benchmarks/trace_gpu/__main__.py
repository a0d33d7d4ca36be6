"""Does `penstock trace` name what keeps a GPU waiting, in one command?

    python -m benchmarks.trace_gpu FOLDER_OF_JPEGS [--steps 120] [--out FOLDER]
    python -m benchmarks.trace_gpu FOLDER_OF_JPEGS --device cpu --quick     # does it work?

ResNet-50 in bf16 is trained from JPEG files by torch's DataLoader, by Penstock's threads inside the
training process, and by Penstock's processes; each with and without `penstock trace`, in turn. It
prints images/s of both and the verdict. On 16 cores the first should be limited by decoding, the
second by the interpreter's lock, and the third by the GPU.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.gpu_cases import QUICK, Sizes, write_images
from benchmarks.peers.setup import ROOT

FEEDS = ("resident", "torch", "threads", "processes")


def rate_of(command: list[str]) -> float:
    """Run a training script; return its images a second."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    found = re.search(r"images/s: (\d+)", done.stdout)
    if done.returncode or found is None:
        sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jpegs", type=Path)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--images", type=int, default=24_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default=",".join(FEEDS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        data, out = Path(scratch), given.out or Path(scratch) / "runs"
        write_images(given.jpegs, data, QUICK if given.quick else Sizes(images=given.images))
        for feed in given.only.split(","):
            train = [sys.executable, "-m", "benchmarks.trace_gpu.train", str(data), "--feed", feed]
            train += ["--device", given.device, "--steps", str(given.steps)]
            train += ["--workers", str(given.workers)] + ["--quick"] * given.quick
            plain, traced = [], []
            for number in range(given.rounds):
                run = out / f"{feed}-{number}"
                traced.append(rate_of([sys.executable, "-m", "penstock", "trace", "--out", str(run),
                                       "--", *train]))  # fmt: skip
                plain.append(rate_of(train))
            print(
                f"\n{feed}: {median(plain):,.0f} images/s, traced {median(traced):,.0f} "
                f"({median(traced) / median(plain):.3f})"
            )
            if feed != "resident":
                show(out / f"{feed}-0")


def show(run: Path) -> None:
    from penstock.report.analysis.analyze import analyze
    from penstock.report.pages.text import verdict_text
    from penstock.trace import read_trace

    analysis = analyze(read_trace(run))
    print(verdict_text(analysis))
    print(json.dumps({"run": run.name, "cause": analysis.verdict.cause}))


if __name__ == "__main__":
    main()
