"""A training script as people write it: ResNet-50 on JPEG files, fed by one of several loaders.

    python train.py FOLDER --feed torch|threads|processes|resident [--steps 60]

It knows nothing of tracing. FOLDER has `files/` (JPEGs) and `tar/` (the same, with labels).
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu_cases import QUICK, Cases, Feed, Sizes
from benchmarks.gpu_models import image_step


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--feed", choices=["torch", "threads", "processes", "resident"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args()


def forever(feed: Feed) -> Iterator:
    while True:
        yield from feed.batches


def main() -> None:
    given = arguments()
    sizes = QUICK if given.quick else Sizes()
    cases = Cases(
        folder=given.folder, sizes=sizes, device=given.device, workers=given.workers, images=[]
    )
    opened = {
        "torch": cases.torch_workers,
        "threads": lambda: cases.ours("here", decoder="torchvision"),
        "processes": lambda: cases.ours("processes", decoder="torchvision"),
        "resident": cases.resident,
    }[given.feed]
    step = image_step(given.device, quick=given.quick)
    with opened() as feed:
        batches, began, num_timed = forever(feed), 0.0, 0
        for number in range(given.steps):
            fields = feed.fields(next(batches))
            step(*(field.to(given.device, non_blocking=True) for field in fields))
            if given.device == "cuda":
                torch.cuda.synchronize()  # As a loop that logs its loss does.
            if number == given.steps // 4:
                began = time.perf_counter()
            num_timed += number > given.steps // 4
        rate = num_timed * sizes.batch / (time.perf_counter() - began)
    print(f"images/s: {rate:.0f}", flush=True)


if __name__ == "__main__":
    main()
