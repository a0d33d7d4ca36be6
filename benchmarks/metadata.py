"""What do the tiers of a node cost a process that opens a data set of 10^9 samples?

    python -m benchmarks.metadata [--samples 100000000] [--sample-bytes 66000] [--kind extents]

Writes an index (shards that need not exist), then opens it in a fresh process, opens a tier as one
node of several does, gives it one span of eight, and asks for the places of random samples. Shown
are seconds, and the memory that belongs to the process alone, beside the bytes of the index; the
states of units lie in a mapped file that all processes of a node share.

`extents` has an offset and a length for every sample, `blocks` for every 50 samples, `even` none.
With `--kept` the units are kept in memory whatever their number, as for a small data set.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

SAMPLES_PER_SHARD = 10_000
SAMPLES_PER_BLOCK = 50
CHUNK_SHARDS = 1_000

LOOK = """
import json, sys, time
import numpy as np
import penstock
from penstock.flow.layout import cuts, units as units_module
from penstock.flow.layout.placement import layout_of
from penstock.flow.layout.units import Units
from penstock.storage.tier_open import open_tiers
from penstock.storage.tier_shape import TierShape
from penstock.storage.tier_sizes import Disk, Memory
path, kind, folder, is_kept = sys.argv[1:5]
if is_kept == "kept":
    cuts.SAMPLES_MAX = units_module.UNITS_MAX = 2**60
def private_bytes():
    rows = [r.split() for r in open("/proc/self/smaps_rollup").read().splitlines()[1:]]
    return 1024 * next(int(r[1]) for r in rows if r[0] == "Anonymous:")
steps, before, begin = {}, private_bytes(), time.perf_counter()
def done(name):
    global begin
    steps[name] = [time.perf_counter() - begin, private_bytes() - before]
    begin = time.perf_counter()
dataset = penstock.open(path)
done("open")
units = Units.of(dataset)
done("units")
layout = layout_of(units)
done("layout")
shape = TierShape(name=units.name, offsets=layout.offsets, lengths=layout.lengths,
                  known=layout.known)
wish = Memory("64MB", folder=folder) if kind == "memory" else Disk(folder, "64MB")
tiers = open_tiers([wish], shape, placed=False)
done("open_tiers")
span_bytes = 2**16
while layout.size_bytes // span_bytes + 1 > 2**18:
    span_bytes *= 2
spans = np.arange(layout.size_bytes // span_bytes + 1) % 8 == 3
tiers.place(span_bytes, spans)
done("place")
rng = np.random.default_rng(0)
looks = []
for _ in range(200):
    ids = rng.integers(0, len(dataset), 256)
    at = time.perf_counter()
    some, inside = units.locate(0, 0, ids)
    where = layout.offsets[some] + inside
    tiers.tier_of(some), tiers.held(some), layout.lengths[some]
    looks.append(time.perf_counter() - at)
done("look up 51,200 samples")
print(json.dumps({"steps": steps, "num_units": units.num_units, "size_bytes": layout.size_bytes,
                  "tiers": len(tiers.tiers), "look_s": float(np.median(looks)),
                  "is_computed": units.is_computed}))
tiers.close()
"""


def columns_of(options: argparse.Namespace) -> dict[str, tuple[str, int, Iterator[np.ndarray]]]:
    """Return the columns of an index: type, length, and the numbers, some at a time."""
    shards = options.samples // SAMPLES_PER_SHARD
    every = options.sample_bytes + (0 if options.kind == "even" else 512)
    size = SAMPLES_PER_SHARD * every
    one = np.arange(SAMPLES_PER_SHARD) * every

    def again(values: np.ndarray, dtype: str) -> Iterator[np.ndarray]:
        many = np.tile(values.astype(dtype), min(shards, CHUNK_SHARDS))
        for at in range(0, shards, CHUNK_SHARDS):
            yield many[: len(values) * min(CHUNK_SHARDS, shards - at)]

    def once(values: np.ndarray) -> Iterator[np.ndarray]:
        yield values

    keys = b"".join(f"{i:06}.tar".encode() for i in range(shards))
    narrow = "<u4" if size < 2**32 else "<u8"
    blocks = SAMPLES_PER_SHARD // SAMPLES_PER_BLOCK
    table: dict[str, tuple[str, int, Iterator[np.ndarray]]] = {
        "object.key.bytes": ("|u1", len(keys), once(np.frombuffer(keys, np.uint8))),
        "object.key.ends": ("<u8", shards, once(np.arange(1, shards + 1, dtype="<u8") * 10)),
        "object.etag.bytes": ("|u1", 0, once(np.empty(0, np.uint8))),
        "object.etag.ends": ("<u8", shards, once(np.zeros(shards, "<u8"))),
        "object.size": ("<i8", shards, once(np.full(shards, size, "<i8"))),
        "object.mtime_ns": ("<i8", shards, once(np.zeros(shards, "<i8"))),
        "object.first": (
            "<i8",
            shards + 1,
            once(np.arange(shards + 1, dtype="<i8") * SAMPLES_PER_SHARD),
        ),
    }
    if options.kind == "extents":
        length = np.full(SAMPLES_PER_SHARD, options.sample_bytes)
        table["offset"] = (narrow, options.samples, again(one, narrow))
        table["length"] = ("<u4", options.samples, again(length, "<u4"))
    elif options.kind == "even":
        for name, value in {"base": 0, "stride": every, "width": every}.items():
            table[name] = ("<i8", shards, once(np.full(shards, value, "<i8")))
    else:
        count = blocks * shards
        length = np.full(blocks, SAMPLES_PER_BLOCK * every)
        first = np.arange(count + 1, dtype="<i8") * SAMPLES_PER_BLOCK
        table["block.first"] = ("<i8", count + 1, once(first))
        table["block.object"] = (
            "<u4",
            count,
            once(np.repeat(np.arange(shards, dtype="<u4"), blocks)),
        )
        table["block.offset"] = (narrow, count, again(one[::SAMPLES_PER_BLOCK], narrow))
        table["block.length"] = ("<u4", count, again(length, "<u4"))
    return {f"t0.{name}": column for name, column in table.items()}


def write(path: Path, options: argparse.Namespace) -> None:
    """Write a column file piece by piece: it may be larger than memory (docs: index_format)."""
    columns, places, end = columns_of(options), {}, 0
    for name, (dtype, length, _) in columns.items():
        at = -(-end // 64) * 64
        places[name] = {"dtype": dtype, "shape": [length], "offset": at}
        end = at + np.dtype(dtype).itemsize * length
    formats = {"extents": "tar", "even": "npy", "blocks": "parquet"}
    meta = {
        "format": formats[options.kind],
        "fields": [{"name": "x", "encoding": "bin"}],
        "options": {},
        "tables": [options.kind],
        "fingerprint": f"{options.kind}-{options.samples}-{options.sample_bytes}",
    }
    head = msgspec.json.encode({"columns": places, "meta": meta, "data_bytes": end})
    prelude = b"PENSTOCK" + (1).to_bytes(4, "little") + len(head).to_bytes(4, "little") + head
    start = -(-len(prelude) // 64) * 64
    with path.open("wb") as file:
        file.write(prelude)
        for name, (_, _, pieces) in columns.items():
            file.seek(start + places[name]["offset"])
            for piece in pieces:
                piece.tofile(file)
        file.truncate(start + end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000_000)
    parser.add_argument("--sample-bytes", type=int, default=66_000)
    parser.add_argument("--kind", choices=("extents", "even", "blocks"), default="extents")
    parser.add_argument("--tier", choices=("memory", "disk"), default="memory")
    parser.add_argument("--folder", type=Path, default=Path(".peers/metadata"))
    parser.add_argument("--tier-folder", type=Path, default=None)
    parser.add_argument("--kept", action="store_true", help="keep all units in memory")
    parser.add_argument("--keep", action="store_true", help="leave the index there")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"{options.kind}-{options.samples}-{options.sample_bytes}.idx"
    if not path.exists():
        begin = time.perf_counter()
        write(path, options)
        print(f"written in {time.perf_counter() - begin:.0f} s")
    folder = options.tier_folder or (
        Path("/dev/shm") if options.tier == "memory" else options.folder
    )
    kept = "kept" if options.kept else "computed"
    command = [sys.executable, "-c", LOOK, str(path), options.tier, str(folder), kept]
    found = json.loads(subprocess.check_output(command))
    print(
        f"{options.samples:,} samples, {found['size_bytes'] / 1e12:.1f} TB, "
        f"{found['num_units']:,} unit numbers, {found['tiers']} tier; "
        f"index {path.stat().st_size / 1e9:.2f} GB"
    )
    for name, (seconds, private_bytes) in found["steps"].items():
        print(f"{name:24} {seconds:8.3f} s   private memory {private_bytes / 1e6:9.1f} MB")
    print(f"places of 256 samples    {found['look_s'] * 1e3:8.2f} ms")
    if not options.keep:
        path.unlink()


if __name__ == "__main__":
    main()
