"""The server of the shaper: accepts clients, admits requests, and paces answers."""

from __future__ import annotations

import socket
import time
from collections import deque
from dataclasses import dataclass

from penstock.testing.ports import HOST
from testkit.shaper_connection import Connection
from testkit.shaper_counts import Counts, Tally
from testkit.shaper_draws import Draws, Treatment
from testkit.shaper_folder import Folder
from testkit.shaper_http import Request
from testkit.shaper_loop import Loop, Timer
from testkit.shaper_pace import ByteRate, RequestRate
from testkit.shaper_shape import Shape
from testkit.shaper_transfer import Sent

_BACKLOG = 1024
_ACCEPTED_AT_ONCE = 64
_NAP_S = 0.001
"""Longer than necessary, to send several pieces at each wake-up: that is half of the cost."""
_TURNS_MAX = 64
"""Pieces sent in one go, so that new requests are not kept waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """The start options of a shaper's process."""

    shape: Shape
    seed: int
    port: int
    """0 takes a free one."""
    address: tuple[str, int] | None
    """Of the store to forward to …"""
    folder: str
    """… or the folder to serve …"""
    bucket: str
    """… and its bucket's name."""


class Pacer:
    """Lets connections send in turns, as fast as the shape allows."""

    def __init__(self, loop: Loop, shape: Shape) -> None:
        self._loop = loop
        self._waiting: deque[Connection] = deque()
        self._timer: Timer | None = None
        self.reshape(shape)

    def reshape(self, shape: Shape) -> None:
        """Follow another shape from now on."""
        self._shape = shape
        self._since_s = self._loop.now_s()
        self._rate = ByteRate(shape.bandwidth_bytes_s)

    def factor_at(self, now_s: float) -> float:
        """Return how many times slower it is now."""
        return self._shape.factor_at(now_s - self._since_s) if self._shape.timeline else 1.0

    def join(self, connection: Connection) -> None:
        """Let a connection send as soon as it may."""
        if connection.is_queued:
            return
        connection.is_queued = True
        now_s = self._loop.now_s()
        rate = connection.rate_of(self._shape)
        rate.begin(now_s)
        if not self._waiting:
            self._rate.begin(now_s)
        self._queue(connection, now_s)

    def _queue(self, connection: Connection, now_s: float) -> None:
        ready_s = connection.rate_of(self._shape).ready_at_s()
        if ready_s > now_s:
            self._loop.at(ready_s, lambda: self._enter(connection))
        else:
            self._enter(connection)

    def _enter(self, connection: Connection) -> None:
        self._waiting.append(connection)
        self._wake()

    def _wake(self) -> None:
        if self._timer is None and self._waiting:
            ready_s = self._rate.ready_at_s()
            if ready_s > self._loop.now_s():
                ready_s += _NAP_S
            self._timer = self._loop.at(ready_s, self._turns)

    def _turns(self) -> None:
        """Let connections send, one piece each, until the rate is used up."""
        self._timer = None
        now_s = self._loop.now_s()
        factor = self.factor_at(now_s)
        self._rate.set_factor(factor)
        for _ in range(_TURNS_MAX):
            if not self._waiting or self._rate.ready_at_s() > now_s:
                break
            self._turn(self._waiting.popleft(), now_s, factor)
        self._wake()

    def _turn(self, connection: Connection, now_s: float, factor: float) -> None:
        own = connection.rate_of(self._shape)
        own.set_factor(factor)
        count = connection.send(min(own.chunk_bytes, self._rate.chunk_bytes))
        own.spend(count, now_s)
        self._rate.spend(count, now_s)
        if connection.wanted is Sent.MORE:
            self._queue(connection, now_s)
        else:
            connection.is_queued = False


class Server:
    """The state of the process: sockets, shape and counts."""

    def __init__(self, orders: Orders) -> None:
        self.loop = Loop()
        self.tally = Tally()
        self.folder = Folder(orders.folder, orders.bucket) if orders.folder else None
        self.address = orders.address or ("", 0)
        self.pacer = Pacer(self.loop, orders.shape)
        self._draws = Draws(orders.seed)
        self._listening = socket.create_server((HOST, orders.port), backlog=_BACKLOG)
        self._listening.setblocking(False)
        self.port = int(self._listening.getsockname()[1])
        self.loop.watch_level(self._listening.fileno(), lambda mask: self._accept())
        self._cpu_before_s = time.process_time()
        self.reshape(orders.shape)

    def reshape(self, shape: Shape) -> None:
        """Follow another shape from now on; its time begins now."""
        self._shape = shape
        self._since_s = self.loop.now_s()
        self._requests = RequestRate(shape.requests_s)
        self.pacer.reshape(shape)

    def admit(self, request: Request, now_s: float) -> tuple[float, Treatment | None]:
        """Return when the answer to a request is due, and its treatment; None for a 503."""
        self.tally.begin(request.method)
        shape, at_s = self._shape, now_s - self._since_s
        treatment = self._draws.treat(shape, request.name, at_s=at_s, is_read=request.is_read)
        factor = self.pacer.factor_at(now_s)
        due_s = now_s + treatment.latency_s * factor
        wait_s = self._requests.wait_s(now_s, factor)
        if wait_s > 0 and shape.excess == "refuse":
            return due_s, None
        self._requests.take(now_s, factor)
        if treatment.fault is not None and treatment.fault.kind == "unavailable":
            self.tally.faults["unavailable"] += 1
            return due_s, None
        return due_s + wait_s, treatment

    def counts(self) -> Counts:
        """Return what was counted so far."""
        return self.tally.counts(time.process_time() - self._cpu_before_s)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                client, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError:  # the client has gone again, or we have too many
                return
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.tally.connections += 1
            self.loop.watch(client, Connection(self, client).on_event)
