"""What does a sample with several fields cost, from mapped files to a loop that uses its data?

    python -m benchmarks.fields [--quick] [--rounds 5] [--seconds 1] [--cases label,json] [--json F]

Batches of 256 are made in this process, and the loop touches every page of every value. Limit: the
same loop over values of the same sizes, copied out of a mapped file into a reused buffer by one
thread or by two, whichever is better; nothing is decoded but images. `penstock` and limit take
turns; each number is a median, and a ratio is one of the same round. CPU time is that of all
threads, the loop's own included.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 256
PAGE = 4096
IMAGE = (240, 240, 3)
JPEG = b""
CASES = ("bytes", "label", "json", "small", "image", "table", "rows")


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

    global JPEG
    noise = np.random.default_rng(0).integers(0, 256, (12, 12, 3), np.uint8)
    pixels = np.ascontiguousarray(noise.repeat(20, 0).repeat(20, 1))
    JPEG = simplejpeg.encode_jpeg(pixels, 85)
    with tarfile.open(folder / "0.tar", "w") as archive:
        for i in range(num_samples):
            add(archive, f"{i:06}.jpg", JPEG)
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
        return make_images(folder, max(BATCH, 1024 // scale))
    if case == "table":
        return make_table(folder, 65536 // scale)
    if case == "rows":
        return make_rows(folder, 131072 // scale)
    if case == "small":
        return make_blobs(folder, "cls", 32768 // scale, 1000)
    second = {"bytes": "", "label": "cls", "json": "json"}[case]
    return make_blobs(folder, second, 8192 // scale)


def touched(value: Any) -> int:
    """Read a byte of every page of a value, as a loop that uses it would."""
    if isinstance(value, list):
        return sum(map(touched, value))
    if not isinstance(value, np.ndarray):
        return len(value) if hasattr(value, "__len__") else 0
    if value.nbytes <= PAGE:
        return int(value.flat[0]) if value.size else 0
    return int(value.reshape(-1).view(np.uint8)[::PAGE].max())


def batches(case: str, folder: Path) -> Iterator[Any]:
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
    return iter(loader)


def limit(case: str, sizes: list[int], folder: Path, num_threads: int) -> Iterator[Any]:
    """Yield batches of copies of the same sizes, in a random order."""
    ends = np.cumsum(sizes)
    path = folder / "limit"
    if not path.exists():
        path.write_bytes(np.ones(int(ends[-1]), np.uint8).tobytes())
    data = np.asarray(np.memmap(path, np.uint8, "r"))
    starts, stops = (ends - np.array(sizes)).tolist(), ends.tolist()
    pool = ThreadPoolExecutor(num_threads)
    buffers = [np.ones(BATCH * max(sizes), np.uint8) for _ in range(2 * num_threads + 1)]
    rng = np.random.default_rng(1)

    def fill(ids: np.ndarray, buffer: np.ndarray) -> Any:
        if case == "rows":
            out = buffer.reshape(BATCH, -1)
            return {"data": data.reshape(-1, sizes[0]).take(ids, axis=0, out=out, mode="clip")}
        if case == "image":
            return {"data": decoded_images(buffer.reshape(BATCH, *IMAGE))}
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

    return stream()


def decoded_images(out: np.ndarray) -> np.ndarray:
    import simplejpeg

    for row in out:
        simplejpeg.decode_jpeg(JPEG, "RGB", buffer=row)
    return out


def rate(stream: Iterator[Any], seconds: float) -> tuple[float, float]:
    """Return samples a second, and the CPU time of all threads for each in microseconds."""
    next(stream)
    begin, cpu, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - begin < seconds:
        batch = next(stream)
        for value in batch.values():
            touched(value)
        del batch, value
        count += BATCH
    wall = time.perf_counter() - begin
    return count / wall, (time.process_time() - cpu) / count * 1e6


def measure(case: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    sizes = make(case, folder, 8 if options.quick else 1)
    rows = {"penstock": batches(case, folder)}
    rows |= {f"limit, {n} threads": limit(case, sizes, folder.parent, n) for n in (1, 2)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
    for _ in range(options.rounds):
        for name, stream in rows.items():
            found[name].append(rate(stream, options.seconds))
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
