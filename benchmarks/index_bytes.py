"""How many bytes does a store serve to index a tar set, and to read it for the first time?

    python -m benchmarks.index_bytes [--megabytes 48] [--members 1500,110000,2000000]
                                     [--latencies 0,20] [--rows]

A real S3 server behind a shaper that counts. `open` is what indexing reads, as a share of the set;
`+ epoch` adds the first epoch. With tiers that hold the set, what indexing reads is kept for them,
so both together should take 1. With `--rows`: three epochs of rows of 200 to 2,000 bytes, by the
size of the cache, over the bound that `loader.stats()` prints.
"""

import argparse
import io
import os
import tarfile
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from testkit.shaper import Fixed, Shape, Shaper

import penstock
from penstock.storage.locate import open_store
from penstock.testing.servers import S3Access, SeaweedServer

SHARDS = 8
BANDWIDTH_BYTES_S = 400e6
SHARES = (0.0, 0.1, 0.25, 0.5, 0.9)


def shards(sizes: np.ndarray) -> Iterator[bytes]:
    """Yield tars of members of some sizes, a label beside each."""
    rng = np.random.default_rng(0)
    for numbers in np.array_split(np.arange(len(sizes)), SHARDS):
        with io.BytesIO() as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
                for i in numbers.tolist():
                    for name, data in (("bin", rng.bytes(int(sizes[i]))), ("cls", b"%d" % i)):
                        member = tarfile.TarInfo(f"{i:07}.{name}")
                        member.size = len(data)
                        archive.addfile(member, io.BytesIO(data))
            yield file.getvalue()


def uploaded(access: S3Access, sizes: np.ndarray) -> tuple[str, int]:
    """Return where a set lies, and how many bytes its objects have."""
    uri = f"{access.create_bucket(f'set-{uuid.uuid4().hex}').rstrip('/')}/"
    store, total = open_store(uri, access.options), 0
    for number, data in enumerate(shards(sizes)):
        store.write(f"x-{number:03}.tar", data)
        total += len(data)
    return uri, total


@contextmanager
def shaped(access: S3Access, latency_s: float) -> Iterator[tuple[Shaper, dict]]:
    """Give the server a latency, and a run a cache and a tier's folder of its own."""
    shape = Shape(latency=Fixed(latency_s), bandwidth_bytes_s=BANDWIDTH_BYTES_S)
    with tempfile.TemporaryDirectory() as folder, Shaper(access.endpoint, shape) as shaper:
        os.environ["PENSTOCK_CACHE"] = f"{folder}/cache"
        Path(folder, "tier").mkdir()
        yield (
            shaper,
            {
                "folder": f"{folder}/tier",
                "store": replace(access.options, endpoint=shaper.endpoint),
            },
        )


def first_time(access: S3Access, size: int, total_bytes: int, latency_s: float) -> None:
    sizes = np.full(max(SHARDS, total_bytes // size), size)
    for with_tiers in (False, True):
        uri, total = uploaded(access, sizes)  # The index lies beside it: each run has its own.
        with shaped(access, latency_s) as (shaper, found):
            tiers = [penstock.Disk(found["folder"], 2 * total)] if with_tiers else []
            begin, before = time.perf_counter(), shaper.counts()
            dataset = penstock.open(uri, store=found["store"], tiers=tiers)
            seconds, opened = time.perf_counter() - begin, shaper.counts() - before
            with penstock.Loader(dataset, batch_size=64, tiers=tiers) as loader:
                for _ in loader:
                    pass
            both = shaper.counts() - before
        print(
            f"| {size:,} | {latency_s * 1e3:.0f} ms | {'yes' if with_tiers else 'no'} "
            f"| {opened.body_bytes / total:.3f} | {opened.requests:,} | {seconds:.2f} "
            f"| {both.body_bytes / total:.3f} |",
            flush=True,
        )


def rows(access: S3Access, total_bytes: int) -> None:
    rng = np.random.default_rng(1)
    sizes = rng.integers(200, 2000, total_bytes // 2600)
    uri, total = uploaded(access, sizes)
    for share in SHARES:
        with shaped(access, 0.001) as (shaper, found):
            dataset = penstock.open(uri, store=found["store"])
            tiers = [penstock.Disk(found["folder"], int(share * total))] if share else []
            before = shaper.counts()
            with penstock.Loader(dataset, batch_size=256, epochs=3, tiers=tiers) as loader:
                for _ in loader:
                    pass
            served = shaper.counts() - before
            bound = loader.stats().bound_bytes or 1
        print(
            f"| {share:.0%} | {served.body_bytes / bound:.3f} | {served.requests:,} |", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=48)
    parser.add_argument("--members", default="1500,110000,2000000")
    parser.add_argument("--latencies", default="0,20", help="milliseconds")
    parser.add_argument("--rows", action="store_true")
    given = parser.parse_args()
    total_bytes = given.megabytes * 1_000_000
    with SeaweedServer() as access:
        if given.rows:
            print("| cache | bytes over the bound | requests |\n|---:|---:|---:|")
            rows(access, total_bytes)
            return
        print("| member bytes | latency | tiers | open | requests | seconds | + epoch |")
        print("|---:|---:|---|---:|---:|---:|---:|")
        for size in map(int, given.members.split(",")):
            for latency in map(float, given.latencies.split(",")):
                first_time(access, size, total_bytes, latency / 1e3)


if __name__ == "__main__":
    main()
