"""Which call copies many ranges of a mapped file into a batch fastest?

    python -m benchmarks.copy_ranges [--sizes 200,1000,4000,16000,110000] [--rounds 5]

Prints microseconds a range, of 256 ranges at random places, for one thread and for two at once.
Ways that need a compiler or a package that is not here are left out. The answer is used in
docs/decisions/0016-copying-many-ranges.md.
"""

# ruff: noqa: PLR0917 - the ways share one signature

import argparse
import ctypes
import importlib.util
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

NUM_RANGES = 256
FILE_BYTES = 512 << 20
C_SOURCE = """
#include <stdint.h>
#include <string.h>
void copy(char *target, const int64_t *starts, const char *source, const int64_t *offsets,
          const int64_t *lengths, int64_t n) {
  for (int64_t i = 0; i < n; i++) memcpy(target + starts[i], source + offsets[i], lengths[i]);
}
"""
Way = Callable[..., object]


def numpy_slices(target, starts, source, offsets, lengths, path):
    ranges = zip(starts.tolist(), offsets.tolist(), lengths.tolist(), strict=True)
    for at, start, length in ranges:
        target[at : at + length] = source[start : start + length]


def numpy_concatenate(target, starts, source, offsets, lengths, path):
    ranges = zip(offsets.tolist(), lengths.tolist(), strict=True)
    views = [source[start : start + length] for start, length in ranges]
    np.concatenate(views, out=target[: int(lengths.sum())])


def numpy_take(target, starts, source, offsets, lengths, path):
    places = np.arange(int(lengths.sum())) + np.repeat(offsets - starts, lengths)
    source.take(places, out=target[: len(places)], mode="clip")


def memoryviews(target, starts, source, offsets, lengths, path):
    to, of = target.data, source.data
    ranges = zip(starts.tolist(), offsets.tolist(), lengths.tolist(), strict=True)
    for at, start, length in ranges:
        to[at : at + length] = of[start : start + length]


def preadv(target, starts, source, offsets, lengths, path):
    file = os.open(path, os.O_RDONLY)
    to = target.data
    ranges = zip(starts.tolist(), offsets.tolist(), lengths.tolist(), strict=True)
    for at, start, length in ranges:
        os.preadv(file, [to[at : at + length]], start)
    os.close(file)


def process_vm_readv(target, starts, source, offsets, lengths, path):
    call, n = ctypes.CDLL(None).process_vm_readv, len(starts)
    local = np.stack([starts + target.ctypes.data, lengths], 1)
    remote = np.stack([offsets + source.ctypes.data, lengths], 1)
    pointers = ctypes.c_void_p(local.ctypes.data), ctypes.c_void_p(remote.ctypes.data)
    call(os.getpid(), pointers[0], n, pointers[1], n, 0)


def pyarrow_take(target, starts, source, offsets, lengths, path):
    import pyarrow as pa

    order = np.argsort(offsets)
    edges = np.stack([offsets, offsets + lengths], 1)[order].reshape(-1)
    buffers = [None, pa.py_buffer(edges), pa.py_buffer(source)]
    whole = pa.Array.from_buffers(pa.large_binary(), len(edges) - 1, buffers)
    places = np.empty_like(order)
    places[order] = 2 * np.arange(len(order))
    data = whole.take(pa.array(places)).buffers()[2]
    target[: data.size] = np.frombuffer(data, np.uint8)


def obstore_ranges(target, starts, source, offsets, lengths, path):
    import obstore
    from obstore.store import LocalStore

    wanted = {"starts": offsets.tolist(), "lengths": lengths.tolist()}
    found = obstore.get_ranges(LocalStore(str(path.parent)), path.name, **wanted)
    for at, data in zip(starts.tolist(), found, strict=True):
        target[at : at + len(data)] = np.frombuffer(data, np.uint8)


def numba_loop() -> Way:
    import numba

    @numba.njit(nogil=True)
    def copy(target, starts, source, offsets, lengths):
        for i in range(len(starts)):
            at, start, n = starts[i], offsets[i], lengths[i]
            target[at : at + n] = source[start : start + n]

    return lambda *args: copy(*args[:-1])


def c_loop(folder: Path) -> Way:
    (folder / "copy.c").write_text(C_SOURCE)
    library = folder / "copy.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, folder / "copy.c"], check=True)
    copy = ctypes.CDLL(str(library)).copy

    def call(target, starts, source, offsets, lengths, path):
        arrays = (target, starts, source, offsets, lengths)
        copy(*(ctypes.c_void_p(a.ctypes.data) for a in arrays), ctypes.c_int64(len(starts)))

    return call


def ways_here(folder: Path) -> dict[str, Way]:
    ways: dict[str, Way] = {
        "NumPy, a slice each": numpy_slices,
        "np.concatenate": numpy_concatenate,
        "np.take": numpy_take,
        "memoryview, a slice each": memoryviews,
        "os.preadv": preadv,
        "process_vm_readv": process_vm_readv,
        "obstore.get_ranges": obstore_ranges,
    }
    if shutil.which("cc"):
        ways["C, one call"] = c_loop(folder)
    for package, name, make in (
        ("pyarrow", "pyarrow take", lambda: pyarrow_take),
        ("numba", "numba", numba_loop),
    ):
        if importlib.util.find_spec(package):
            ways[name] = make()
    return ways


def seconds_a_range(way: Way, size: int, source: np.ndarray, path: Path, threads: int) -> float:
    repeats = max(2, 30_000_000 // (NUM_RANGES * size))
    targets = [np.ones(NUM_RANGES * size, np.uint8) for _ in range(threads)]

    def run(number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(repeats):
            lengths = rng.integers(size // 2, size + 1, NUM_RANGES)
            offsets = rng.choice(len(source) // size - 1, NUM_RANGES, replace=False) * size
            way(targets[number], np.cumsum(lengths) - lengths, source, offsets, lengths, path)

    with ThreadPoolExecutor(threads) as pool:
        begin = time.perf_counter()
        list(pool.map(run, range(threads)))
        return (time.perf_counter() - begin) / (repeats * threads * NUM_RANGES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="200,1000,4000,16000,110000")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "data"
        path.write_bytes(os.urandom(1 << 20) * (FILE_BYTES >> 20))
        with path.open("rb") as file:
            source = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        ways = ways_here(Path(name))
        found: dict[tuple[str, int, int], list[float]] = {}
        for _ in range(options.rounds):
            for size in sizes:
                for way, call in ways.items():
                    for threads in (1, 2):
                        seconds = seconds_a_range(call, size, source, path, threads)
                        found.setdefault((way, size, threads), []).append(seconds * 1e6)
        print(f"{'µs a range':26}" + "".join(f"{size:>8} B     " for size in sizes))
        for way in ways:
            cells = [[statistics.median(found[way, size, n]) for n in (1, 2)] for size in sizes]
            print(f"{way:26}" + "".join(f"{one:6.2f} {two:6.2f} " for one, two in cells))


if __name__ == "__main__":
    main()
