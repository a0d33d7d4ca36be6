"""What happens when a store slows down ten-fold for a while and recovers?

    python -m benchmarks.adapt [--seconds 4] [--rounds 3]

A real loader reads, as fast as it can, from a store of 20 ms and 100 MB/s that becomes ten times
slower for some seconds. The store's own count of bytes is looked at ten times a second. Printed are
the rate in each phase as a share of what the store allows, and how long after the recovery the rate
was back at nine tenths of what it was before.
"""

import argparse
import os
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
from testkit.shaper import Fixed, Shape, Shaper

import penstock
from benchmarks import loops
from benchmarks.formats import labelled, write_shards

LATENCY_S, BYTES_S, SLOWER = 0.020, 100e6, 10
BLOB_BYTES, NUM_BLOBS, BATCH = 110_000, 2048, 64
LOOK_S, WARM_UP_S = 0.1, 1.5

Trace = list[tuple[float, int]]
"""Seconds, and bytes served until then."""


def one_round(shaper: Shaper, dataset: penstock.Dataset, seconds: float) -> dict[str, float]:
    usual = Shape(latency=Fixed(LATENCY_S), bandwidth_bytes_s=BYTES_S)
    slow = Shape(latency=Fixed(LATENCY_S * SLOWER), bandwidth_bytes_s=BYTES_S / SLOWER)
    shaper.reshape(usual)
    stop = threading.Event()

    def train() -> None:
        with penstock.Loader(dataset, batch_size=BATCH, epochs=None, output="numpy") as loader:
            for batch in loader:
                loops.touch(batch)
                if stop.is_set():
                    return

    trainer = threading.Thread(target=train)
    trainer.start()
    before = watch(shaper, WARM_UP_S + seconds)
    shaper.reshape(slow)
    during = watch(shaper, seconds)
    shaper.reshape(usual)
    after = watch(shaper, seconds)
    stop.set()
    trainer.join()
    was = rate(before, after_s=WARM_UP_S)
    return {
        "before": was / BYTES_S,
        "slow": rate(during, after_s=seconds / 2) / (BYTES_S / SLOWER),
        "after": rate(after, after_s=seconds / 2) / BYTES_S,
        "back_s": back_s(after, 0.9 * was),
    }


def watch(shaper: Shaper, seconds: float) -> Trace:
    begin = time.perf_counter()
    seen: Trace = []
    while (now := time.perf_counter() - begin) < seconds:
        seen.append((now, shaper.counts().body_bytes))
        time.sleep(LOOK_S)
    return seen


def rate(seen: Trace, after_s: float) -> float:
    late = [(at, count) for at, count in seen if at >= after_s]
    return (late[-1][1] - late[0][1]) / (late[-1][0] - late[0][0])


def back_s(seen: Trace, bytes_s: float) -> float:
    """Return when the rate, over three looks at a time, first reached what it should."""
    for (start, low), (stop, high) in pairwise(seen[::3]):
        if (high - low) / (stop - start) >= bytes_s:
            return start
    return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each phase")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PENSTOCK_CACHE"] = f"{folder}/cache"
        data = Path(folder) / "data"
        rng = np.random.default_rng(0)
        write_shards(data, labelled("bin", (rng.bytes(BLOB_BYTES) for _ in range(NUM_BLOBS))))
        with Shaper.of_folder(data, Shape()) as shaper:
            dataset = penstock.open(shaper.uri, store=shaper.options)
            results = [one_round(shaper, dataset, given.seconds) for _ in range(given.rounds)]
    for name, words in (
        ("before", "of the store's rate before"),
        ("slow", "of the store's rate while it is ten times slower"),
        ("after", "of the store's rate after it has recovered"),
    ):
        print(f"{median(r[name] for r in results):6.2f} {words}")
    print(f"{median(r['back_s'] for r in results):6.2f} s until nine tenths of the rate were back")


if __name__ == "__main__":
    main()
