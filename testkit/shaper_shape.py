"""Shapes: the behaviour of a bad network or a busy store, as a value.

A shape has the time to the first byte of an answer, the rate of bytes and of requests, faults, and
times at which everything is slower. Its times count from the moment at which it takes effect: the
start of a `shaper.Shaper`, or its last `reshape`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from penstock.errors import OptionError

FaultKind = Literal["unavailable", "truncate", "corrupt", "stall", "reset"]
KINDS: tuple[FaultKind, ...] = ("unavailable", "truncate", "corrupt", "stall", "reset")

_NORMAL = NormalDist()
_SMALLEST = 2.0**-53
"""A share of exactly 0 would be an endless latency's mirror image: minus infinity."""


def _check(name: str, value: float, *, least: float = -math.inf, above: float = -math.inf) -> None:
    if not (math.isfinite(value) and value >= least and value > above):
        bound = f"at least {least:g}" if least > above else f"above {above:g}"
        raise OptionError(f"{name} must be {bound} and finite, got {value}")


def _check_window(start_s: float, stop_s: float) -> None:
    if not 0 <= start_s < stop_s:
        raise OptionError(
            f"a window needs 0 <= start_s < stop_s, got start_s={start_s}, stop_s={stop_s}"
        )


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same latency for every request."""

    latency_s: float

    def __post_init__(self) -> None:
        _check("latency_s", self.latency_s, least=0.0)

    def at(self, share: float) -> float:
        """Return the latency that this share of the requests stays below."""
        return self.latency_s


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Latencies with a long tail: half of them above the median, 1 % above median · e^(2.33 sigma).

    >>> slow = LogNormal(0.020, 0.5)
    >>> round(slow.at(0.5), 4), round(slow.at(0.99), 4)
    (0.02, 0.064)
    """

    median_s: float
    sigma: float
    """Standard deviation of the logarithm: 0.3 is calm, 1 is wild."""

    def __post_init__(self) -> None:
        _check("median_s", self.median_s, above=0.0)
        _check("sigma", self.sigma, least=0.0)

    def at(self, share: float) -> float:
        """Return the latency that this share of the requests stays below."""
        return self.median_s * math.exp(self.sigma * _NORMAL.inv_cdf(max(share, _SMALLEST)))


@dataclass(frozen=True, slots=True)
class Samples:
    """Latencies as they were measured somewhere; each request draws one of them."""

    latencies_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.latencies_s:
            raise OptionError("Samples needs at least 1 latency, got 0")
        for latency_s in self.latencies_s:
            _check("a latency", latency_s, least=0.0)

    def at(self, share: float) -> float:
        """Return one of the latencies."""
        return self.latencies_s[int(share * len(self.latencies_s))]


Latency = Fixed | LogNormal | Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault, the requests that it hits, and when.

    `truncate` and `corrupt` need a body and hit reads of objects only; the others hit any request.
    Where in the body it happens is drawn too.
    """

    kind: FaultKind
    """503 SlowDown; the body ends early; a byte is wrong; silence; the connection is reset."""
    share: float = 1.0
    """The share of the requests that it hits, by a draw for each."""
    start_s: float = 0.0
    """Only requests that come at this time of the shape or later …"""
    stop_s: float = math.inf
    """… and before this one."""
    stall_s: float = 1.0
    """How long a stall lasts."""
    path: str = ""
    """Only requests whose path, as it is quoted in an address, contains this."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise OptionError(f"there is no fault {self.kind!r}; there are: {', '.join(KINDS)}")
        if not 0 <= self.share <= 1:
            raise OptionError(f"share of {self.kind!r} must lie between 0 and 1, got {self.share}")
        _check("stall_s", self.stall_s, above=0.0)
        _check_window(self.start_s, self.stop_s)


@dataclass(frozen=True, slots=True)
class Slow:
    """A time in which everything is slower: latencies times `factor`, rates divided by it.

    What has no limit in the shape stays without one.
    """

    factor: float
    start_s: float
    stop_s: float = math.inf

    def __post_init__(self) -> None:
        _check("factor", self.factor, above=0.0)
        _check_window(self.start_s, self.stop_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a store answers. The default changes nothing.

    >>> Shape(timeline=(Slow(10, 2.0, 4.0),)).factor_at(3.0)
    10.0
    """

    latency: Latency = Fixed(0.0)
    """The time from a request to the first byte of its answer; a slower store takes longer."""
    bandwidth_bytes_s: float | None = None
    """Bytes of bodies a second of all connections together, shared fairly; None has no limit."""
    connection_bytes_s: float | None = None
    """Bytes of bodies a second of one connection; None has no limit."""
    requests_s: float | None = None
    """Requests a second that are let through, with a burst of 100 ms; None has no limit."""
    excess: Literal["refuse", "queue"] = "refuse"
    """What is above `requests_s` gets 503 SlowDown, or waits for its turn."""
    faults: tuple[Fault, ...] = ()
    """The first one that hits a request is the only one."""
    timeline: tuple[Slow, ...] = ()
    """Factors of windows that overlap multiply."""

    def __post_init__(self) -> None:
        for name in ("bandwidth_bytes_s", "connection_bytes_s", "requests_s"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), above=0.0)
        if self.excess not in ("refuse", "queue"):
            raise OptionError(f'excess must be "refuse" or "queue", got {self.excess!r}')

    def factor_at(self, at_s: float) -> float:
        """Return how many times slower it is at a time of the shape."""
        factor = 1.0
        for slow in self.timeline:
            if slow.start_s <= at_s < slow.stop_s:
                factor *= slow.factor
        return factor
