"""A real S3 store as a host of a network, and a front that can be told to misbehave.

    with NetworkStore(network.host("store")) as store, Front(store) as front:
        uri = store.create_bucket("data")
        ...  # hosts read `uri` with store.access.options, or with front.access.options
        front.reshape(Shape(faults=(Fault(kind="unavailable"),)))  # 503 for everybody

Both run on the host of the store, behind its link.
"""

from __future__ import annotations

import dataclasses
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from penstock.testing.servers import S3Access
from testkit.network_host import Host
from testkit.network_process import Program
from testkit.shaper_counts import Counts
from testkit.shaper_server import Orders
from testkit.shaper_shape import Shape


class NetworkStore:
    """SeaweedFS on a host, reachable from all others."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.access = self.access_ipv6 = S3Access(endpoint="")
        self._program = Program("network_store_process")

    def __enter__(self) -> Self:
        self._program.start(self.host.namespace)
        try:
            port = self._program.ask(None)
        except BaseException:
            self._program.stop()
            raise
        self.access = S3Access(endpoint=f"http://{self.host.literal}:{port}")
        self.access_ipv6 = S3Access(endpoint=f"http://[{self.host.ipv6}]:{port}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._program.stop()

    def create_bucket(self, name: str) -> str:
        """Make a bucket and return its uri."""
        return str(self._program.ask(name))


class Front:
    """A shaper before a store whose host has IPv4."""

    def __init__(self, store: NetworkStore, shape: Shape | None = None) -> None:
        self._store = store
        self._shape = shape or Shape()
        self.access = store.access
        self._program = Program("network_front_process")

    def __enter__(self) -> Self:
        self._program.start(self._store.host.namespace)
        behind = urlsplit(self._store.access.endpoint)
        assert behind.port is not None
        orders = Orders(
            shape=self._shape,
            seed=0,
            port=0,
            address=(self._store.host.ipv4, behind.port),
            folder="",
            bucket="",
        )
        try:
            self._program.ask(self._store.host.ipv4)
            port = self._program.ask(orders)
        except BaseException:
            self._program.stop()
            raise
        self.access = dataclasses.replace(
            self._store.access, endpoint=f"http://{self._store.host.ipv4}:{port}"
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._program.stop()

    def reshape(self, shape: Shape) -> Counts:
        """Change the shape from now on, and return the counts so far."""
        counts: Counts = self._program.ask(shape)
        return counts

    def counts(self) -> Counts:
        """Return what was counted so far."""
        counts: Counts = self._program.ask(None)
        return counts
