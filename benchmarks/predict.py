"""Does the simulator know how long a real run takes?

    python -m benchmarks.predict [--rounds 3] [--json FILE]

A real loader and the simulator's event model, on the same store (a shaped one, measured by
`penstock probe` first), data set, tiers and step: caches of 0, 20, 50 and 100 % of the set; a slow
and a fast store; steps that compute longer than they load, and the other way round. Printed is the
time of the first epoch and of later ones, real (median of rounds) and predicted, and the error.
"""

import argparse
import io
import itertools
import json
import os
import tarfile
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from testkit.shaper import Fixed, Shape, Shaper

import penstock
from penstock.machine import Machine, TierModel
from penstock.simulate import LoaderRun, Samples, predict
from penstock.simulate.probe import Target, probe_machine

BLOB_BYTES, NUM_BLOBS, BATCH, EPOCHS = 110_000, 2048, 128, 3
CACHES = (0.0, 0.2, 0.5, 1.0)
STORES = {
    "slow": Shape(latency=Fixed(0.020), bandwidth_bytes_s=100e6),
    "fast": Shape(latency=Fixed(0.005), bandwidth_bytes_s=200e6),
}
LOADS = {"compute-bound": 1.3, "I/O-bound": 0.5}
"""The length of a step, over what its bytes take on the store's link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One configuration."""

    store: str
    cache: float
    load: str

    @property
    def step_s(self) -> float:
        link_s = BATCH * BLOB_BYTES / STORES[self.store].bandwidth_bytes_s
        return link_s * LOADS[self.load]


def write(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for shard in range(4):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for i in range(NUM_BLOBS // 4):
                member = tarfile.TarInfo(f"{shard}-{i:05}.bin")
                member.size = BLOB_BYTES
                archive.addfile(member, io.BytesIO(rng.bytes(BLOB_BYTES)))


def real(dataset: penstock.Dataset, case: Case) -> list[float]:
    """Return the seconds of each epoch."""
    cache_bytes = int(case.cache * dataset.size_bytes)
    ends = [time.perf_counter()]
    with penstock.Loader(
        dataset,
        batch_size=BATCH,
        epochs=EPOCHS,
        tiers=[penstock.Memory(cache_bytes)] if cache_bytes else [],
        output="numpy",
    ) as loader:
        for number, _ in enumerate(loader, 1):
            time.sleep(case.step_s)
            if number % (NUM_BLOBS // BATCH) == 0:
                ends.append(time.perf_counter())
    return [stop - start for start, stop in itertools.pairwise(ends)]


def predicted(machine: Machine, dataset: penstock.Dataset, case: Case) -> list[float]:
    memory = next(t for t in machine.tiers if t.kind == "memory")
    cache_bytes = int(case.cache * dataset.size_bytes)
    tiers: tuple[TierModel, ...] = ()
    if cache_bytes:
        tiers = (replace(memory, capacity_bytes=cache_bytes),)
    run = LoaderRun(
        samples=Samples.of(dataset), batch_size=BATCH, compute_s=case.step_s, epochs=EPOCHS
    )
    return list(predict(replace(machine, tiers=tiers), run).epoch_s)


def measure(folder: Path, rounds: int) -> dict[Case, tuple[list[float], list[float]]]:
    cases = [Case(store=s, cache=c, load=w) for s in STORES for c in CACHES for w in LOADS]
    seen: dict[Case, list[list[float]]] = {case: [] for case in cases}
    machines: dict[str, Machine] = {}
    with Shaper.of_folder(folder, Shape()) as shaper:
        dataset = penstock.open(shaper.uri, store=shaper.options)
        for name, shape in STORES.items():
            shaper.reshape(shape)
            target = Target.of(shaper.uri, store=shaper.options)
            machines[name] = probe_machine(target=target).machine
        for _, case in itertools.product(range(rounds), cases):
            shaper.reshape(STORES[case.store])
            seen[case].append(real(dataset, case))
        return {
            case: (
                [median(epoch) for epoch in zip(*runs, strict=True)],
                predicted(machines[case.store], dataset, case),
            )
            for case, runs in seen.items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PENSTOCK_CACHE"] = f"{folder}/cache"
        (data := Path(folder) / "data").mkdir()
        write(data)
        results = measure(data, given.rounds)
    print(f"{'store':6}{'cache':>6}  {'step':14}{'epoch':7}{'real s':>8}{'said s':>8}{'error':>8}")
    errors = []
    for case, (was, said) in results.items():
        for name, pick in (("first", slice(0, 1)), ("later", slice(1, None))):
            a, b = sum(was[pick]) / len(was[pick]), sum(said[pick]) / len(said[pick])
            errors.append(abs(b / a - 1))
            row = f"{case.store:6}{case.cache:6.0%}  {case.load:14}{name:7}"
            print(f"{row}{a:8.2f}{b:8.2f}{b / a - 1:+8.1%}")
    print(f"errors: median {median(errors):.1%}, largest {max(errors):.1%} (goal: below 15 %)")
    if given.json:
        rows = [[c.store, c.cache, c.load, was, said] for c, (was, said) in results.items()]
        given.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
