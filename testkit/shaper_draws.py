"""What happens to a request, drawn from a seed.

A draw depends on the seed, the request (method, path, range) and how often it was asked before,
never on the order in which requests arrive: the same shape fails the same reads whatever the number
of threads, and asking again is a new draw.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from testkit.shaper_shape import Fault, Shape

REMEMBERED_MAX = 2**18
"""Requests whose number of attempts is remembered; the oldest is forgotten first."""

_LATENCY, _PLACE, _FIRST_FAULT = 0, 1, 2
"""What a draw is for."""


@dataclass(frozen=True, slots=True)
class Treatment:
    """Latency and fault of one request."""

    latency_s: float
    fault: Fault | None = None
    place: float = 0.0
    """Where in the body the fault happens, as a share of its length."""


class Draws:
    """Treats requests by a seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._attempts: dict[int, int] = {}

    def treat(self, shape: Shape, request: bytes, *, at_s: float, is_read: bool) -> Treatment:
        """Return the treatment of a request that arrives at this time of the shape.

        `request` identifies it, path included.
        """
        digest = self._digest(request)
        latency_s = shape.latency.at(_share(digest, _LATENCY))
        for number, fault in enumerate(shape.faults):
            if _matches(fault, request, at_s, is_read) and (
                _share(digest, _FIRST_FAULT + number) < fault.share
            ):
                return Treatment(latency_s, fault, _share(digest, _PLACE))
        return Treatment(latency_s)

    def _digest(self, request: bytes) -> int:
        name = xxhash.xxh3_64_intdigest(request)
        attempt = self._attempts.get(name, 0)
        if attempt == 0 and len(self._attempts) >= REMEMBERED_MAX:
            del self._attempts[next(iter(self._attempts))]
        self._attempts[name] = attempt + 1
        return xxhash.xxh3_64_intdigest(struct.pack("<QQ", name, attempt), self._seed)


def _matches(fault: Fault, request: bytes, at_s: float, is_read: bool) -> bool:
    return (
        fault.start_s <= at_s < fault.stop_s
        and (is_read or fault.kind not in ("truncate", "corrupt"))
        and fault.path.encode() in request
    )


def _share(digest: int, purpose: int) -> float:
    """Return a number in [0, 1); one for each purpose."""
    # 53 bits: more would round up to 1.
    return (xxhash.xxh3_64_intdigest(struct.pack("<QQ", digest, purpose)) >> 11) / 2**53
