"""The process of a tap switch: one loop that reads frames, holds them for their time, writes them.

Frames carry a vnet header, so TCP's segments come whole, up to 64 KiB, and their checksums need not
be computed: 1 Gbit/s is 2,000 frames a second. A host's uplink that is busy is simply not read: the
frames wait in the host's own queue, as they would behind a slow card.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import heapq
import os
import random
import select
import signal
import struct
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe

from testkit.network_link import QUEUE_S, Link, Wire
from testkit.network_namespaces import TUN

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_PI, _VNET_HDR = 0x2, 0x1000, 0x4000
_CHECKSUM, _TSO4, _TSO6 = 0x1, 0x2, 0x4
_HEADER_BYTES = 10
"""Of the vnet header, before each frame."""
_FRAME_BYTES_MAX = 70_000
_FRAMES_IN_A_ROW = 16
"""Read from one tap before the others have their turn."""
_HELD_MAX = 20_000
"""Frames under way; more are dropped."""
_AHEAD_S, _PAUSE_S = 0.004, 0.002
"""An uplink this far ahead of the clock is not read until it is only so far ahead."""
_EARLY_S = 5e-5
"""Waking up takes about this long."""
_NAP_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a switch starts with: port k has the tap pk and the address `address_of(k)`."""

    links: tuple[Link, ...]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a port is from now on."""

    number: int
    link: Link
    is_cut: bool


def address_of(number: int) -> bytes:
    """Return the hardware address of a port's host: one that only local networks use."""
    return bytes([2, 0, 0, 0]) + (number + 1).to_bytes(2, "big")


class Port:
    """A tap, and the two directions of its link."""

    def __init__(self, number: int, link: Link, seed: int) -> None:
        self.up = Wire(link, random.Random(f"{seed} {number} up"))
        self.down = Wire(link, random.Random(f"{seed} {number} down"))
        self.tap = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        name = f"p{number}".encode()
        flags = _TAP | _NO_PI | _VNET_HDR
        fcntl.ioctl(self.tap, _TUNSETIFF, struct.pack("16sH22x", name, flags))
        fcntl.ioctl(self.tap, _TUNSETOFFLOAD, _CHECKSUM | _TSO4 | _TSO6)

    def change(self, change: Change) -> None:
        """Follow another shape."""
        for wire in (self.up, self.down):
            wire.link = change.link
            wire.is_cut = change.is_cut
            # Frames that wait for a slow wire keep their times: the new rate begins with new
            # frames.
            wire.free_s = min(wire.free_s, time.monotonic() + QUEUE_S)


class Switch:
    """All ports, and the frames that are between them."""

    def __init__(self, plan: Plan) -> None:
        self.ports = [Port(k, link, plan.seed) for k, link in enumerate(plan.links)]
        self._by_tap = {port.tap: port for port in self.ports}
        self._by_address = {address_of(k): port for k, port in enumerate(self.ports)}
        self._held: list[tuple[float, int, Port, bytes]] = []
        self._count = 0
        self._paused: dict[int, float] = {}

    def readable(self, now_s: float) -> list[int]:
        """Return the taps to read from now."""
        for tap in [tap for tap, until_s in self._paused.items() if until_s <= now_s]:
            del self._paused[tap]
        return [tap for tap in self._by_tap if tap not in self._paused]

    def wake_s(self) -> float:
        """Return when something is to be done even if nothing comes."""
        times_s = [*self._paused.values(), *(held[0] for held in self._held[:1])]
        return min(times_s, default=time.monotonic() + _NAP_S)

    def take(self, tap: int, now_s: float) -> None:
        """Read what a host sends."""
        port = self._by_tap[tap]
        for _ in range(_FRAMES_IN_A_ROW):
            try:
                frame = os.read(tap, _FRAME_BYTES_MAX)
            except OSError:  # nothing more; or a host whose interface is not up yet
                return
            self._forward(port, frame, now_s)
            if port.up.free_s - now_s > _AHEAD_S:
                self._paused[tap] = port.up.free_s - _PAUSE_S
                return

    def _forward(self, port: Port, frame: bytes, now_s: float) -> None:
        size_bytes = len(frame) - _HEADER_BYTES
        at_switch_s = port.up.arrival_s(now_s, size_bytes)
        if at_switch_s is None:
            return
        for other in self._receivers(port, frame):
            arrival_s = other.down.arrival_s(at_switch_s, size_bytes, queue_s=QUEUE_S)
            if arrival_s is not None and len(self._held) < _HELD_MAX:
                self._count += 1  # equal times keep their order, and ports are never compared
                heapq.heappush(self._held, (arrival_s, self._count, other, frame))

    def _receivers(self, port: Port, frame: bytes) -> list[Port]:
        address = frame[_HEADER_BYTES : _HEADER_BYTES + 6]
        if address[0] & 1:  # to everybody, or to a group
            return [other for other in self.ports if other is not port]
        known = self._by_address.get(address)
        return [known] if known is not None else []

    def give(self, now_s: float) -> None:
        """Write the frames whose time has come."""
        while self._held and self._held[0][0] <= now_s + _EARLY_S:
            _, _, port, frame = heapq.heappop(self._held)
            if not port.down.is_cut:
                # A host whose queue is full loses the frame, as with a real card.
                with contextlib.suppress(OSError):
                    os.write(port.tap, frame)


def serve(pipe: Pipe, switch: Switch) -> None:
    """Move frames until the owner hangs up."""
    while True:
        timeout_s = max(0.0, switch.wake_s() - time.monotonic())
        watched = [*switch.readable(time.monotonic()), pipe.fileno()]
        ready, _, _ = select.select(watched, [], [], timeout_s)
        for descriptor in ready:
            if descriptor == pipe.fileno():
                change = pipe.recv()
                switch.ports[change.number].change(change)
                pipe.send(None)
            else:
                switch.take(descriptor, time.monotonic())
        switch.give(time.monotonic())


def main(pipe: Pipe) -> None:
    """Be the switch."""
    # Ctrl-C is for the owner; this process ends with its pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    try:
        plan = pipe.recv()
        try:
            switch = Switch(plan)
        except OSError as error:
            pipe.send(error)
            return
        pipe.send(None)
        serve(pipe, switch)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
