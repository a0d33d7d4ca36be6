"""A store on a bad network: a proxy that shapes the traffic of a real endpoint, or of a folder.

    far = Shape(latency=Fixed(0.020), bandwidth_bytes_s=100e6)
    with Shaper("http://127.0.0.1:8333", far) as shaper:
        options = StoreOptions(endpoint=shaper.endpoint, ...)

It runs in a process of its own, so it does not slow the interpreter under test; it listens on
loopback and ends with its owner. `reshape` changes the shape while it runs, and `counts` returns
what it has seen. The same seed treats the same requests in the same way, in any order.

    python -m testkit.shaper --folder data --latency 20ms --bandwidth 100MB
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from penstock.errors import NotFoundError, OptionError, UnreachableError
from penstock.storage.options import StoreOptions
from penstock.testing.ports import HOST
from penstock.testing.servers import ServerError
from testkit import search_path
from testkit.shaper_counts import Counts
from testkit.shaper_server import Orders
from testkit.shaper_shape import Fault, Fixed, Latency, LogNormal, Samples, Shape, Slow

__all__ = [
    "Counts",
    "Fault",
    "Fixed",
    "Latency",
    "LogNormal",
    "Samples",
    "Shape",
    "Shaper",
    "Slow",
]

_CONNECT_TIMEOUT_S = 5.0
_END_TIMEOUT_S = 5.0
"""How long the process may take to notice that its pipe is closed."""


class Shaper:
    """A proxy before an http endpoint; it runs inside its `with` block."""

    def __init__(
        self, endpoint: str, shape: Shape | None = None, *, seed: int = 0, port: int = 0
    ) -> None:
        """Shape the endpoint at an address such as http://127.0.0.1:8333.

        `port` is that of the shaper; 0 takes a free one.
        """
        self._upstream = endpoint
        self._shape = shape or Shape()
        self._seed = seed
        self._wanted_port = port
        self._folder = ""
        self._bucket = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._pipe: Pipe | None = None
        self._port = 0
        self._last = Counts()
        self._lock = threading.Lock()
        if not 0 <= seed < 2**64:
            raise OptionError(f"seed must lie between 0 and 2^64, got {seed}")

    @classmethod
    def of_folder(
        cls,
        path: str | Path,
        shape: Shape | None = None,
        *,
        seed: int = 0,
        port: int = 0,
        bucket: str = "data",
    ) -> Self:
        """Serve a folder instead, for reading only: as `uri` by S3, as `url` by http."""
        if not Path(path).is_dir():
            raise NotFoundError(f"there is no folder {path} to serve; check the name")
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", bucket):
            raise OptionError(f"{bucket!r} is no bucket's name; use letters a-z, digits, . and -")
        shaper = cls("", shape, seed=seed, port=port)
        shaper._folder, shaper._bucket = os.fspath(Path(path).resolve()), bucket
        return shaper

    def __enter__(self) -> Self:
        assert self._process is None, "a shaper is entered once at a time"
        orders = Orders(
            shape=self._shape,
            seed=self._seed,
            port=self._wanted_port,
            address=None if self._folder else _reachable(self._upstream),
            folder=self._folder,
            bucket=self._bucket,
        )
        self._start()
        try:
            port = self._asked(orders)
        except BaseException:
            self.stop()
            raise
        if isinstance(port, OSError):
            self.stop()
            raise ServerError(
                f"cannot listen on port {self._wanted_port} of {HOST}: {port.strerror}; "
                "port=0 takes a free one"
            )
        self._port = port
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        path = search_path()
        with theirs:
            command = [sys.executable, "-P", "-m", "testkit.shaper_process"]
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )
        self._pipe = Pipe(ours.detach())
        self._owner = os.getpid()

    @property
    def endpoint(self) -> str:
        """The shaper's own address, without a `/` at its end."""
        assert self._port, "a shaper runs inside its with block"
        return f"http://{HOST}:{self._port}"

    @property
    def uri(self) -> str:
        """The served folder as a bucket: s3://data/."""
        assert self._bucket, "only a shaper of a folder has a bucket"
        return f"s3://{self._bucket}/"

    @property
    def url(self) -> str:
        """The served folder by plain http."""
        assert self._bucket, "only a shaper of a folder has a bucket"
        return f"{self.endpoint}/{self._bucket}/"

    @property
    def options(self) -> StoreOptions:
        """Store options for `uri`; for a real endpoint, give its keys beside our `endpoint`."""
        return StoreOptions(endpoint=self.endpoint, anonymous=True)

    def reshape(self, shape: Shape) -> Counts:
        """Change the shape, also for requests in flight, and return the counts so far.

        The times of the new shape start now.
        """
        self._shape = shape
        self._last = self._asked(shape)
        return self._last

    def counts(self) -> Counts:
        """Return the counts so far; after the block, the final ones."""
        if self._pipe is not None:
            self._last = self._asked(None)
        return self._last

    def _asked(self, what: Orders | Shape | None) -> Any:
        with self._lock:
            if self._pipe is None:
                raise ServerError("the shaper is not running; use it inside its with block")
            if os.getpid() != self._owner:
                raise ServerError(
                    f"the shaper belongs to process {self._owner}, this is {os.getpid()}: ask there"
                )
            try:
                self._pipe.send(what)
                return self._pipe.recv()
            except (EOFError, OSError) as error:
                assert self._process is not None
                code = self._process.wait(_END_TIMEOUT_S)
                raise ServerError(f"the shaper has ended (exit code {code})") from error

    def stop(self) -> None:
        """End the process that was started here."""
        if self._process is None:
            return
        is_ours = os.getpid() == self._owner  # a forked child closes its copy of the pipe only
        if is_ours and self._port and self._process.poll() is None:
            self.counts()
        assert self._pipe is not None
        self._pipe.close()
        self._pipe = None
        self._port = 0
        if is_ours:
            self._wait()
        self._process = None

    def _wait(self) -> None:
        assert self._process is not None
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _reachable(endpoint: str) -> tuple[str, int]:
    """Return the numeric address of an endpoint that answers."""
    parts = urlsplit(endpoint)
    if parts.scheme != "http" or not parts.hostname or parts.path.strip("/"):
        raise OptionError(
            f"{endpoint!r} cannot be shaped; give scheme, host and port of a plain http endpoint, "
            "for example http://127.0.0.1:8333"
        )
    try:
        with socket.create_connection(
            (parts.hostname, parts.port or 80), timeout=_CONNECT_TIMEOUT_S
        ) as tried:
            host, port = tried.getpeername()[:2]
            return str(host), int(port)
    except OSError as error:
        raise UnreachableError(
            f"cannot reach {parts.netloc}: {error.strerror or error}; is the store running there?",
            uri=endpoint,
        ) from error


if __name__ == "__main__":
    from testkit.shaper_command import main

    sys.exit(main())
