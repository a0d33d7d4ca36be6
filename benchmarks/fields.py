"""What does a sample with several fields cost, from mapped files to a loop that uses its data?

    python -m benchmarks.fields [--quick] [--rounds 5] [--seconds 1] [--cases label,json] [--json F]

Batches of 256 are made in this process, and the loop touches every page of every value. Limit: the
same loop over the same bytes, copied from memory into a reused buffer by one thread or by two,
whichever is better, with nothing decoded. `penstock` and limit take turns; each number is a median.
"""

import argparse
import io
import json
import os
import statistics
import tarfile
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 256
PAGE = 4096
CASES = ("bytes", "label", "json", "image", "table", "rows")


def make_blobs(folder: Path, second: str, num_samples: int, size: int = 110_000) -> list[int]:
    """Write blobs of about one size into tars, with a small second member or none."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(size // 2, size * 3 // 2, num_samples).tolist()
    noise = rng.integers(0, 256, size * 2, np.uint8)
    for start in range(0, num_samples, 1024):
        with tarfile.open(folder / f"{start:06}.tar", "w") as archive:
            for i in range(start, min(start + 1024, num_samples)):
                add(archive, f"{i:06}.bin", noise[: sizes[i]].tobytes())
                if second:
                    text = {"cls": str(i % 1000), "json": json.dumps({"id": i, "tags": ["a", "b"]})}
                    add(archive, f"{i:06}.{second}", text[second].encode())
    return sizes


def make_images(folder: Path, num_samples: int) -> list[int]:
    """Write small photographs with a label; the limit counts their pixels."""
    import simplejpeg

    noise = np.random.default_rng(0).integers(0, 256, (12, 12, 3), np.uint8)
    pixels = np.ascontiguousarray(noise.repeat(20, 0).repeat(20, 1))
    with tarfile.open(folder / "0.tar", "w") as archive:
        for i in range(num_samples):
            add(archive, f"{i:06}.jpg", simplejpeg.encode_jpeg(pixels, 85))
            add(archive, f"{i:06}.cls", str(i % 1000).encode())
    return [pixels.nbytes] * num_samples


def make_table(folder: Path, num_samples: int) -> list[int]:
    """Write a Parquet table of numbers, lists of one size, bytes and texts."""
    import pyarrow as pa
    import pyarrow.parquet

    rng = np.random.default_rng(0)
    vectors = pa.array(rng.random(num_samples * 64, np.float32))
    table = pa.table(
        {
            "id": np.arange(num_samples),
            "score": rng.random(num_samples),
            "vector": pa.FixedSizeListArray.from_arrays(vectors, 64),
            "blob": [rng.bytes(1000) for _ in range(num_samples)],
            "text": [f"the text of sample {i}" for i in range(num_samples)],
        }
    )
    pa.parquet.write_table(table, folder / "0.parquet", row_group_size=4096)
    return [8 + 8 + 256 + 1000 + 24] * num_samples


def make_rows(folder: Path, num_samples: int) -> list[int]:
    """Write rows of 1024 tokens."""
    rows = np.arange(num_samples * 1024, dtype=np.int32).reshape(-1, 1024)
    np.save(folder / "rows.npy", rows)
    return [4096] * num_samples


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def make(case: str, folder: Path, scale: int) -> list[int]:
    """Write the files of a case; return the bytes of each sample in a batch."""
    if case == "image":
        return make_images(folder, 1024 // scale)
    if case == "table":
        return make_table(folder, 65536 // scale)
    if case == "rows":
        return make_rows(folder, 131072 // scale)
    second = {"bytes": "", "label": "cls", "json": "json"}[case]
    return make_blobs(folder, second, 8192 // scale)


def touched(value: Any) -> int:
    """Read a byte of every page of a value, as a loop that uses it would."""
    if isinstance(value, np.ndarray):
        flat = value.reshape(-1).view(np.uint8)
        return int(flat[::PAGE].max()) if len(flat) else 0
    if isinstance(value, list):
        return sum(map(touched, value))
    return len(value) if hasattr(value, "__len__") else 0


def batches(case: str, folder: Path) -> Callable[[int], Iterator[Any]]:
    import penstock

    dataset = penstock.open(folder)
    loader = penstock.Loader(
        dataset,
        batch_size=BATCH,
        epochs=None,
        output="numpy",
        drop_last=True,
        shuffle="blocks" if case == "table" else "global",
    )
    stream = iter(loader)
    return lambda _: stream


def limit(sizes: list[int], num_threads: int) -> Callable[[int], Iterator[Any]]:
    """Copies of the same sizes, in another order each time."""
    ends = np.cumsum(sizes)
    data = np.ones(int(ends[-1]), np.uint8)
    starts, stops = (ends - np.array(sizes)).tolist(), ends.tolist()
    pool = ThreadPoolExecutor(num_threads)
    buffers = [np.ones(BATCH * max(sizes), np.uint8) for _ in range(2 * num_threads + 1)]
    same = len(set(sizes)) == 1
    matrix = data.reshape(-1, sizes[0]) if same else data
    rng = np.random.default_rng(1)

    def fill(ids: np.ndarray, buffer: np.ndarray) -> Any:
        if same:
            out = buffer.reshape(BATCH, -1)
            return {"data": matrix.take(ids, axis=0, out=out, mode="clip")}
        made, at = [], 0
        for i in ids.tolist():
            stop = at + stops[i] - starts[i]
            view = buffer[at:stop]
            view[:] = data[starts[i] : stops[i]]
            made.append(view)
            at = stop
        return {"data": made}

    def stream() -> Iterator[Any]:
        pending: deque[Any] = deque()
        number = 0
        while True:
            order = rng.permutation(len(sizes))
            for at in range(0, len(order) - BATCH + 1, BATCH):
                buffer = buffers[number % len(buffers)]
                number += 1
                pending.append(pool.submit(fill, order[at : at + BATCH], buffer))
                if len(pending) == len(buffers) - 1:
                    yield pending.popleft().result()

    running = stream()
    return lambda _: running


def rate(stream: Iterator[Any], seconds: float) -> tuple[float, float]:
    """Return samples a second, and the CPU time of all threads for each in microseconds."""
    next(stream)
    begin, cpu, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - begin < seconds:
        batch = next(stream)
        for value in batch.values():
            touched(value)
        count += BATCH
    wall = time.perf_counter() - begin
    return count / wall, (time.process_time() - cpu) / count * 1e6


def measure(case: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    sizes = make(case, folder, 8 if options.quick else 1)
    rows = {"penstock": batches(case, folder)}
    rows |= {f"limit, {n} threads": limit(sizes, n) for n in (1, 2)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
    for number in range(options.rounds):
        for name, start in rows.items():
            found[name].append(rate(start(number), options.seconds))
    medians = {name: statistics.median(r for r, _ in found[name]) for name in rows}
    best = max(medians, key=lambda name: medians[name] if name != "penstock" else 0.0)
    ratios = [a / b for (a, _), (b, _) in zip(found["penstock"], found[best], strict=True)]
    return {
        "penstock": medians["penstock"],
        "limit": medians[best],
        "ratio": statistics.median(ratios),
        "cpu_us": statistics.median(c for _, c in found["penstock"]),
        "limit_cpu_us": statistics.median(c for _, c in found[best]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a window")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--quick", action="store_true", help="small sets, one short round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 1, 0.2
    report = {}
    print(f"{'case':8} {'samples/s':>11} {'limit':>11} {'ratio':>6} {'CPU µs':>8} {'limit µs':>9}")
    for case in options.cases.split(","):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["PENSTOCK_CACHE"] = f"{folder}/cache"
            data = Path(folder) / "data"
            data.mkdir()
            found = report[case] = measure(case, data, options)
        print(
            f"{case:8} {found['penstock']:11,.0f} {found['limit']:11,.0f} {found['ratio']:6.2f} "
            f"{found['cpu_us']:8.1f} {found['limit_cpu_us']:9.1f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
