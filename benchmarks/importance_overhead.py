"""What importance sampling costs the training process, a step.

    python -m benchmarks.importance_overhead [--samples 200000] [--batch 256] [--ranks 1 2 4]

A loop over rows of 64 floats with `shuffle="global"`, and the same with `Importance()` and
`loader.observe`, in steps of 5 ms. Microseconds of a step in the training thread, by clock and by
processor time; the kinds take turns, medians of all rounds. With several ranks a gloo process group
brings the losses together. With a GPU, losses lie there. The last lines say how long an engine
takes to draw a window, which is once a window and not in the training process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import distributed, multiprocessing

import penstock

STEP_S = 0.005


def steps(loader: penstock.Loader, losses: torch.Tensor, *, observes: bool) -> dict[str, float]:
    """Go through a loader; return microseconds a step."""
    taken, told, num_steps = [0.0, 0.0], [0.0, 0.0], 0
    batches = iter(loader)
    first = next(batches)  # The engine starts.
    if observes:
        loader.observe(first, losses[first.ids.to(losses.device)])
    while True:
        begin = time.perf_counter(), time.thread_time()
        batch = next(batches, None)
        if batch is None:
            break
        _add(taken, begin)
        found = losses[batch.ids.to(losses.device)] + batch["data"].sum()
        time.sleep(STEP_S)  # The step itself, during which others work.
        begin = time.perf_counter(), time.thread_time()
        if observes:
            loader.observe(batch, found)
        _add(told, begin)
        num_steps += 1
    names = ("next", "next cpu", "observe", "observe cpu")
    return {n: 1e6 * s / num_steps for n, s in zip(names, taken + told, strict=True)}


def _add(total: list[float], begin: tuple[float, float]) -> None:
    total[0] += time.perf_counter() - begin[0]
    total[1] += time.thread_time() - begin[1]


def run(rank: int, args: argparse.Namespace, num_ranks: int, folder: str, out: str) -> None:
    if num_ranks > 1:
        place = f"file://{folder}/group{num_ranks}"
        distributed.init_process_group("gloo", place, rank=rank, world_size=num_ranks)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    losses = torch.from_numpy(np.random.default_rng(0).lognormal(size=args.samples)).to(device)
    dataset = penstock.open(f"{folder}/rows.npy")
    found: dict[str, list[dict[str, float]]] = {"plain": [], "importance": []}
    for number in range(args.rounds):
        for name, rounds in found.items():
            shuffle = "global" if name == "plain" else penstock.Importance(warmup=0)
            with penstock.Loader(
                dataset, global_batch_size=args.batch, epochs=1, shuffle=shuffle, seed=number
            ) as loader:
                rounds.append(steps(loader, losses, observes=name == "importance"))
    if rank == 0:
        show(num_ranks, found)
    if num_ranks > 1:
        distributed.destroy_process_group()
    Path(out).touch()


def show(num_ranks: int, found: dict[str, list[dict[str, float]]]) -> None:
    """Print a row for each kind of order."""
    for name, rounds in found.items():
        columns = [f"{statistics.median(r[c] for r in rounds):.0f}" for c in rounds[0]]
        print(f"| {num_ranks} | {name} | {' | '.join(columns)} |", flush=True)


def draw_times(num_samples: int) -> str:
    """Return how long the engine takes to draw a window."""
    from penstock.order import GlobalOrder
    from penstock.order.importance import Importance, ImportanceOrder, ScoreTable, StepLosses

    order = ImportanceOrder(
        plain=GlobalOrder(num_samples=num_samples, seed=0), options=Importance(warmup=0)
    )
    table, ids = ScoreTable(num_samples), np.arange(num_samples)
    losses = np.random.default_rng(0).lognormal(size=num_samples).astype(np.float32)
    table.learn([StepLosses(ids, losses)], order.options)
    begin_s = time.process_time()
    draws = order.draws(10, table)
    seconds = time.process_time() - begin_s
    return f"{num_samples:,} samples, {len(draws.ids):,} draws: {1e3 * seconds:.0f} ms"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    print(f"global batch {args.batch}, {args.samples:,} rows of 256 bytes, losses on {where}\n")
    print("| ranks | order | next | next, cpu | observe | observe, cpu |")
    print("|---:|---|---:|---:|---:|---:|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/rows.npy", np.zeros((args.samples, 64), np.float32))
        penstock.open(f"{folder}/rows.npy")  # Indexed before the clock starts.
        for num_ranks in args.ranks:
            multiprocessing.spawn(
                run, (args, num_ranks, folder, f"{folder}/done"), nprocs=num_ranks
            )
    print("\nto draw a window (processor time of the engine):")
    for num_samples in (args.samples, 1_281_167):
        print(f"  {draw_times(num_samples)}")


if __name__ == "__main__":
    main()
