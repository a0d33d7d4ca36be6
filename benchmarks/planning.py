"""How long from a data set to the first fetch, and how much memory, for millions of samples?

    python -m benchmarks.planning [--samples 1300000] [--rounds 5]

A synthetic index of samples of 64 to 160 kB in a store that does not exist: what is timed is
planning alone. Measured are cutting units, laying them out, opening a memory tier for a third of
them, and the first requests; then one epoch's fetches, as they are planned while a run goes on.
"""

import argparse
import resource
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from penstock import Memory
from penstock.dataset.dataset import Dataset
from penstock.dataset.fields import Field
from penstock.dataset.part import Rows, make_part
from penstock.engine.job import SampleGroup
from penstock.engine.local_tiers import LocalTiers
from penstock.flow.layout.placement import layout_of
from penstock.flow.layout.units import Units
from penstock.order import GlobalOrder
from penstock.storage.base import ObjectInfo
from penstock.storage.memory import MemoryStore

SHARD_SAMPLES, CHUNK = 1000, 4096


def synthetic(num_samples: int) -> Dataset:
    lengths = np.random.default_rng(0).integers(64 << 10, 160_000, num_samples)
    num_shards = -(-num_samples // SHARD_SAMPLES)
    counts = [min(SHARD_SAMPLES, num_samples - i * SHARD_SAMPLES) for i in range(num_shards)]
    ends = np.cumsum(lengths)
    first = np.repeat(np.concatenate([[0], ends])[np.cumsum([0, *counts[:-1]])], counts)
    part = make_part(
        format="tar",
        fields=[Field(name="bin", encoding="bin")],
        tables=[
            Rows(
                objects=[ObjectInfo(key=f"{i}.tar", size_bytes=2**40) for i in range(num_shards)],
                counts=counts,
                addressing="extents",
                columns={"offset": ends - lengths - first, "length": lengths},
            )
        ],
        members=(np.zeros((num_samples, 1), np.uint32), lengths.astype(np.uint32)[:, None]),
    )
    return Dataset(store=MemoryStore("planning"), parts=[part])


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def first_fetch(dataset: Dataset) -> None:
    """Everything a loader does before it asks the store for anything."""
    local_tiers = LocalTiers(dataset, [Memory("1GB")])
    plan_chunk(dataset, local_tiers, GlobalOrder(num_samples=len(dataset), seed=0), 0)
    local_tiers.close()


def plan_chunk(dataset: Dataset, local_tiers: LocalTiers, order: GlobalOrder, start: int) -> int:
    ids = order.ids(0, start, min(start + CHUNK, len(dataset)))
    num_absent = 0
    for bound, where, local_ids in dataset.groups(ids):
        group = SampleGroup(bound=bound, where=where, local_ids=local_ids)
        places = local_tiers.places(group)
        placed = local_tiers.is_placed(places)
        num_absent += len(local_tiers.absent(places[0].units[placed]))
    return num_absent


def epoch(dataset: Dataset) -> None:
    local_tiers = LocalTiers(dataset, [Memory("1GB")])
    order = GlobalOrder(num_samples=len(dataset), seed=0)
    for start in range(0, len(dataset), CHUNK):
        plan_chunk(dataset, local_tiers, order, start)
    local_tiers.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1_300_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    dataset = synthetic(given.samples)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    turns = {
        "units": lambda: Units.of(dataset).size_bytes,
        "units and layout": lambda: layout_of(Units.of(dataset)),
        "all before the first fetch": lambda: first_fetch(dataset),
        "all fetches of an epoch": lambda: epoch(dataset),
    }
    seconds: dict[str, list[float]] = {}
    for _ in range(given.rounds):
        for name, call in turns.items():
            seconds.setdefault(name, []).append(timed(call))
    print(f"{given.samples:,} samples")
    for name, values in seconds.items():
        print(f"{median(values):8.3f} s  {name}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{(peak - before) / 1e3:8.0f} MB more memory at the peak (goal: below 2 s to the fetch)")


if __name__ == "__main__":
    main()
