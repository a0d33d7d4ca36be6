"""How fast are epochs from local files and from tiers that hold the set, every check included?

    python -m benchmarks.cached [--rounds 5] [--disk FOLDER] [--samples 8192] [--workers auto]

Blobs of 110 KB with a label beside each, to a loop that reads every page. Ways that take turns:

* plain tar: size and time of the file are compared after each piece of a batch;
* packed: every sample is compared with its checksum the first time a process reads it (`first`);
* memory tier, disk tier: every read is compared with the checksum of its unit;
* disk tier, cold: the same, and the kernel has forgotten the pages of its file.

Limits run the same loop over the same bytes in the same kind of order. In memory: threads that copy
each sample out of a mapped file into reused buffers. Cold: threads that read each sample's range of
the tier's own file, buffered or direct. `CPU` is processor time of all threads and processes.
"""

import argparse
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np

import penstock
from benchmarks import loops, under_test
from benchmarks.formats import labelled, write_shards
from benchmarks.loops import PAGE
from benchmarks.peers.limit import Fill
from benchmarks.window import Window

BLOB_BYTES, BATCH, EPOCHS = 110_000, 256, 3
AHEAD = 3
"""Batches that are made ahead. What is ready when the clock starts must be little."""


def blobs(num_samples: int) -> list[bytes]:
    rng = np.random.default_rng(0)
    return [rng.bytes(BLOB_BYTES) for _ in range(num_samples)]


def write_packed(folder: Path, num_samples: int) -> None:
    with penstock.Writer(folder, shard_size="200MB") as writer:
        for i, blob in enumerate(blobs(num_samples)):
            writer.write({"bin": blob, "cls": i})


def drop(path: Path) -> None:
    """Let the kernel forget the pages of a file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Way:
    """One way to go through all samples, measured a few epochs at a time, from the first batch on.

    `forget` is called before each epoch, with the clock stopped.
    """

    def __init__(self, start: Callable[[], Iterator], forget: Callable[[], None] = lambda: None):
        self.start, self.forget = start, forget
        self.seconds: list[float] = []
        self.cpu_s: list[float] = []
        """Both for one sample."""

    def turn(self, num_samples: int, epochs: int = EPOCHS) -> None:
        self.forget()
        batches, samples = self.start(), 0
        loops.touch(next(batches))
        window = Window()
        window.go()
        for number, batch in enumerate(islice(batches, epochs * (num_samples // BATCH) - 1), 1):
            if number % (num_samples // BATCH) == 0:
                window.stop()
                self.forget()
                window.go()
            loops.touch(batch)
            samples += BATCH
        window.stop()
        self.seconds.append(window.seconds / samples)
        self.cpu_s.append(window.cpu_s / samples)


def filled(fill: Fill, num_samples: int, num_threads: int) -> Iterator:
    """Make batches of samples at random. Threads share each, so that few are made ahead."""
    rng = np.random.default_rng(1)
    orders = [rng.permutation(num_samples) for _ in range(EPOCHS)]
    ids = (order[at : at + BATCH] for order in orders for at in range(0, num_samples, BATCH))
    buffers = np.ones((AHEAD + 1, num_threads, BATCH // num_threads * BLOB_BYTES), np.uint8)
    pending: deque = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        for number, batch in enumerate(ids):
            parts = zip(np.split(batch, num_threads), buffers[number % len(buffers)], strict=True)
            pending.append([pool.submit(fill, *part) for part in parts])
            if len(pending) == AHEAD:
                yield [part.result() for part in pending.popleft()]


def copying(path: Path) -> Fill:
    """Return what copies samples out of a mapped file."""
    with path.open("rb") as file:
        source = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)

    def fill(ids: np.ndarray, buffer: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        places = [buffer[at * BLOB_BYTES :][:BLOB_BYTES] for at in range(len(ids))]
        for place, i in zip(places, ids.tolist(), strict=True):
            place[:] = source[i * BLOB_BYTES :][:BLOB_BYTES]
        return places, ids

    return fill


def reading(path: Path, *, direct: bool) -> Fill:
    """Return what reads samples' ranges; direct reads take whole pages, the range is copied out."""
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    if not direct:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def fill(ids: np.ndarray, buffer: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        places = [buffer[at * BLOB_BYTES :][:BLOB_BYTES] for at in range(len(ids))]
        pages = memoryview(mmap.mmap(-1, BLOB_BYTES + 3 * PAGE))
        for place, i in zip(places, ids.tolist(), strict=True):
            start = i * BLOB_BYTES
            if direct:
                low = start // PAGE * PAGE
                size = -(-(start + BLOB_BYTES - low) // PAGE) * PAGE
                os.preadv(descriptor, [pages[:size]], low)
                place[:] = pages[start - low :][:BLOB_BYTES]
            else:
                os.preadv(descriptor, [place.data], start)
        return places, ids

    return fill


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Way]:
    number = options.samples // BATCH * BATCH
    size_bytes = number * (BLOB_BYTES + PAGE)  # labels and headers may take room, too
    write_shards(folder / "plain", labelled("bin", blobs(number)))
    write_packed(folder / "packed", number)
    plain, packed = penstock.open(folder / "plain"), penstock.open(folder / "packed")
    more = {
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "output": "numpy",
        "look_ahead": AHEAD * BATCH * BLOB_BYTES,
    }
    more |= under_test.workers(options.workers)
    with (
        penstock.Loader(plain, **more) as from_plain,
        penstock.Loader(packed, **more) as from_packed,
        penstock.Loader(plain, tiers=[penstock.Memory(size_bytes)], **more) as memory,
        penstock.Loader(plain, tiers=[penstock.Disk(folder, size_bytes)], **more) as disk,
    ):
        first = Way(lambda: iter(from_packed))
        first.turn(number, epochs=1)
        ways = {
            "plain tar": Way(lambda: iter(from_plain)),
            "packed": Way(lambda: iter(from_packed)),
            "memory tier": Way(lambda: iter(memory)),
            "disk tier": Way(lambda: iter(disk)),
        }
        for way in ways.values():
            way.turn(number)  # fills tiers, maps files
            way.seconds.clear(), way.cpu_s.clear()
        in_memory, on_disk = (Path(x.stats().tiers[0].folder) / "data" for x in (memory, disk))
        ways["disk tier, cold"] = Way(lambda: iter(disk), partial(drop, on_disk))
        ways |= limits(in_memory, on_disk, number)
        read_bytes = [loader.stats().store_bytes for loader in (memory, disk)]
        for _ in range(options.rounds):
            for way in ways.values():
                way.turn(number)
        assert read_bytes == [loader.stats().store_bytes for loader in (memory, disk)]
    return {"packed, first": first} | ways


def limits(in_memory: Path, on_disk: Path, number: int) -> dict[str, Way]:
    copy = copying(in_memory)
    cold = {"buffered": reading(on_disk, direct=False), "direct": reading(on_disk, direct=True)}
    return {
        **{f"limit, {n} copying": Way(partial(filled, copy, number, n)) for n in (1, 2)},
        **{
            f"cold limit, {n} {how}": Way(
                partial(filled, cold[how], number, n), partial(drop, on_disk)
            )
            for n, how in ((4, "buffered"), (16, "buffered"), (16, "direct"))
        },
    }


def report(ways: dict[str, Way]) -> None:
    best = {
        word: min(median(way.seconds) for name, way in ways.items() if name.startswith(word))
        for word in ("limit", "cold limit")
    }
    print(f"{'':28}{'samples/s':>10}{'GB/s':>7}{'of limit':>10}{'CPU us a sample':>17}")
    for name, way in ways.items():
        seconds = median(way.seconds)
        limit = best["cold limit" if "cold" in name else "limit"]
        print(
            f"{name:28}{1 / seconds:10,.0f}{BLOB_BYTES / seconds / 1e9:7.2f}"
            f"{limit / seconds:10.2f}{1e6 * median(way.cpu_s):17.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--workers", default="auto", help="the option of that name of Loader")
    parser.add_argument("--disk", type=Path, help="where the disk tier lies; not a tmpfs")
    options = parser.parse_args()
    os.environ.setdefault("PENSTOCK_NODE", "none")
    with tempfile.TemporaryDirectory(dir=options.disk) as folder:
        os.environ["PENSTOCK_CACHE"] = str(Path(folder) / "cache")
        ways = measure(Path(folder), options)
    report(ways)


if __name__ == "__main__":
    main()
