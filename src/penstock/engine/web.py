"""A small HTTP server for /metrics and /healthz."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from penstock.engine.peers.base import Address
from penstock.engine.prometheus import CONTENT_TYPE

_REQUEST_S_MAX = 5.0
_AT_ONCE_MAX = 16
_log = logging.getLogger("penstock.web")


class WebPages:
    """Answers over HTTP from threads of its own."""

    def __init__(
        self,
        address: Address,
        metrics: Callable[[], str],
        health: Callable[[], tuple[int, str]] | None = None,
    ) -> None:
        """`health` returns a status code and a line, for /healthz."""
        pages: dict[str, Callable[[], tuple[int, str, str]]] = {
            "/metrics": lambda: (200, CONTENT_TYPE, metrics())
        }
        if health is not None:
            pages["/healthz"] = lambda: (*_plain(health()),)
        self._server = _WebServer(address, pages)
        host, port = self._server.server_address[:2]
        self.address = Address(host=str(host), port=int(port))
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="penstock-http", daemon=True
        )

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()


def _plain(health: tuple[int, str]) -> tuple[int, str, str]:
    return health[0], "text/plain; charset=utf-8", health[1] + "\n"


class _WebServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(
        self, address: Address, pages: dict[str, Callable[[], tuple[int, str, str]]]
    ) -> None:
        self.pages = pages
        # Bounds the pages made at once: each request has a thread, and anybody may ask.
        self.room = threading.BoundedSemaphore(_AT_ONCE_MAX)
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        super().__init__((address.host, address.port), _PageHandler)

    def server_bind(self) -> None:
        """Bind without looking up a name for the address, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]


class _PageHandler(BaseHTTPRequestHandler):
    timeout = _REQUEST_S_MAX
    server: _WebServer

    def do_GET(self) -> None:
        """Answer a page."""
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        """Answer that there is a page."""
        self._answer(has_body=False)

    def _answer(self, *, has_body: bool) -> None:
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            code, kind, text = 404, "text/plain", f"there is {' and '.join(self.server.pages)}\n"
        elif not self.server.room.acquire(blocking=False):
            code, kind, text = 503, "text/plain", f"more than {_AT_ONCE_MAX} at once\n"
        else:
            try:
                code, kind, text = page()
            except Exception:
                _log.exception("the page %s could not be made", self.path)
                code, kind, text = 500, "text/plain", "failed; see the log\n"
            finally:
                self.server.room.release()
        data = text.encode(errors="replace")
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if has_body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Log requests at level DEBUG."""
        _log.debug(format, *args)
