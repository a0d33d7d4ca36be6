"""How many positions of an order are computed in a second, on one core, forwards and backwards?

    python -m benchmarks.orders [--samples 100000000]

The limit that the loader needs is 5 million a second and core; a NumPy shuffle of the same length,
which cannot be sought or inverted, is printed beside it.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from penstock.order import BlocksOrder, GlobalOrder, MixtureOrder

COUNT = 1 << 20


def rate(call: Callable[[], object], count: int, rounds: int = 5) -> float:
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return count / median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000_000)
    n = parser.parse_args().samples
    starts = np.append(np.arange(0, n, 1000), n)
    orders = {
        "global": GlobalOrder(num_samples=n, seed=7),
        "blocks of 1,000, 64 a window": BlocksOrder(block_starts=starts, seed=7, window_blocks=64),
        "mixture of 5": MixtureOrder(sizes=(n // 5,) * 5, weights=(1, 2, 3, 4, 5), seed=7),
    }
    print(f"{n:,} samples, {COUNT:,} positions at a time; million positions a second")
    for name, order in orders.items():
        first = order.num_samples // 2
        ids = order.ids(1, first, first + COUNT)
        there = rate(lambda o=order, f=first: o.ids(1, f, f + COUNT), COUNT)
        back = rate(lambda o=order, i=ids: o.positions(1, i), COUNT)
        print(f"  {name:30} ids {there / 1e6:6.1f}   positions {back / 1e6:6.1f}   (limit 5)")
    generator = np.random.default_rng(7)
    shuffled = rate(lambda: generator.permutation(COUNT * 8), COUNT * 8)
    print(f"  {'numpy permutation, 8 million':30} ids {shuffled / 1e6:6.1f}")


if __name__ == "__main__":
    main()
