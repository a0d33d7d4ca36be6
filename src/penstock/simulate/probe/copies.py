"""Measures how fast memory is copied: random samples out of a large map, into a batch.

Source and targets are larger than the processor's caches; else only the caches would be measured.
Pages are small ones, as in a mapped file; NumPy's own allocations would ask for huge pages.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from penstock.machine import Curve
from penstock.simulate.probe.effort import COPY_BYTES, Effort
from penstock.simulate.probe.timing import curve_of, doubling, rate_of

Bytes = npt.NDArray[np.uint8]

_DRAWS = 4096
"""Random places drawn ahead; so many that none is still in a cache when it comes again."""


def copy_curve(cores: int, effort: Effort, available_bytes: int) -> Curve:
    """Return bytes copied a second by threads."""
    size_bytes = copy_working_set(effort, available_bytes)
    # Never closed by hand: after Ctrl-C, views hang on the traceback, and a map with views cannot
    # be closed (BufferError). The memory goes with the last of them.
    source, target = (_touched(mmap.mmap(-1, size)) for size in (size_bytes, size_bytes // 4))
    return _curve(source, target, cores, effort)


def copy_working_set(effort: Effort, available_bytes: int) -> int:
    """Return how much memory is copied from: at most an eighth of what is available."""
    return max(1 << 20, min(effort.working_set_bytes, available_bytes // 8))


def _curve(source: Bytes, target: Bytes, cores: int, effort: Effort) -> Curve:
    counts = doubling(cores)
    seconds = effort.copy_s / (len(counts) * effort.repeats)

    def measure(num_threads: int) -> float:
        share = len(target) // num_threads

        def worker(number: int) -> Iterator[int]:
            return copies(source, target[number * share : (number + 1) * share], seed=number)

        return rate_of(num_threads, worker, seconds)

    return curve_of(counts, measure, effort.repeats)


def copies(source: Bytes, target: Bytes, seed: int) -> Iterator[int]:
    """Copy samples from random places of `source` to successive places of `target`."""
    size_bytes = min(COPY_BYTES, len(source), len(target))
    generator = np.random.default_rng(seed)
    froms = generator.integers(0, len(source) - size_bytes + 1, _DRAWS).tolist()
    tos = range(0, len(target) - size_bytes + 1, size_bytes)
    number = 0
    while True:
        at, to = froms[number % _DRAWS], tos[number % len(tos)]
        target[to : to + size_bytes] = source[at : at + size_bytes]
        number += 1
        yield size_bytes


def _touched(memory: mmap.mmap) -> Bytes:
    """Return memory with all pages in place: the first write to a page takes longer than a copy."""
    array = np.frombuffer(memory, np.uint8)
    array[:] = 1
    return array
