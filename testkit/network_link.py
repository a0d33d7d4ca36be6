"""Links of hosts, as values, and the arithmetic of one direction of a wire.

A frame goes up the link of its sender and down the link of its receiver, so a delay of 0.5 ms on
both is a round trip of 2 ms. Nothing here has a clock or a socket: the switch says what time it is.
"""

from __future__ import annotations

import dataclasses
import math
import random
import re
from dataclasses import dataclass

from penstock.errors import OptionError

QUEUE_S = 0.030
"""What may wait for a link's turn; more is dropped, as a switch does with a full queue."""

_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def bits_of(rate: str) -> float:
    """Return a rate in bits a second, from the way in which network people write it.

    >>> bits_of("1gbit"), bits_of("2.5 Mbit")
    (1000000000.0, 2500000.0)
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmg]?bit)\s*", rate.lower())
    if match is None or float(match[1]) <= 0:
        raise OptionError(f"{rate!r} is not a rate; write for example 1gbit, 200mbit or 2.5mbit")
    return float(match[1]) * _BITS[match[2]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A host's cable, the same in both directions. The default changes nothing."""

    rate: str | None = None
    """For example 1gbit; None has no limit."""
    delay_s: float = 0.0
    """One way. This and what follows needs switch="tap"."""
    jitter_s: float = 0.0
    """Up to so much more delay, drawn for each frame; frames keep their order."""
    loss: float = 0.0
    """The share of frames that are lost in each direction. A frame holds up to 64 KiB of TCP."""
    has_ipv4: bool = True
    """Every host has an IPv6 address; whether it has one of IPv4 too."""

    def __post_init__(self) -> None:
        if self.rate is not None:
            bits_of(self.rate)
        for name in ("delay_s", "jitter_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise OptionError(f"{name} must be at least 0 and finite, got {value}")
        if not 0 <= self.loss <= 1:
            raise OptionError(f"loss must lie between 0 and 1, got {self.loss}")

    @property
    def bytes_s(self) -> float:
        """Bytes a second; infinite where there is no limit."""
        return math.inf if self.rate is None else bits_of(self.rate) / 8

    def changed(self, *, rate: str | None, delay_s: float | None, loss: float | None) -> Link:
        """Return the link with some of it changed; None leaves as it is."""
        return dataclasses.replace(
            self,
            rate=self.rate if rate is None else rate,
            delay_s=self.delay_s if delay_s is None else delay_s,
            loss=self.loss if loss is None else loss,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a host's interface has counted, headers included."""

    in_bytes: int = 0
    out_bytes: int = 0

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(
            in_bytes=self.in_bytes - earlier.in_bytes, out_bytes=self.out_bytes - earlier.out_bytes
        )


class Wire:
    """One direction of a link: says of each frame when its last byte arrives, or that it is lost.

    >>> wire = Wire(Link(rate="8mbit", delay_s=0.5), random.Random(1))
    >>> wire.arrival_s(0.0, 10_000), round(wire.arrival_s(0.0, 10_000), 2)
    (0.51, 0.52)
    """

    def __init__(self, link: Link, draws: random.Random) -> None:
        self.link = link
        self.is_cut = False
        self.free_s = 0.0
        """When the wire has sent all frames given to it."""
        self._last_s = 0.0
        self._draws = draws

    def arrival_s(
        self, now_s: float, size_bytes: int, *, queue_s: float = math.inf
    ) -> float | None:
        """Return when a frame given now arrives; None if it is lost on the way."""
        link = self.link
        if self.is_cut or self.free_s - now_s > queue_s:
            return None
        # A lost frame has used the wire all the same.
        self.free_s = max(self.free_s, now_s) + size_bytes / link.bytes_s
        if link.loss and self._draws.random() < link.loss:
            return None
        jitter_s = link.jitter_s * self._draws.random() if link.jitter_s else 0.0
        self._last_s = max(self._last_s, self.free_s + link.delay_s + jitter_s)
        return self._last_s
