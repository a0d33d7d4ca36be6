"""As much of HTTP/1.1 as a proxy needs: heads, lengths of bodies, ends of chunked ones.

Heads are kept as they came, byte for byte. An S3 signature covers the Host header among others, and
the store checks it against the head it receives: so it must receive the client's own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from typing import Literal

HEAD_BYTES_MAX = 64 * 2**10
"""A longer head is refused."""

_HEADER = re.compile(rb"^([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*(.*?)[ \t]*\r?$", re.M)
_RANGE = re.compile(rb"bytes=(\d*)-(\d*)")
_REASONS = {
    200: "OK", 206: "Partial Content", 400: "Bad Request", 404: "Not Found",
    405: "Method Not Allowed", 416: "Range Not Satisfiable", 431: "Request Header Fields Too Large",
    502: "Bad Gateway", 503: "Slow Down",
}  # fmt: skip

Length = int | Literal["chunked", "until close"]


class BadHeadError(Exception):
    """This is not HTTP/1.1."""


@dataclass(frozen=True, slots=True)
class Request:
    """The head of a request."""

    raw: bytes
    """As it came, with the empty line."""
    method: bytes
    target: bytes
    """Path and query, still quoted."""
    headers: dict[bytes, bytes]
    """By lower-case name."""
    is_old: bool = False
    """HTTP/1.0, where connections are not kept unless it says so."""

    @property
    def path(self) -> bytes:
        """The target without its query."""
        return self.target.partition(b"?")[0]

    @property
    def query(self) -> bytes:
        """What follows the question mark."""
        return self.target.partition(b"?")[2]

    @property
    def name(self) -> bytes:
        """What tells this request from others, and is the same when it is asked again."""
        return b"%s %s %s" % (self.method, self.path, self.headers.get(b"range", b""))

    @property
    def is_read(self) -> bool:
        """Whether it asks for the bytes of an object, rather than for a listing or a change."""
        return (
            self.method == b"GET" and self.path.count(b"/") > 1 and b"list-type" not in self.query
        )

    @property
    def wants_close(self) -> bool:
        """Whether the client hangs up after the answer."""
        said = self.headers.get(b"connection", b"").lower()
        return said == b"close" or (self.is_old and said != b"keep-alive")

    @property
    def upload(self) -> Length:
        """The length of the body that follows."""
        if b"chunked" in self.headers.get(b"transfer-encoding", b"").lower():
            return "chunked"
        return _number(self.headers.get(b"content-length", b"0"))

    def span(self, size_bytes: int) -> tuple[int, int] | None:
        """Return the part of an object that is asked for, as start and stop; None if it has none.

        >>> request_of(b"GET /b/x HTTP/1.1\\r\\nRange: bytes=2-9\\r\\n\\r\\n").span(5)
        (2, 5)
        """
        found = _RANGE.fullmatch(self.headers.get(b"range", b""))
        if found is None or found[0] == b"bytes=-":
            return 0, size_bytes
        if not found[1]:
            return (max(0, size_bytes - int(found[2])), size_bytes) if int(found[2]) else None
        start = int(found[1])
        stop = min(int(found[2]) + 1 if found[2] else size_bytes, size_bytes)
        return (start, stop) if start < stop else None


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of an answer."""

    raw: bytes
    status: int
    length: Length
    """Of the body."""


def end_of_head(received: bytearray) -> int:
    """Return the length of a head at the beginning, or 0 when it is not all there."""
    end = received.find(b"\r\n\r\n")
    if end < 0 and len(received) > HEAD_BYTES_MAX:
        raise BadHeadError(f"no end of the head in {len(received)} bytes")
    return end + 4 if end >= 0 else 0


def request_of(raw: bytes) -> Request:
    """Return a request from its head."""
    first, _, rest = raw.partition(b"\r\n")
    parts = first.split(b" ")
    if len(parts) != 3 or parts[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise BadHeadError(f"not a request: {first[:80]!r}")
    return Request(raw, parts[0], parts[1], _headers(rest), parts[2] == b"HTTP/1.0")


def answer_of(raw: bytes, method: bytes) -> Answer:
    """Return the answer to a request of that method from its head."""
    first, _, rest = raw.partition(b"\r\n")
    parts = first.split(b" ", 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1."):
        raise BadHeadError(f"not an answer: {first[:80]!r}")
    status, headers = _number(parts[1]), _headers(rest)
    length: Length = "until close"
    if method == b"HEAD" or status in (204, 304) or status < 200:
        length = 0
    elif b"chunked" in headers.get(b"transfer-encoding", b"").lower():
        length = "chunked"
    elif b"content-length" in headers:
        length = _number(headers[b"content-length"])
    return Answer(raw, status, length)


def _headers(text: bytes) -> dict[bytes, bytes]:
    return {name.lower(): value for name, value in _HEADER.findall(text)}


def _number(text: bytes) -> int:
    if not text.isdigit():
        raise BadHeadError(f"not a number: {text[:40]!r}")
    return int(text)


def head_of(status: int, length: int, headers: str = "") -> bytes:
    """Return the head of an answer of our own. Headers end with a line break each."""
    reason = _REASONS[status]
    return (
        f"HTTP/1.1 {status} {reason}\r\nContent-Length: {length}\r\n"
        f"Server: penstock-shaper\r\n{headers}\r\n"
    ).encode("latin-1")


def error_of(status: int, code: str, message: str) -> tuple[bytes, bytes]:
    """Return head and body of an error as S3 writes it."""
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{escape(message, quote=False)}</Message></Error>"
    ).encode()
    return head_of(status, len(body), "Content-Type: application/xml\r\n"), body


class ChunkedEnd:
    """Follows a chunked body, to know where it ends."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._skip = 0
        self._is_trailer = False
        self.has_ended = False

    def feed(self, data: bytes | bytearray) -> int:
        """Look at the next bytes; return how many of them belong to the body."""
        at = 0
        while at < len(data) and not self.has_ended:
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
                at += step
                continue
            self._line.append(data[at])
            at += 1
            if self._line.endswith(b"\r\n"):
                self._on_line(bytes(self._line[:-2]))
                self._line.clear()
            elif len(self._line) > HEAD_BYTES_MAX:
                raise BadHeadError("an endless line between chunks")
        return at

    def _on_line(self, line: bytes) -> None:
        if self._is_trailer:
            self.has_ended = not line
            return
        try:
            size_bytes = int(line.partition(b";")[0], 16)
        except ValueError:
            raise BadHeadError(f"not the size of a chunk: {line[:40]!r}") from None
        self._is_trailer = size_bytes == 0
        self._skip = size_bytes + 2 if size_bytes else 0
