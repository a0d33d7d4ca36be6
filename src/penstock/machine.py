"""What a node's hardware can do: tiers, store, link, cores. Values only, as TOML on disk.

Everything is bytes and seconds. Throughput depends on how many ask at once, so it is a *curve*:
measured points, straight lines between them, flat beyond both ends. `penstock probe` measures a
machine and writes machine.toml; a plan, a prediction and a simulation start from one.
"""

from __future__ import annotations

import os
import re
import tomllib
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.errors import OptionError

_TRANSFER_SHARE_MIN = 0.01
"""The least part of a read's time that is taken as transfer."""
_FULL_SHARE = 0.9
"""N reads at once share a full pipe if they bring less than this share of N times what one read
brings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Throughput by the number of concurrent requests.

    >>> curve = Curve(counts=(1, 4), bytes_s=(100e6, 400e6))
    >>> curve.at(1), curve.at(2), curve.at(9)
    (100000000.0, 200000000.0, 400000000.0)
    """

    counts: tuple[int, ...]
    """How many ask at once: threads, requests or nodes, in rising order."""
    bytes_s: tuple[float, ...]
    """Bytes a second of all of them together."""

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.counts, self.counts[1:], strict=False))
        if not self.counts or len(self.counts) != len(self.bytes_s) or not rising:
            raise OptionError(
                f"a curve needs rising counts and one rate for each, got {self.counts} and "
                f"{self.bytes_s}"
            )
        if self.counts[0] < 1 or min(self.bytes_s) <= 0:
            raise OptionError(f"counts and rates are above 0, got {self.counts}, {self.bytes_s}")

    @classmethod
    def flat(cls, bytes_s: float) -> Curve:
        """Return the curve of a device that does not care how many ask."""
        return cls(counts=(1,), bytes_s=(bytes_s,))

    def at(self, count: float) -> float:
        """Return the throughput of `count` requests together."""
        after = bisect_right(self.counts, count)
        if after == 0:
            return float(self.bytes_s[0])
        if after == len(self.counts):
            return float(self.bytes_s[-1])
        low, high = self.counts[after - 1], self.counts[after]
        share = (count - low) / (high - low)
        return float(self.bytes_s[after - 1] * (1 - share) + self.bytes_s[after] * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierModel:
    """A tier of a node: memory or a disk."""

    kind: Literal["memory", "disk"]
    capacity_bytes: int
    read: Curve
    """By threads."""
    write: Curve
    """By threads."""
    latency_s: float = 0.0
    request_bytes: int | None = None
    """The size of the reads that `read` was measured with, latency included; None if `read` is the
    rate of the transfer alone."""

    def __post_init__(self) -> None:
        if self.request_bytes is not None and self.request_bytes < 1:
            raise OptionError(f"reads ask for at least 1 byte, got {self.request_bytes}")

    def read_s(self, size_bytes: float, threads: float) -> float:
        """Return the time that one read takes while `threads` threads read."""
        plain = self.without_latency()
        return _read_s(plain.read, plain.latency_s, size_bytes, threads)

    def without_latency(self) -> TierModel:
        """Return the same tier with `read` as the rate of the transfer alone."""
        if self.request_bytes is None:
            return self
        latency_s, read = _split(self.latency_s, self.read, self.request_bytes)
        return replace(self, latency_s=latency_s, read=read, request_bytes=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreModel:
    """The store that owns the data, seen from one node, and shared by all of them."""

    latency_s: float
    """Time to the first byte of a request, typical (median)."""
    latency_p99_s: float
    """The same, of the slowest in a hundred."""
    throughput: Curve
    """One node's, by requests in flight."""
    shared: Curve | None = None
    """All nodes' together, by nodes that read at once; None where nodes do not slow each other."""
    requests_s_max: float | None = None
    """Requests a second that the store allows in all; None where it has no such limit."""
    request_bytes: int | None = None
    """The size of the requests that `throughput` was measured with, latency included; None if
    `throughput` is the rate of the transfer alone."""

    def __post_init__(self) -> None:
        if min(self.latency_s, self.latency_p99_s) < 0:
            raise OptionError(
                f"latencies are at least 0, got {self.latency_s} and {self.latency_p99_s}"
            )
        if self.request_bytes is not None and self.request_bytes < 1:
            raise OptionError(f"requests ask for at least 1 byte, got {self.request_bytes}")

    def read_s(self, size_bytes: float, in_flight: float) -> float:
        """Return the time that one request takes while `in_flight` requests are in flight.

        >>> curve = Curve(counts=(1, 16), bytes_s=(5e6, 50e6))
        >>> store = StoreModel(
        ...     latency_s=0.02, latency_p99_s=0.05, throughput=curve, request_bytes=125_000
        ... )
        >>> round(store.read_s(125_000, 1), 6), round(store.read_s(250_000, 1), 6)
        (0.025, 0.03)
        >>> round(store.read_s(125_000, 16), 6)
        0.04
        """
        plain = self.without_latency()
        return _read_s(plain.throughput, plain.latency_s, size_bytes, in_flight)

    def without_latency(self) -> StoreModel:
        """Return the same store with `throughput` as the rate of the transfer alone."""
        if self.request_bytes is None:
            return self
        latency_s, curve = _split(self.latency_s, self.throughput, self.request_bytes)
        return replace(self, latency_s=latency_s, throughput=curve, request_bytes=None)


def _read_s(transfer: Curve, latency_s: float, size_bytes: float, count: float) -> float:
    """Return the longer of two times: that of a read alone, and that of its share of a full pipe.

    While some reads wait for their first byte others transfer, so the two times do not add up.
    """
    alone_s = latency_s + size_bytes / transfer.at(1)
    return max(alone_s, count * size_bytes / transfer.at(count))


def _split(latency_s: float, measured: Curve, size_bytes: int) -> tuple[float, Curve]:
    """Return latency and transfer rate separately, from throughput measured with one read size.

    One read alone gives the rate of a connection. As long as twice as many reads bring twice as
    much, they mostly wait for first bytes, and the pipe can carry at least the most that was ever
    measured. Beyond that the pipe is full, and what was measured is what it carries.
    """
    alone_s = size_bytes * measured.counts[0] / measured.bytes_s[0]
    # A latency that varies may exceed the whole; a transfer always takes some time.
    latency_s = min(latency_s, (1 - _TRANSFER_SHARE_MIN) * alone_s)
    connection_bytes_s = size_bytes / (alone_s - latency_s)
    points = list(zip(measured.counts, measured.bytes_s, strict=True))
    is_full = [rate <= _FULL_SHARE * count * size_bytes / alone_s for count, rate in points]
    most = max(measured.bytes_s)
    if any(is_full):
        # The difference of two times of one read is a poor measure; the full pipe is a good one.
        connection_bytes_s = min(connection_bytes_s, most)
        latency_s = min(latency_s, max(0.0, alone_s - size_bytes / connection_bytes_s))
    most = max(most, connection_bytes_s)
    rates = [rate if full else most for (_, rate), full in zip(points, is_full, strict=True)]
    if measured.counts[0] == 1:
        rates[0] = connection_bytes_s
    return latency_s, Curve(counts=measured.counts, bytes_s=tuple(rates))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """The wire between a node and the others."""

    bytes_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One node and what it is connected to."""

    store: StoreModel
    link: LinkModel
    tiers: tuple[TierModel, ...] = ()
    """Fastest first."""
    cores: int = 1
    copy: Curve = field(default_factory=lambda: Curve.flat(10e9))
    """Memory to memory, by threads."""
    decode: Curve | None = None
    """Stored bytes decoded a second, by threads; None where samples stay bytes."""
    notes: dict[str, str] = field(default_factory=dict)
    """Where the numbers come from: host, date, command."""

    def without_latency(self) -> Machine:
        """Return the same machine with all curves as rates of the transfer alone.

        Probes measure what arrives, latency included; formulas of the kind "latency, then bytes at
        some rate" need the two apart.
        """
        tiers = tuple(tier.without_latency() for tier in self.tiers)
        return replace(self, store=self.store.without_latency(), tiers=tiers)


def default_machine_path() -> Path:
    """Return where `penstock probe` writes this user's machine, and others look for it."""
    try:
        base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    except RuntimeError as error:  # Containers often run as a user without a home.
        raise OptionError(
            "there is no home folder to keep a machine in; set XDG_CONFIG_HOME, or name the file"
        ) from error
    return base / "penstock" / "machine.toml"


def load_machine(path: str | Path) -> Machine:
    """Return a machine from its file; an `OptionError` names what is wrong with it."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return msgspec.convert(tomllib.loads(text), Machine)
    except OSError as error:
        raise OptionError(
            f"{path} cannot be read ({error.strerror}); write one with `penstock probe`"
        ) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise OptionError(f"{path} is no machine: {error}; see `penstock probe --help`") from error


def machine_toml(machine: Machine) -> str:
    """Return a machine as the text of its file."""
    return "\n".join(_lines("", msgspec.to_builtins(machine))).strip() + "\n"


def _lines(prefix: str, table: dict[str, Any]) -> list[str]:
    """Write a table: plain values first, then the tables inside it."""
    plain = {k: v for k, v in table.items() if not _is_table(v) and v is not None}
    out = [f"{_key(key)} = {_plain(value)}" for key, value in plain.items()]
    for key, value in table.items():
        name = f"{prefix}{_key(key)}"
        if isinstance(value, dict) and value:
            out += ["", f"[{name}]", *_lines(f"{name}.", value)]
        elif _is_table(value) and value:
            for item in value:
                out += ["", f"[[{name}]]", *_lines(f"{name}.", item)]
    return out


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list | tuple) and bool(value) and isinstance(value[0], dict)
    )


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _plain(name)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # A JSON string is a TOML string, except for DEL, which TOML requires to be escaped.
        return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_plain, value)) + "]"
    return repr(value)
