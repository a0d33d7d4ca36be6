"""Does the loader feed a GPU, and does it leave the training process alone?

    python -m benchmarks.gpu_feed FOLDER_OF_JPEGS [--only tokens,alone] [--rounds 3] [--json F]
    python -m benchmarks.gpu_feed FOLDER_OF_JPEGS --device cpu --quick     # does it work?
    python -m benchmarks.gpu_feed --cores                                  # blobs, tokens: no GPU

Three groups of cases. Everyone in a group takes a turn in each round; figures are medians.

* images: ResNet-50, bf16, eager, batch 256, JPEGs with a label in tar (as files for torch), decoded
  and cropped at random. `resident` trains on one batch that is on the device: the limit of the
  GPU. `bare` are low-priority processes that only decode and crop bytes from memory beside the
  same step: the limit where decoding is the bottleneck. The smaller of the two is *the limit*.
* alone: the same images to a loop that reads a byte of each page. Its limit is `bare`.
* tokens: GPT-2-small, eager, rows int32[1024]. Its limit is `resident`.

`launch` is the time in which the loop issues one step's kernels; it grows when the loader takes
the interpreter's lock or the loop's core. `next` is the share of the time inside `next`, `stall`,
`hand-over` and `own CPU` are the loader's own account of the same window, as shares of it too.
The loop waits for the device after each step, as one that logs its loss does.

Needs torch, torchvision and Penstock's packages on the path, and nothing else.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median

import torch

from benchmarks import loops, under_test
from benchmarks.gpu_cases import (
    QUICK,
    Cases,
    Feed,
    Opens,
    Sizes,
    groups_of,
    write_images,
    write_rows,
)
from benchmarks.gpu_models import Step, image_step, token_step
from benchmarks.peers.setup import ROOT

PARTS = ("next", "place", "launch", "device")


def measure(feed: Feed, step: Step, device: str, sizes: Sizes) -> dict:
    """Run the loop for some seconds after a warm-up; return rates and where the time went."""
    batches = forever(feed.batches)
    run(batches, feed, step, device, 0)  # one step: the first batch may take longer than warm_s
    run(batches, feed, step, device, sizes.warm_s)
    before, began = feed.told(), time.perf_counter()
    samples, steps, parts = run(batches, feed, step, device, sizes.seconds)
    seconds, after = time.perf_counter() - began, feed.told()
    shares = {name: part / seconds for name, part in zip(PARTS, parts, strict=True)}
    told = {
        name: None if after[name] is None else (after[name] - before[name]) / seconds
        for name in after
    }
    return {
        "samples_s": samples / seconds,
        "launch_ms": 1000 * parts[PARTS.index("launch")] / steps,
        **shares,
        **told,
    }


def forever(batches: Iterable) -> Iterator:
    while True:
        yield from batches


def run(
    batches: Iterator, feed: Feed, step: Step, device: str, seconds: float
) -> tuple[int, int, list[float]]:
    """Return samples, steps, and the seconds of each part of the loop."""
    samples = steps = 0
    parts = [0.0] * len(PARTS)
    ends_at = time.perf_counter() + seconds
    while not steps or time.perf_counter() < ends_at:
        marks = [time.perf_counter()]
        batch = next(batches)
        marks.append(time.perf_counter())
        tensors = feed.fields(batch)
        if device != "host":
            tensors = tuple(tensor.to(device, non_blocking=True) for tensor in tensors)
        marks.append(time.perf_counter())
        step(*tensors)
        marks.append(time.perf_counter())
        if device == "cuda":
            torch.cuda.synchronize()
        marks.append(time.perf_counter())
        parts = [part + b - a for part, a, b in zip(parts, marks, marks[1:], strict=False)]
        samples += len(tensors[0])
        steps += 1
        del batch, tensors  # A loader that reuses memory gets it back before the next `next`.
    return samples, steps, parts


def take_turns(
    groups: dict[str, dict[str, Opens]], cases: Cases, options: argparse.Namespace
) -> dict:
    """Measure everyone in rounds, as long as another round fits into the time."""
    results: dict[tuple[str, str], list[dict]] = {}
    began, steps = time.monotonic(), {}
    for number in range(options.rounds):
        round_began = time.monotonic()
        for group, opens in groups.items():
            device = "host" if group == "alone" else cases.device
            if group not in steps:
                steps[group] = step_of(group, cases, options.quick)
            for name, open_case in opens.items():
                turn_began = time.monotonic()
                try:
                    with open_case() as feed:
                        result = measure(feed, steps[group], device, cases.sizes)
                except Exception as error:  # a row of the table; the others are still measured
                    result = {"failed": f"{type(error).__name__}: {error}"}
                feed = None  # and with it go the worker processes of torch's loader
                results.setdefault((group, name), []).append(result)
                took_s = time.monotonic() - turn_began
                said = {"round": number + 1, "group": group, "case": name, "took_s": took_s}
                print(json.dumps(rounded(said | result)), file=sys.stderr, flush=True)
        spent_s, last_s = time.monotonic() - began, time.monotonic() - round_began
        if spent_s + last_s > 60 * options.minutes:
            break
    return results


def rounded(result: dict) -> dict:
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}


def step_of(group: str, cases: Cases, quick: bool) -> Step:
    if group == "alone":
        return lambda *tensors: loops.touch(tensors)
    if group == "tokens":
        return token_step(cases.device, context=cases.sizes.context, quick=quick)
    return image_step(cases.device, quick=quick)


# -- the table -------------------------------------------------------------------------------


def medians(results: list[dict]) -> dict:
    """Return the medians of the turns that succeeded, or why none did."""
    good = [result for result in results if "failed" not in result]
    if not good:
        return results[-1]
    known = {name for name in good[0] if good[0][name] is not None}
    return {name: median(result[name] for result in good) for name in known}


def limit_of(rows: dict[str, dict]) -> float | None:
    """Return the rate that nobody can exceed: of the GPU, or of decoding beside it, if less."""
    rates = [
        row["samples_s"]
        for name, row in rows.items()
        if "samples_s" in row and (name == "resident" or name.startswith("bare"))
    ]
    return min(rates) if rates else None


def table(results: dict[tuple[str, str], list[dict]]) -> str:
    columns = ("of limit", "min..max", "next", "launch ms", "stall", "hand-over", "own CPU")
    lines = []
    for group in dict.fromkeys(group for group, _ in results):
        rounds = {name: of for (its_group, name), of in results.items() if its_group == group}
        rows = {name: medians(of) for name, of in rounds.items()}
        limit = limit_of(rows)
        lines += [f"| {group} | samples/s | {' | '.join(columns)} |", f"|---|{'---:|' * 8}"]
        for name, row in rows.items():
            if "failed" in row:
                lines.append(f"| {name} | failed: {row['failed']} |")
                continue
            rates = [result["samples_s"] for result in rounds[name] if "samples_s" in result]
            cells = [
                f"{row['samples_s']:,.0f}",
                "-" if limit is None else f"{row['samples_s'] / limit:.3f}",
                f"{min(rates):,.0f}..{max(rates):,.0f}",
                f"{row['next']:.3f}",
                f"{row['launch_ms']:.1f}",
                *(f"{row[key]:.3f}" if key in row else "-" for key in under_test.TOLD),
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("jpegs", nargs="?", type=Path, help="a folder of JPEG files, nothing else")
    parser.add_argument("--only", default="", help="groups, or parts of names of cases")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=6, help="no round begins that ends later")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="of torch, and bare")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny models, one short round")
    parser.add_argument("--cores", action="store_true", help="blobs and tokens against memcpy")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not options.cores and options.jpegs is None:
        parser.error("name a folder of JPEGs, or ask for --cores")
    options.rounds = 1 if options.quick else options.rounds
    return options


def chosen(groups: dict[str, dict[str, Opens]], only: str) -> dict[str, dict[str, Opens]]:
    """Return the groups and cases that `only` names: "tokens" all of it, "ours" in each group."""
    words = [word for word in only.split(",") if word]
    wanted_groups = [word for word in words if word in groups] or list(groups)
    wanted_cases = [word for word in words if word not in groups]
    return {
        group: {
            name: opens
            for name, opens in groups[group].items()
            if not wanted_cases or any(word in name for word in wanted_cases)
        }
        for group in wanted_groups
    }


def run_cores(options: argparse.Namespace) -> None:
    """Ask `blobs` and `tokens`, where everyone takes turns with memcpy in a process of its own."""
    more = ["--quick"] if options.quick else ["--rounds", str(options.rounds)]
    for question in ("blobs", "tokens"):
        command = [sys.executable, "-m", f"benchmarks.{question}", "--peers", "ours", *more]
        subprocess.run(command, cwd=ROOT, check=True)


def main() -> None:
    options = options_of()
    if options.cores:
        run_cores(options)
        return
    # As in torch's own workers: those of other libraries would compete with the loaders.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        os.environ["PENSTOCK_CACHE"] = f"{name}/cache"
        sizes = QUICK if options.quick else Sizes()
        cases = Cases(
            folder=Path(name), sizes=sizes, device=options.device, workers=options.workers
        )
        cases.images = write_images(options.jpegs, cases.folder, sizes)
        write_rows(cases.folder, sizes)
        results = take_turns(chosen(groups_of(cases), options.only), cases, options)
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{where}, {os.cpu_count()} cores, torch {torch.__version__}, {sizes}\n")
    print(table(results))
    if options.json:
        listed = [{"group": g, "case": c, "rounds": of} for (g, c), of in results.items()]
        options.json.write_text(json.dumps(listed, indent=1))


if __name__ == "__main__":
    main()
