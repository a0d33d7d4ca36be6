"""Sizes, counts and durations as people write and read them."""

from __future__ import annotations

import re

from penstock.arguments import count_of
from penstock.errors import OptionError

_FACTORS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9,
    "t": 10**12, "tb": 10**12, "p": 10**15, "pb": 10**15,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50,
}  # fmt: skip


def bytes_of(size: int | str) -> int:
    """Return a size in bytes from a number or from text such as "128MB" or "4 GiB".

    >>> bytes_of("1.5 GB"), bytes_of("4KiB"), bytes_of(12)
    (1500000000, 4096, 12)
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", size)
        if match is None or match[2].lower() not in _FACTORS:
            raise OptionError(f"{size!r} is not a size; write for example 128MB, 4GiB or 1000000")
        return int(float(match[1]) * _FACTORS[match[2].lower()])
    return count_of("a size in bytes", size, least=0, hint="write for example 128MB or 1000000")


def show_bytes(size_bytes: float) -> str:
    """Return a size with three digits and a decimal unit.

    >>> show_bytes(0), show_bytes(999), show_bytes(128_000_000), show_bytes(1_500)
    ('0 B', '999 B', '128 MB', '1.5 kB')
    """
    value = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} PB"


def show_count(count: int) -> str:
    """Return a count with separators.

    >>> show_count(1281167)
    '1,281,167'
    """
    return f"{count:,}"


def show_seconds(seconds: float) -> str:
    """Return a duration at the precision that a person cares for.

    >>> show_seconds(0.0004), show_seconds(0.25), show_seconds(75), show_seconds(7300)
    ('0.4 ms', '250 ms', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s} s"
    return f"{minutes // 60} h {minutes % 60} min"
