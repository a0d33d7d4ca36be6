"""What does an index of 10^8 samples cost to open and to look into, when nothing of it is computed?

    python -m benchmarks.index [--samples 100000000] [--keep]

Writes an index with an offset, a length and a member table for every sample (tar shards that need
not exist), then opens it in a fresh process. The limits: one second, and 100 MB of memory beyond
what Python and NumPy take.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import xxhash

SAMPLES_PER_SHARD = 10_000
SAMPLE_BYTES = 110_000

LOOK = """
import json, resource, sys, time
import numpy as np
import penstock
def rss(): return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before, begin = rss(), time.perf_counter()
dataset = penstock.open(sys.argv[1])
num_samples = len(dataset)
opened_s, opened = time.perf_counter() - begin, rss()
begin = time.perf_counter()
loader = penstock.Loader(dataset, batch_size=256, seed=7)
ids = loader.order.ids(3, num_samples // 2, num_samples // 2 + 256)
extents = dataset.bound[0].part.tables[0].extents(ids)
seek_s = time.perf_counter() - begin
rng = np.random.default_rng(0)
begin = time.perf_counter()
for _ in range(1000):
    dataset.bound[0].part.tables[0].extents(rng.integers(0, num_samples, 256))
look_s = (time.perf_counter() - begin) / 1000
print(json.dumps({"samples": num_samples, "open_s": opened_s, "open_bytes": opened - before,
                  "seek_s": seek_s, "look_s": look_s, "look_bytes": rss() - before}))
"""


def write(path: Path, num_samples: int) -> None:
    from penstock.dataset.fields import Field
    from penstock.dataset.part import Rows, make_part
    from penstock.storage.base import ObjectInfo

    shards = -(-num_samples // SAMPLES_PER_SHARD)
    counts = np.full(shards, SAMPLES_PER_SHARD)
    counts[-1] = num_samples - SAMPLES_PER_SHARD * (shards - 1)
    size = SAMPLES_PER_SHARD * SAMPLE_BYTES
    inside = np.arange(num_samples, dtype=np.int64) % SAMPLES_PER_SHARD
    part = make_part(
        format="tar",
        fields=[Field(name="jpg", encoding="jpg")],
        tables=[
            Rows(
                objects=[
                    ObjectInfo(key=f"shard-{i:06}.tar", size_bytes=size) for i in range(shards)
                ],
                counts=counts,
                addressing="extents",
                columns={
                    "offset": inside * SAMPLE_BYTES,
                    "length": np.full(num_samples, SAMPLE_BYTES - 1024),
                },
            )
        ],
        members=(
            np.zeros((num_samples, 1), np.uint32),
            np.full((num_samples, 1), SAMPLE_BYTES - 1024, np.uint32),
        ),
    )
    part.save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(".peers/index"))
    parser.add_argument("--keep", action="store_true", help="leave the index there")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"{options.samples}.idx"
    if not path.exists():
        begin = time.perf_counter()
        write(path, options.samples)
        print(f"written in {time.perf_counter() - begin:.0f} s: {path.stat().st_size / 1e9:.2f} GB")
    name = xxhash.xxh3_128_hexdigest(np.memmap(path, np.uint8, "r"))
    path = path.rename(path.with_name(f"{name}.idx"))
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PENSTOCK_CACHE": cache}
        command = [sys.executable, "-c", LOOK, str(path)]
        first, *rows = [
            json.loads(subprocess.check_output(command, env=environment))
            for _ in range(options.rounds + 1)
        ]
    middle = {name: float(np.median([r[name] for r in rows])) for name in rows[0]}
    print(f"samples                       {middle['samples']:,.0f}")
    print(f"first open, verified          {first['open_s'] * 1e3:.0f} ms")
    print(f"open                          {middle['open_s'] * 1e3:.1f} ms      (limit 1000 ms)")
    print(f"memory after open             {middle['open_bytes'] / 1e6:.1f} MB      (limit 100 MB)")
    print(f"order and places at 50 %      {middle['seek_s'] * 1e3:.1f} ms")
    print(f"look up 256 random samples    {middle['look_s'] * 1e6:.0f} us")
    print(
        f"memory after 256,000 of them  {middle['look_bytes'] / 1e6:.1f} MB (mapped pages, shared)"
    )
    path = path.rename(path.with_name(f"{options.samples}.idx"))
    if not options.keep:
        path.unlink()


if __name__ == "__main__":
    main()
