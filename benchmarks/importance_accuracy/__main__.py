"""The command: which systems train on which data, and where the record goes."""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks.importance_accuracy.data import READ, noise
from benchmarks.importance_accuracy.jobs import Job, carried_out
from benchmarks.importance_accuracy.summary import BASE, Summary
from benchmarks.importance_accuracy.training import Recipe, Run
from benchmarks.importance_accuracy.wall_time import Clock
from benchmarks.samplers import SOURCES

RECIPES = {
    "cifar10": Recipe(model="resnet9", epochs=20, batch_size=256, lr=0.2, pad=4),
    "fashion": Recipe(model="small", epochs=15, batch_size=128, lr=0.1, pad=2),
    "noise": Recipe(model="linear", epochs=4, batch_size=16, lr=0.1, pad=1),
}
SYSTEMS = [
    # uniform-lru trains as uniform does, sample for sample; only its cache differs.
    *(name for name in SOURCES if name != "uniform-lru"),
    # A search on 10,000 images of Fashion-MNIST: less reading is saved than with the defaults, and
    # more accuracy is gained by steps.
    "cost-aware:floor=0.5",
]
QUICK_SYSTEMS = ["uniform", "importance"]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.importance_accuracy", description=__doc__)
    parser.add_argument("data", nargs="?", choices=sorted(READ), help="which images")
    parser.add_argument("folder", nargs="?", type=Path, help="where they are")
    parser.add_argument("--systems", nargs="+", help=f"usually {' '.join(SYSTEMS)}")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--epochs", type=float, nargs="+", help="lengths of the whole schedule")
    parser.add_argument("--samples", type=int, help="train on the first so many images only")
    parser.add_argument("--wrong-labels", type=float, default=0.0, help="share of training labels")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--model", choices=["resnet9", "small", "linear"])
    parser.add_argument("--width", type=int, help="channels of the first convolution")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; 0: in this process")
    parser.add_argument("--cache", type=float, default=0.2, help="share of the samples")
    parser.add_argument("--look-ahead", type=int, default=4, help="steps read ahead")
    parser.add_argument("--slowness", type=float, nargs="+", default=[0.5, 3, 10])
    parser.add_argument("--compute-s", type=float, default=0.02, help="a gradient step, modelled")
    parser.add_argument("--hit-share", type=float, default=0.02, help="cost of a hit, in misses")
    parser.add_argument("--json", type=Path, help="write runs and tables here, after every run")
    parser.add_argument("--again", type=Path, nargs="+", help="tables of these reports' runs")
    parser.add_argument("--quick", action="store_true", help="noise and a linear model: a trial")
    options = parser.parse_args(argv)
    if not (options.quick or options.again or options.folder):
        parser.error("name the data and its folder, or use --quick or --again")
    return options


def recipes_of(options: argparse.Namespace) -> list[Recipe]:
    """The data's recipe with what the options change, once for each number of epochs."""
    recipe = RECIPES["noise" if options.quick else options.data]
    names = ("batch_size", "lr", "model", "width", "look_ahead")
    changes = {n: getattr(options, n) for n in names if getattr(options, n) is not None}
    recipe = replace(recipe, bfloat16=options.device.startswith("cuda"), **changes)
    return [replace(recipe, epochs=epochs) for epochs in options.epochs or [recipe.epochs]]


def jobs_of(options: argparse.Namespace, folder: Path) -> list[Job]:
    """Whole seeds first, so that a run that is cut short still compares all systems."""
    systems = options.systems or (QUICK_SYSTEMS if options.quick else SYSTEMS)
    return [
        Job(
            system=system,
            seed=seed,
            recipe=recipe,
            cache_share=options.cache,
            device=options.device,
            folder=folder,
        )
        for seed in range(options.first_seed, options.first_seed + options.seeds)
        for recipe in recipes_of(options)
        for system in systems
    ]


def train_all(options: argparse.Namespace, clock: Clock) -> list[Run]:
    images = noise() if options.quick else READ[options.data](options.folder)
    # Whole batches, so that the epochs of systems that draw an epoch at a time end with a batch.
    num_samples = min(options.samples or len(images.train), len(images.train))
    images = images.first(num_samples - num_samples % recipes_of(options)[0].batch_size)
    if options.wrong_labels:
        images = images.with_wrong_labels(options.wrong_labels)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        images.save(Path(folder))
        for run in carried_out(jobs_of(options, Path(folder)), options.jobs):
            runs.append(run)
            print(
                f"{run.system} seed {run.seed}: {run.accuracies[-1]:.2%} after {run.steps[-1]} "
                f"steps, {run.seconds:.1f} s",
                flush=True,
            )
            if options.json:
                write(options.json, runs, options, clock)
    return runs


def write(file: Path, runs: list[Run], options: argparse.Namespace, clock: Clock) -> None:
    report = {
        "options": {k: v for k, v in vars(options).items() if isinstance(v, str | float | int)},
        "clock": asdict(clock),
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "runs": [asdict(run) for run in runs],
    }
    if any(run.system == BASE for run in runs):
        summary = Summary(runs, clock, options.slowness)
        report |= {"target": summary.target, "rows": summary.rows()}
    file.write_text(json.dumps(report, default=asdict))


def read(files: Sequence[Path]) -> list[Run]:
    return [Run(**run) for file in files for run in json.loads(file.read_text())["runs"]]


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    clock = Clock(
        compute_s=options.compute_s,
        hit_share=options.hit_share,
        look_ahead=options.look_ahead,
        cache_share=options.cache,
    )
    runs = read(options.again) if options.again else train_all(options, clock)
    if options.json:
        write(options.json, runs, options, clock)
    if all(run.system != BASE for run in runs):
        print(f"no tables: they compare with {BASE!r}, which was not run; --again joins reports")
        return
    summary = Summary(runs, clock, options.slowness)
    print(f"\ntarget: {summary.target:.2%} (uniform's final mean less half its interval)\n")
    print(summary.table())


if __name__ == "__main__":
    main()
