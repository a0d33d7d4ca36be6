"""What `penstock trace` costs a torch DataLoader job, in CPU seconds of all its processes.

    python -m benchmarks.trace_foreign [--rounds 7] [--files 6000] [--epochs 4]

The worst case for a tracer: small files from the page cache, two forked workers, no decoding, no
compute. Ways are interleaved: plain, Python hooks alone, hooks and preloaded library. Only the
loop is measured, not the start of the interpreter.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WAYS = ("plain", "python", "preload")
FILE_BYTES = 32 << 10


def job(folder: str, num_files: int, epochs: int) -> None:
    """The traced program: torch and nothing of Penstock."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Files(Dataset):
        def __len__(self) -> int:
            return num_files

        def __getitem__(self, index: int) -> torch.Tensor:
            data = Path(folder, f"{index % 100}", f"{index}.bin").read_bytes()
            return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    loader = DataLoader(Files(), batch_size=32, shuffle=True, num_workers=2)
    before, begun_s = cpu_s(), time.perf_counter()
    delivered = sum(batch.nbytes for _ in range(epochs) for batch in loader)
    took_s = time.perf_counter() - begun_s
    print(json.dumps({"cpu_s": cpu_s() - before, "wall_s": took_s, "bytes": delivered}))


def cpu_s() -> float:
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def measure(way: str, folder: Path, num_files: int, epochs: int) -> dict:
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    words = [str(folder / "data"), str(num_files), str(epochs)]
    command = [sys.executable, "-m", "benchmarks.trace_foreign", "--job", *words]
    if way != "plain":
        verb = [sys.executable, "-m", "penstock.cli.main", "trace", "--with", way, "--out"]
        command = [*verb, str(run), "--", *command]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    out = json.loads(next(x for x in done.stdout.splitlines() if x.startswith("{")))
    if way != "plain":
        from penstock.trace import Kind, read_trace

        trace = read_trace(run)
        out["seen"] = int(trace.of(Kind.READ)["size_bytes"].sum())
        out["trace_bytes"] = sum(path.stat().st_size for path in run.iterdir())
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--files", type=int, default=6000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job(options.job[0], int(options.job[1]), int(options.job[2]))
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for index in range(options.files):
            path = folder / "data" / f"{index % 100}" / f"{index}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.urandom(FILE_BYTES))
        found: dict[str, list[dict]] = {way: [] for way in WAYS}
        for number in range(options.rounds):
            for way in WAYS[number % 3 :] + WAYS[: number % 3]:  # Nobody is always first.
                found[way].append(measure(way, folder, options.files, options.epochs))
    show(found)


def show(found: dict[str, list[dict]]) -> None:
    base = [one["cpu_s"] for one in found["plain"]]
    print(
        f"{'way':<8} {'CPU s':>7} {'least':>8} {'median':>8} {'min':>8} {'seen':>11} {'trace':>8}"
    )
    for way, rounds in found.items():
        used = [one["cpu_s"] for one in rounds]
        more = statistics.median(u / b - 1 for u, b in zip(used, base, strict=True))
        least = min(used) / min(base) - 1
        seen = rounds[-1].get("seen", 0) / rounds[-1]["bytes"]
        size_mb = rounds[-1].get("trace_bytes", 0) / 1e6
        print(
            f"{way:<8} {statistics.median(used):7.2f} {min(used):8.2f} {more:+8.1%} {least:+8.1%} "
            f"{seen:11.2%} {size_mb:5.1f} MB"
        )


if __name__ == "__main__":
    main()
