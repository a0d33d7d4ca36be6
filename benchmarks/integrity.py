"""What do the checks of every read cost a loop that uses its data?

    python -m benchmarks.integrity [--samples 4096] [--rounds 5]

Images' worth of bytes (110 KB) with a label beside each, from local files and from tiers, with a
loop that adds up every page. Each way takes turns with the limit: the same bytes copied out of a
mapped file by one thread, in the same kind of order, and added up by the same loop. `CPU` is
processor time of all threads. Ways:

* plain tar: size and time of the file are compared after each piece of a batch;
* packed, first: every sample is compared with its checksum, once in a process;
* packed, later: as plain tar;
* memory tier, disk tier: every read is compared with the checksum of its unit.
"""

import argparse
import io
import mmap
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np

import penstock

BLOB_BYTES, NUM_SHARDS, BATCH, PAGE = 110_000, 4, 256, 4096


def samples(count: int) -> Iterator[dict[str, object]]:
    rng = np.random.default_rng(0)
    for i in range(count):
        yield {"bin": rng.bytes(BLOB_BYTES), "cls": i % 1000}


def write_plain(folder: Path, count: int) -> None:
    folder.mkdir()
    made = samples(count)
    for shard in range(NUM_SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for i in range(count // NUM_SHARDS):
                for name, value in next(made).items():
                    data = value if isinstance(value, bytes) else str(value).encode()
                    member = tarfile.TarInfo(f"{shard}-{i:05}.{name}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))


def write_packed(folder: Path, count: int) -> None:
    with penstock.Writer(folder, shard_size="200MB") as writer:
        for sample in samples(count):
            writer.write(sample)


def used(values: object) -> int:
    """Add up one byte of every page, as a copy to a device or an augmentation would touch them."""
    return sum(int(np.frombuffer(value, np.uint8)[::PAGE].sum()) for value in values)


class Way:
    """One way to go through all samples; measured an epoch at a time."""

    def __init__(self, epoch: Callable[[], int]) -> None:
        self._epoch = epoch
        self.seconds: list[float] = []
        self.cpu_s: list[float] = []

    def turn(self) -> None:
        begin, cpu = time.perf_counter(), time.process_time()
        assert self._epoch() > 0
        self.seconds.append(time.perf_counter() - begin)
        self.cpu_s.append(time.process_time() - cpu)


def loaded(loader: penstock.Loader) -> Callable[[], int]:
    """Return an epoch of a loader that goes on from epoch to epoch."""
    return lambda: sum(used(batch["bin"]) for batch in loader)


def copied(folder: Path, count: int) -> Callable[[], int]:
    """Return the limit: samples copied from maps into one buffer, in a random order."""
    maps = []
    for path in sorted(folder.glob("*.tar")):
        with path.open("rb") as file:
            maps.append(np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8))
    buffer = np.empty((BATCH, BLOB_BYTES), np.uint8)
    rng = np.random.default_rng(1)

    def epoch() -> int:
        total, order = 0, rng.permutation(count)
        each = count // NUM_SHARDS
        stride = min(len(m) for m in maps) // each
        for start in range(0, count, BATCH):
            rows = order[start : start + BATCH].tolist()
            for row, i in enumerate(rows):
                at = i % each * stride
                buffer[row] = maps[i // each][at : at + BLOB_BYTES]
            total += used(buffer[: len(rows)])
        return total

    return epoch


def measure(folder: Path, count: int, rounds: int, threads: int | None) -> dict[str, Way]:
    write_plain(folder / "plain", count)
    write_packed(folder / "packed", count)
    for name in ("memory", "disk"):
        (folder / name).mkdir()
    options = {"batch_size": BATCH, "output": "numpy", "threads": threads}
    plain, packed = penstock.open(folder / "plain"), penstock.open(folder / "packed")
    memory = penstock.Memory("4GB", folder=Path("/dev/shm"))
    disk = penstock.Disk(folder / "disk", "4GB")
    with (
        penstock.Loader(plain, **options) as from_plain,
        penstock.Loader(packed, **options) as from_packed,
        penstock.Loader(plain, tiers=[memory], **options) as from_memory,
        penstock.Loader(plain, tiers=[disk], **options) as from_disk,
    ):
        first = Way(loaded(from_packed))
        first.turn()
        ways = {
            "limit": Way(copied(folder / "plain", count)),
            "plain tar": Way(loaded(from_plain)),
            "packed, later": Way(loaded(from_packed)),
            "memory tier": Way(loaded(from_memory)),
            "disk tier": Way(loaded(from_disk)),
        }
        for way in ways.values():
            way.turn()  # fills tiers, maps files
            way.seconds.clear(), way.cpu_s.clear()
        for _ in range(rounds):
            for way in ways.values():
                way.turn()
    return {"packed, first": first} | ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    os.environ.setdefault("PENSTOCK_NODE", "none")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PENSTOCK_CACHE"] = f"{folder}/cache"
        ways = measure(Path(folder), options.samples, options.rounds, options.threads)
    limit = median(ways["limit"].seconds)
    print(f"{'':16}{'samples/s':>12}{'of limit':>10}{'CPU us a sample':>17}")
    for name, way in ways.items():
        seconds, cpu_s = median(way.seconds), median(way.cpu_s)
        print(
            f"{name:16}{options.samples / seconds:12,.0f}{limit / seconds:10.2f}"
            f"{1e6 * cpu_s / options.samples:17.1f}"
        )


if __name__ == "__main__":
    main()
