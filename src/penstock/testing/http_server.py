"""A small http file server that can be told to misbehave.

It serves a dictionary of objects with ranges and HEAD, logs every request, and answers chosen ones
with scripted faults. An S3 client (anonymous, path style) can read from it too, so the errors of
both protocols are tested on the wire.
"""

from __future__ import annotations

import functools
import random
import re
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import unquote

import xxhash

from penstock.testing.ports import HOST

_MODIFIED = "Wed, 21 Oct 2015 07:28:00 GMT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong, and with which requests."""

    kind: Literal["status", "truncate", "delay", "reset", "corrupt"]
    """An error status, a body cut in half, silence, a broken connection, one wrong byte."""
    path: str = ""
    """Only requests whose path contains this."""
    method: str = "GET"
    """Only requests of this method."""
    first: int = 0
    """How many matching requests go well before."""
    count: int = 1
    """How many matching requests go wrong."""
    status: int = 503
    """For "status"."""
    code: str = ""
    """For "status": the error code S3 would write into the body."""
    delay_s: float = 60.0
    """For "delay": how long nothing is sent; the server's end cuts it short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRequest:
    """A request as it came in."""

    method: str
    path: str
    range: str
    """The Range header, or empty."""
    authorization: str = ""
    """Which key has signed it, or empty."""


@functools.lru_cache(maxsize=256)
def _mark(data: bytes) -> str:
    return f'"{xxhash.xxh3_128_hexdigest(data)}"'


class HttpServer:
    """Serves from `with` to the end of its block."""

    def __init__(
        self, objects: Mapping[str, bytes], *, faults: tuple[Fault, ...] = (), seed: int = 0
    ) -> None:
        self.objects = dict(objects)
        self.faults = faults
        self.ignores_ranges = False
        self.log: list[LoggedRequest] = []
        self.random = random.Random(seed)
        # Cuts delays short: a handler must not outlive the test that asked for a minute of silence.
        self.has_ended = threading.Event()
        self._matched: dict[Fault, int] = {}
        # Each connection has a thread: the log and the counts of faults are theirs together.
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None

    def __enter__(self) -> Self:
        self.has_ended.clear()
        self._server = _Server((HOST, 0), _handler_of(self))
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None
        # Before the shutdown, which would wait for handlers that are in a delay.
        self.has_ended.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        """The address, without a `/` at its end."""
        assert self._server is not None, "the server runs inside its with block"
        return f"http://{HOST}:{self._server.server_address[1]}"

    def fault_of(self, request: LoggedRequest) -> Fault | None:
        """Log a request and return its fault, if it has one."""
        with self._lock:
            self.log.append(request)
            for fault in self.faults:
                if fault.method == request.method and fault.path in request.path:
                    number = self._matched.get(fault, 0)
                    self._matched[fault] = number + 1
                    if fault.first <= number < fault.first + fault.count:
                        return fault
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients that hang up are part of the tests."""


def _handler_of(server: HttpServer) -> type[BaseHTTPRequestHandler]:
    class OwnedHandler(_Handler):
        owner = server

    return OwnedHandler


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body leave together: apart, they would wait 40 ms for each other.
    wbufsize = 2**16
    disable_nagle_algorithm = True
    owner: HttpServer

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet: the log is a list."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0]).lstrip("/")
        wanted = self.headers.get("Range", "")
        request = LoggedRequest(
            method=self.command,
            path=path,
            range=wanted,
            authorization=self.headers.get("Authorization", ""),
        )
        fault = self.owner.fault_of(request)
        if fault is not None and fault.kind == "delay":
            self.owner.has_ended.wait(fault.delay_s)
        if fault is not None and fault.kind == "reset":
            self._reset()
        elif fault is not None and fault.kind == "status":
            self._answer_error(fault.status, fault.code)
        elif path not in self.owner.objects:
            self._answer_error(404, "NoSuchKey")
        else:
            self._answer_object(self.owner.objects[path], wanted, fault)

    def _reset(self) -> None:
        # With a linger of 0 s, close sends RST instead of FIN: the client sees a broken connection.
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True

    def _answer_error(self, status: int, code: str) -> None:
        body = f"<Error><Code>{code}</Code></Error>".encode() if code else b""
        self._answer(status, body, {})

    def _answer_object(self, data: bytes, wanted: str, fault: Fault | None) -> None:
        marks = {"ETag": _mark(data), "Last-Modified": _MODIFIED}
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)
        status = 200
        if span is not None and not self.owner.ignores_ranges:
            start, stop = int(span[1]), min(int(span[2] or len(data)), len(data) - 1) + 1
            if start >= len(data):
                self._answer_error(416, "InvalidRange")
                return
            marks["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            data, status = data[start:stop], 206
        self._answer(status, data, marks, fault)

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str], fault: Fault | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is not None and fault.kind == "corrupt" and body:
            changed = bytearray(body)
            changed[self.owner.random.randrange(len(body))] ^= 0xFF
            body = bytes(changed)
        if fault is not None and fault.kind == "truncate":
            # The header promises the whole body; only a closed connection shows that it is cut.
            body = body[: len(body) // 2]
            self.close_connection = True
        self.wfile.write(body)
