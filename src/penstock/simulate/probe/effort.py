"""Bounds of a probe: seconds and bytes of each measurement."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import OptionError

COPY_BYTES = 100_000
"""A sample that the loader copies out of a map: a JPEG of ImageNet."""
READ_BYTES = 128 << 10
"""A random read from a tier: a unit of small samples."""
SMALL_BYTES = 4 << 10
"""A read so small that only its latency counts."""
REQUEST_BYTES_MAX = 1 << 20
"""Longer requests show nothing more about a store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What a probe may spend. A time covers all points of a curve and all repeats."""

    copy_s: float
    """Copies in memory."""
    memory_s: float
    """The memory tier."""
    disk_s: float
    """Each disk."""
    store_s: float
    """The store."""
    decode_s: float
    """Decoding."""
    repeats: int = 3
    """Measurements of each point, in turns with the other points; the median counts."""
    working_set_bytes: int = 256 << 20
    """Memory that copies are made from: larger than the processor's caches."""
    file_bytes_max: int = 1 << 30
    """The largest file written to a tier; it never takes more than a tenth of what is free."""
    store_bytes_max: int = 2 << 30
    """The most bytes read from the store."""
    in_flight_max: int = 64
    """The most requests to the store in flight."""

    def __post_init__(self) -> None:
        times = (self.copy_s, self.memory_s, self.disk_s, self.store_s, self.decode_s)
        if min(times) <= 0:
            raise OptionError(f"every part of a probe takes more than 0 s, got {times}")
        if min(self.repeats, self.in_flight_max) < 1:
            raise OptionError(
                f"a probe needs at least 1 repeat and 1 request in flight, got {self.repeats} and "
                f"{self.in_flight_max}"
            )
        sizes = (self.working_set_bytes, self.file_bytes_max, self.store_bytes_max)
        if min(sizes) < 1 << 20:
            raise OptionError(f"a probe needs 1 MiB for each of its parts, got {sizes}")


USUAL = Effort(copy_s=2.0, memory_s=2.0, disk_s=5.0, store_s=8.0, decode_s=2.5)
"""About 20 seconds with a disk and a store."""
QUICK = Effort(
    copy_s=0.5,
    memory_s=0.5,
    disk_s=1.2,
    store_s=2.0,
    decode_s=0.6,
    file_bytes_max=256 << 20,
    store_bytes_max=512 << 20,
)
"""About 5 seconds."""
