"""Measures memory and disks as tiers: capacity, latency, and throughput by threads.

A memory tier is a mapped file on a tmpfs, and a read is a copy out of the map. A disk is read at
random with direct reads, or with the page cache dropped where the file system has none.
"""

from __future__ import annotations

import mmap
import statistics
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.machine import Curve, TierModel
from penstock.memory import memory_left_bytes
from penstock.simulate.probe.copies import Bytes, copies
from penstock.simulate.probe.effort import COPY_BYTES, READ_BYTES, SMALL_BYTES, Effort
from penstock.simulate.probe.scratch import ScratchFile, check_folder, free_bytes
from penstock.simulate.probe.timing import curve_of, doubling, latencies, rate_of, readable
from penstock.units import show_bytes

DISK_THREADS_MAX = 16
_WRITE_SHARE, _LATENCY_SHARE, _READ_SHARE = 0.3, 0.05, 0.65
"""Shares of a tier's time for writing, for single small reads, and for the read curve."""
_SMALL_READS_MAX = 500
_SMALL_FILE_BYTES = 64 << 20
"""A smaller file on a tmpfs may fit into the processor's caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFacts:
    """A tier and the method of its measurement."""

    model: TierModel
    folder: Path
    note: str


def measure_memory(folder: Path, cores: int, effort: Effort) -> TierFacts:
    """Measure a memory tier in a tmpfs folder."""
    check_folder(folder)
    free, available = free_bytes(folder), memory_left_bytes()
    with ScratchFile(folder, min(effort.file_bytes_max, available // 10)) as file:
        write_bytes_s = file.fill(_WRITE_SHARE * effort.memory_s)
        with _MappedFile(file) as source:
            latency_s = _map_latency_s(source, _LATENCY_SHARE * effort.memory_s)
            read = _map_curve(source, cores, effort)
    note = f"mapped file of {show_bytes(file.size_bytes)}, copies of 100 kB at random"
    if file.size_bytes < _SMALL_FILE_BYTES:
        note += "; so small that the processor's caches may have helped"
    model = TierModel(
        kind="memory",
        capacity_bytes=min(free, available),
        read=read,
        write=Curve.flat(readable(write_bytes_s)),
        latency_s=readable(latency_s),
        request_bytes=COPY_BYTES,
    )
    return TierFacts(model=model, folder=folder, note=note)


class _MappedFile:
    """A mapped file with all pages in place."""

    def __init__(self, file: ScratchFile) -> None:
        self._file = file

    def __enter__(self) -> Bytes:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._memory = mmap.mmap(
            self._file.descriptor, self._file.size_bytes, flags=flags, prot=mmap.PROT_READ
        )
        return np.frombuffer(self._memory, np.uint8)

    def __exit__(self, *_: object) -> None:
        # A traceback may still hold views of it, so the map cannot be closed here: it is freed with
        # the last view.
        del self._memory


def _map_latency_s(source: Bytes, seconds: float) -> float:
    target = np.zeros(SMALL_BYTES, np.uint8)
    return statistics.median(latencies(copies(source, target, 0), seconds, _SMALL_READS_MAX))


def _map_curve(source: Bytes, cores: int, effort: Effort) -> Curve:
    counts = doubling(cores)
    seconds = _READ_SHARE * effort.memory_s / (len(counts) * effort.repeats)

    def measure(num_threads: int) -> float:
        target_bytes = max(READ_BYTES, effort.working_set_bytes // 4 // num_threads)
        targets = [np.ones(target_bytes, np.uint8) for _ in range(num_threads)]
        return rate_of(num_threads, lambda i: copies(source, targets[i], i), seconds)

    return curve_of(counts, measure, effort.repeats)


def measure_disk(folder: Path, effort: Effort) -> TierFacts:
    """Measure a disk tier in a folder."""
    check_folder(folder)
    capacity_bytes = free_bytes(folder)
    with ScratchFile(folder, effort.file_bytes_max) as file:
        write_bytes_s = file.fill(_WRITE_SHARE * effort.disk_s)
        is_direct = file.go_direct()
        latency_s = _disk_latency_s(file, _LATENCY_SHARE * effort.disk_s)
        read = _disk_curve(file, effort)
    how = "around the page cache (O_DIRECT)" if is_direct else "with the page cache dropped"
    note = (
        f"file of {show_bytes(file.size_bytes)}, reads of {show_bytes(READ_BYTES)} at random {how}"
    )
    if not is_direct:
        note += "; this file system has no direct reads"
    model = TierModel(
        kind="disk",
        capacity_bytes=capacity_bytes,
        read=read,
        write=Curve.flat(readable(write_bytes_s)),
        latency_s=readable(latency_s),
        request_bytes=READ_BYTES,
    )
    return TierFacts(model=model, folder=folder, note=note)


def _disk_latency_s(file: ScratchFile, seconds: float) -> float:
    file.forget()
    reads = file.reads(file.places(SMALL_BYTES, seed=0), SMALL_BYTES)
    return statistics.median(latencies(reads, seconds, _SMALL_READS_MAX))


def _disk_curve(file: ScratchFile, effort: Effort) -> Curve:
    counts = doubling(DISK_THREADS_MAX)
    seconds = _READ_SHARE * effort.disk_s / (len(counts) * effort.repeats)
    seeds = iter(range(1, 1 + len(counts) * effort.repeats))

    def measure(num_threads: int) -> float:
        file.forget()
        places = SharedIterator(file.places(READ_BYTES, next(seeds)))
        return rate_of(num_threads, lambda _: file.reads(places, READ_BYTES), seconds)

    return curve_of(counts, measure, effort.repeats)


class SharedIterator(Iterator[int]):
    """An iterator for several threads: a generator must not be entered by two at once."""

    def __init__(self, inner: Iterator[int]) -> None:
        self._inner = inner
        # Python refuses to enter a generator that another thread is in.
        self._lock = threading.Lock()

    def __next__(self) -> int:
        with self._lock:
            return next(self._inner)
