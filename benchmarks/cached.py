"""How fast are epochs that the tiers hold, from memory and from a disk whose pages are dropped?

    python -m benchmarks.cached [--rounds 5] [--disk FOLDER] [--samples 12288]

Limits, measured in turns with the loader over the same bytes in the same kind of order:

* memory: copying each sample out of a mapped tmpfs file into reused buffers, one thread or two,
  whichever is better;
* disk: reading each sample's range of the tier's own file at random, buffered and direct, by 4 and
  16 threads, whichever is best; and, for what the device can do, the whole file in order.
"""

import argparse
import io
import mmap
import os
import shutil
import tarfile
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

import penstock

BLOB_BYTES, NUM_SHARDS, BATCH = 110_000, 8, 256
PAGE = 4096


def write(folder: Path, num_samples: int) -> penstock.Dataset:
    rng = np.random.default_rng(0)
    for shard in range(NUM_SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for i in range(num_samples // NUM_SHARDS):
                member = tarfile.TarInfo(f"{shard}-{i:05}.bin")
                member.size = BLOB_BYTES
                archive.addfile(member, io.BytesIO(rng.bytes(BLOB_BYTES)))
    return penstock.open(folder)


def drop(path: Path) -> None:
    """Let the kernel forget the pages of a file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def epoch_s(loader: penstock.Loader) -> float:
    """Return the seconds of an epoch, from a few at a stretch."""
    begin = time.perf_counter()
    for _ in loader:
        pass
    return (time.perf_counter() - begin) / loader.epochs


def cold_epoch_s(loader: penstock.Loader, path: Path) -> float:
    """Return the seconds of an epoch whose pages are dropped before it begins, each time anew."""
    seconds, batches = 0.0, iter(loader)
    per_epoch = len(loader) // loader.epochs
    for _ in range(loader.epochs):
        drop(path)
        begin = time.perf_counter()
        for _ in range(per_epoch):
            next(batches)
        seconds += time.perf_counter() - begin
    return seconds / loader.epochs


def shared_out(ids: list[int], num_threads: int, work: Callable[[list[int]], None]) -> float:
    """Return the seconds that threads take for all pieces, a batch's worth at a time."""
    batches = iter([ids[at : at + BATCH] for at in range(0, len(ids), BATCH)])
    lock = threading.Lock()

    def loop() -> None:
        while True:
            with lock:
                batch = next(batches, None)
            if batch is None:
                return
            work(batch)

    threads = [threading.Thread(target=loop) for _ in range(num_threads)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def copying_s(source: np.ndarray, ids: list[int], num_threads: int) -> float:
    # As a loader must: one in the making for each thread, one ready, one with the training loop.
    targets = deque(np.ones(BATCH * BLOB_BYTES, np.uint8) for _ in range(2 * num_threads + 1))

    def copy(batch: list[int]) -> None:
        target = targets.popleft()
        for at, i in enumerate(batch):
            start = i * BLOB_BYTES
            target[at * BLOB_BYTES :][:BLOB_BYTES] = source[start : start + BLOB_BYTES]
        targets.append(target)

    return shared_out(ids, num_threads, copy)


def reading_s(path: Path, ids: list[int], num_threads: int, direct: bool) -> float:
    """Read every sample's range at random; direct reads take whole pages and copy the range out."""
    drop(path)
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    local = threading.local()

    def read(batch: list[int]) -> None:
        if not hasattr(local, "pages"):
            local.pages = memoryview(mmap.mmap(-1, BLOB_BYTES + 3 * PAGE))
            local.target = memoryview(bytearray(BATCH * BLOB_BYTES))
        for at, i in enumerate(batch):
            start = i * BLOB_BYTES
            place = local.target[at * BLOB_BYTES :][:BLOB_BYTES]
            if direct:
                low = start // PAGE * PAGE
                size = -(-(start + BLOB_BYTES - low) // PAGE) * PAGE
                os.preadv(descriptor, [local.pages[:size]], low)
                place[:] = local.pages[start - low :][:BLOB_BYTES]
            else:
                os.preadv(descriptor, [place], start)

    if not direct:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    seconds = shared_out(ids, num_threads, read)
    os.close(descriptor)
    return seconds


def in_order_s(path: Path, size_bytes: int) -> float:
    drop(path)
    target = memoryview(mmap.mmap(-1, 4 << 20))
    begin = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        for _ in range(0, size_bytes, len(target)):
            file.readinto(target)
    return time.perf_counter() - begin


def measure(folder: Path, num_samples: int, rounds: int) -> dict[str, list[float]]:
    data = folder / "data"
    data.mkdir()
    dataset = write(data, num_samples)
    size_bytes = num_samples * BLOB_BYTES
    ids = np.random.default_rng(1).permutation(num_samples).tolist()
    common = {"batch_size": BATCH, "drop_last": True, "output": "numpy", "epochs": 3}
    seconds: dict[str, list[float]] = {}
    with (
        penstock.Loader(dataset, tiers=[penstock.Memory(size_bytes)], **common) as memory,
        penstock.Loader(dataset, tiers=[penstock.Disk(folder, size_bytes)], **common) as disk,
    ):
        for loader in (memory, disk):
            epoch_s(loader)
            assert loader.stats().tiers[0].held_bytes == size_bytes, loader.stats()
        in_memory, on_disk = (Path(x.stats().tiers[0].folder) / "data" for x in (memory, disk))
        with in_memory.open("rb") as file:
            mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        filled_bytes = disk.stats().store_bytes
        shutil.rmtree(data)  # From here on, everything is in the tiers.
        turns = {
            "memory: limit, 1 thread": lambda: copying_s(mapped, ids, 1),
            "memory: limit, 2 threads": lambda: copying_s(mapped, ids, 2),
            "memory: Penstock": lambda: epoch_s(memory),
            "disk: limit, buffered, 4 threads": lambda: reading_s(on_disk, ids, 4, False),
            "disk: limit, buffered, 16 threads": lambda: reading_s(on_disk, ids, 16, False),
            "disk: limit, direct, 16 threads": lambda: reading_s(on_disk, ids, 16, True),
            "disk: Penstock": lambda: cold_epoch_s(disk, on_disk),
            "disk: in order, 1 thread": lambda: in_order_s(on_disk, size_bytes),
        }
        for _ in range(rounds):
            for name, turn in turns.items():
                seconds.setdefault(name, []).append(turn())
        assert disk.stats().store_bytes == filled_bytes, "something was read from the source"
    return seconds


def report(seconds: dict[str, list[float]], size_bytes: int) -> None:
    for kind in ("memory", "disk"):
        limits = [v for k, v in seconds.items() if k.startswith(f"{kind}: limit")]
        best = [min(values) for values in zip(*limits, strict=True)]
        ours = seconds[f"{kind}: Penstock"]
        for name, values in seconds.items():
            if name.startswith(kind):
                print(f"{name:36} {size_bytes / median(values) / 1e9:6.2f} GB/s")
        ratios = [limit / own for limit, own in zip(best, ours, strict=True)]
        print(f"{kind}: {median(ratios):.2f} of the best limit of the same round\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=12_288)
    parser.add_argument("--disk", type=Path, help="where the disk tier lies; not a tmpfs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.disk) as folder:
        os.environ["PENSTOCK_CACHE"] = str(Path(folder) / "cache")
        seconds = measure(Path(folder), given.samples, given.rounds)
    report(seconds, given.samples * BLOB_BYTES)


if __name__ == "__main__":
    main()
