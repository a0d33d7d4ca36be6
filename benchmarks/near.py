"""What do mapped files, asking the kernel ahead, and more copying threads bring on local files?

    python -m benchmarks.near

Decision 0005 rests on these. Each figure stands beside its alternative, measured in turns; medians.
"""

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from unittest import mock

import numpy as np

import penstock
from benchmarks import loops, under_test
from benchmarks.formats import labelled, write_shards
from penstock.engine.reads import SampleReader

ROUNDS = 3
NUM_BLOBS, BLOB_BYTES, BATCH = 4096, 110_000, 128


def write(folder: Path) -> tuple[penstock.Dataset, penstock.Dataset]:
    rng = np.random.default_rng(0)
    (folder / "rows").mkdir()
    np.save(folder / "rows" / "rows.npy", rng.integers(0, 2**31, (200_000, 512), dtype=np.int32))
    blobs = (rng.bytes(BLOB_BYTES) for _ in range(NUM_BLOBS))
    write_shards(folder / "blobs", labelled("bin", blobs))
    os.sync()
    return penstock.open(folder / "rows"), penstock.open(folder / "blobs")


def drop(folder: Path) -> None:
    """Let the kernel forget the pages of all data files."""
    for path in [*folder.rglob("*.npy"), *folder.rglob("*.tar")]:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copied(path: Path, mapped: bool) -> float:
    """Return samples a second of one thread that copies pieces of a file in random order."""
    offsets = np.random.default_rng(1).permutation(path.stat().st_size // BLOB_BYTES - 1)
    target = np.empty(len(offsets) * BLOB_BYTES, np.uint8)
    target.fill(0)
    with path.open("rb") as file:
        source = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        source[::4096].sum()
        begin = time.perf_counter()
        for at, piece in zip(range(0, len(target), BLOB_BYTES), offsets.tolist(), strict=True):
            start, view = piece * BLOB_BYTES, target[at : at + BLOB_BYTES]
            if mapped:
                view[:] = source[start : start + BLOB_BYTES]
            else:
                os.preadv(file.fileno(), [view.data], start)
        return len(offsets) / (time.perf_counter() - begin)


def loaded(dataset: penstock.Dataset, batches: int, threads: int | None = None) -> float:
    """Return samples a second of a loader in this process, to a loop that reads every page."""
    options = {"batch_size": BATCH, "epochs": None, "threads": threads}
    with penstock.Loader(dataset, **options, **under_test.workers("here")) as loader:
        begin = time.perf_counter()
        for batch in islice(loader, batches):
            loops.touch(batch)
        return batches * BATCH / (time.perf_counter() - begin)


@contextlib.contextmanager
def nothing_asked(*_: object) -> Iterator[None]:
    yield


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows, blobs = write(folder)
        shard = folder / "blobs" / "shard-00000.tar"
        pairs = [(copied(shard, True), copied(shard, False)) for _ in range(ROUNDS)]
        a, b = (median(side) for side in zip(*pairs, strict=True))
        print(f"in memory, 110 kB: mapped {a:,.0f}/s, preadv {b:,.0f}/s, ratio {a / b:.2f}")
        for what, dataset, batches in (("2 kB rows", rows, 150), ("110 kB blobs", blobs, 20)):
            asked, alone = [], []
            for _ in range(ROUNDS):
                drop(folder)
                asked.append(loaded(dataset, batches))
                drop(folder)
                with mock.patch.object(SampleReader, "warmed", nothing_asked):
                    alone.append(loaded(dataset, batches))
            a, b = median(asked), median(alone)
            print(f"cold, {what}: asked ahead {a:,.0f}/s, faults alone {b:,.0f}/s, {a / b:.1f}")
        for threads in (1, 2, 4, 8):
            rates = [loaded(blobs, 100, threads) for _ in range(ROUNDS)]
            print(f"in memory, 110 kB blobs, {threads} threads: {median(rates):,.0f}/s")


if __name__ == "__main__":
    main()
