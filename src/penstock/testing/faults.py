"""Stores that fail on purpose, and stores that count.

Both wrap another store, so tests of other rooms need no server. A hash of seed, key, offset and
attempt decides which reads fail, not the order of calls: the same plan fails the same reads on any
number of threads, and a retry of a failed read is a new draw.
"""

from __future__ import annotations

import struct
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from penstock.clock import Clock, SystemClock
from penstock.errors import OptionError, UnavailableError
from penstock.storage.base import Buffer, ObjectInfo, Store
from penstock.storage.ranges import truncated_error
from penstock.storage.wrapped import WrappedStore


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Which share of the reads goes wrong, and how. Shares add up to at most 1."""

    seed: int = 0
    """Another seed fails other reads."""
    unavailable: float = 0.0
    """Share answered with `UnavailableError`."""
    truncated: float = 0.0
    """Share answered with `TruncatedError`."""
    corrupt: float = 0.0
    """Share with one byte changed."""
    slow: float = 0.0
    """Share that takes `slow_s` longer."""
    slow_s: float = 1.0
    """How long that is, on the wrapper's clock."""

    def __post_init__(self) -> None:
        shares = (self.unavailable, self.truncated, self.corrupt, self.slow)
        if min(shares) < 0 or sum(shares) > 1:
            raise OptionError(f"shares must be at least 0 and add up to at most 1, got {shares}")

    def fault_of(self, key: str, offset: int, attempt: int) -> str:
        """Return the name of what goes wrong with a read, or an empty string."""
        draw = _draw(self.seed, key, offset, attempt)
        for name in ("unavailable", "truncated", "corrupt", "slow"):
            draw -= getattr(self, name)
            if draw < 0:
                return name
        return ""


def _draw(seed: int, key: str, offset: int, attempt: int) -> float:
    """Return a number in [0, 1) that depends on all of these."""
    packed = struct.pack("<QQQ", seed, offset, attempt) + key.encode()
    return xxhash.xxh3_64_intdigest(packed) / 2**64


class FaultyStore(WrappedStore):
    """Fails reads as its plan says; everything else works."""

    def __init__(self, store: Store, plan: FaultPlan, *, clock: Clock | None = None) -> None:
        super().__init__(store)
        self.plan = plan
        self.faults: Counter[str] = Counter()
        self._clock = clock or SystemClock()
        self._attempts: Counter[tuple[str, int]] = Counter()
        # Guards both counters: stores are read by many threads.
        self._lock = threading.Lock()

    def read(self, key: str) -> memoryview:
        """Return a whole object, or fail."""
        return self._with_fault(key, 0, self.inner.read(key))

    def read_range(self, info: ObjectInfo, offset: int, length: int) -> memoryview:
        """Return a range, or fail."""
        return self._with_fault(info.key, offset, self.inner.read_range(info, offset, length))

    def read_into(self, info: ObjectInfo, offset: int, target: memoryview) -> None:
        """Fill `target`, or fail."""
        data = self.inner.read_range(info, offset, target.nbytes)
        target[:] = self._with_fault(info.key, offset, data)

    def _with_fault(self, key: str, offset: int, data: memoryview) -> memoryview:
        with self._lock:
            attempt = self._attempts[key, offset]
            self._attempts[key, offset] += 1
            fault = self.plan.fault_of(key, offset, attempt)
            if fault:
                self.faults[fault] += 1
        uri = self.uri + key
        if fault == "unavailable":
            raise UnavailableError(f"{uri}: 503, as planned (attempt {attempt})", uri=uri)
        if fault == "truncated":
            raise truncated_error(uri, data.nbytes // 2, data.nbytes)
        if fault == "slow":
            self._clock.sleep(self.plan.slow_s)
        if fault == "corrupt" and data.nbytes:
            changed = bytearray(data)
            changed[int(_draw(self.plan.seed + 1, key, offset, attempt) * len(changed))] ^= 0xFF
            return memoryview(changed)
        return data


class CountingStore(WrappedStore):
    """Counts requests and bytes."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.requests: Counter[str] = Counter()
        self.read_bytes = 0
        self.written_bytes = 0
        # Guards the counts, because `+=` of two threads can lose one of them.
        self._lock = threading.Lock()

    def _count(self, call: str, *, read_bytes: int = 0, written_bytes: int = 0) -> None:
        with self._lock:
            self.requests[call] += 1
            self.read_bytes += read_bytes
            self.written_bytes += written_bytes

    def info(self, key: str) -> ObjectInfo:
        """Count and pass on."""
        self._count("info")
        return self.inner.info(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Count and pass on."""
        self._count("list")
        return self.inner.list(prefix)

    def read(self, key: str) -> memoryview:
        """Count and pass on."""
        data = self.inner.read(key)
        self._count("read", read_bytes=data.nbytes)
        return data

    def read_range(self, info: ObjectInfo, offset: int, length: int) -> memoryview:
        """Count and pass on."""
        data = self.inner.read_range(info, offset, length)
        self._count("read_range", read_bytes=length)
        return data

    def read_into(self, info: ObjectInfo, offset: int, target: memoryview) -> None:
        """Count and pass on."""
        self.inner.read_into(info, offset, target)
        self._count("read_into", read_bytes=target.nbytes)

    def write(self, key: str, data: Buffer, *, only_if_absent: bool = False) -> ObjectInfo:
        """Count and pass on."""
        info = self.inner.write(key, data, only_if_absent=only_if_absent)
        self._count("write", written_bytes=info.size_bytes)
        return info

    def delete(self, key: str) -> None:
        """Count and pass on."""
        self._count("delete")
        self.inner.delete(key)
