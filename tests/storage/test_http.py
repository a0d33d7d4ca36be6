"""Plain http on the wire."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from penstock.errors import ChangedError, NotFoundError, OptionError, UnavailableError
from penstock.storage import (
    ObjectInfo,
    RemoteStore,
    RetryingStore,
    RetryPolicy,
    Store,
    StoreOptions,
    resolve,
)
from penstock.testing.conformance import OBJECTS, ReadConformance
from penstock.testing.http_server import Fault, HttpServer


class TestHttpStore(ReadConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls) -> Iterator[HttpServer]:
        objects = {f"data set/{key}": data for key, data in OBJECTS.items()}
        with HttpServer(objects) as server:
            yield server

    @pytest.fixture
    def filled(self, server: HttpServer) -> Store:
        return RemoteStore(f"{server.url}/data%20set/")


class TestAnonymousS3Store(ReadConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls) -> Iterator[HttpServer]:
        objects = {f"bucket/prefix/{key}": data for key, data in OBJECTS.items()}
        with HttpServer(objects) as server:
            yield server

    @pytest.fixture
    def filled(self, server: HttpServer) -> Store:
        options = StoreOptions(endpoint=server.url, anonymous=True)
        return RemoteStore("s3://bucket/prefix", options)


class TestAnonymousAzureStore(TestAnonymousS3Store):
    @pytest.fixture
    def filled(self, server: HttpServer) -> Store:
        options = StoreOptions(endpoint=server.url, anonymous=True)
        return RemoteStore("abfs://bucket@account.dfs.core.windows.net/prefix", options)


def _quick(store: Store, **policy: float) -> RetryingStore:
    waits = {"first_wait_s": 0.001, "wait_max_s": 0.001, **policy}
    return RetryingStore(store, RetryPolicy(**waits), source=random.Random(1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind="status", status=503, count=2),
        Fault(kind="status", status=429, count=2),
        Fault(kind="truncate", count=2),
        Fault(kind="reset", count=2),
        Fault(kind="delay", count=2),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.status}",
)
def test_two_failures_are_survived_with_three_requests(fault: Fault) -> None:
    with HttpServer({"x": b"right" * 1000}, faults=(fault,)) as server:
        store = _quick(RemoteStore(server.url, StoreOptions(timeout_s=0.5)))
        assert (
            store.read_range(ObjectInfo(key="x", size_bytes=5000), 5, 2000)
            == (b"right" * 1000)[5:2005]
        )
        assert store.num_attempts == 3
        assert [request.range for request in server.log] == ["bytes=5-2004"] * 3


def test_an_outage_ends_with_a_count() -> None:
    with HttpServer({"x": b"1"}, faults=(Fault(kind="status", count=1000),)) as server:
        store = _quick(RemoteStore(server.url), attempts_max=5)
        with pytest.raises(UnavailableError, match=r"503.*gave up after 5 attempts"):
            store.read("x")
        assert len(server.log) == 5


def test_plain_http_is_read_only_and_unlisted() -> None:
    with HttpServer({"a/x": b"1"}) as server:
        store = RemoteStore(server.url)
        assert not store.can_list
        with pytest.raises(OptionError, match="read only"):
            store.write("y", b"1")
        with pytest.raises(OptionError, match=r"cannot be listed.*\{000\.\.127\}"):
            list(store.list())
        with pytest.raises(OptionError, match="cannot be listed"):
            resolve(f"{server.url}/a/")
        with pytest.raises(OptionError, match="write braces"):
            resolve(f"{server.url}/a/*")


def test_braces_and_lists_of_http_objects_are_checked() -> None:
    objects = {f"a/{number:02d}.tar": bytes(number) for number in range(20)}
    with HttpServer(objects) as server:
        braced = resolve(f"{server.url}/a/{{00..19}}.tar")
        assert [info.size_bytes for info in braced.objects] == list(range(20))
        assert braced.store.uri == f"{server.url}/a/"
        assert {request.method for request in server.log} == {"HEAD"}
        listed = resolve([f"{server.url}/a/07.tar", f"{server.url}/a/03.tar"])
        assert [info.key for info in listed.objects] == ["07.tar", "03.tar"]
        with pytest.raises(NotFoundError, match=r"a/20\.tar does not exist"):
            resolve(f"{server.url}/a/{{00..20}}.tar")


@pytest.mark.parametrize("data", [b"other", b"longer than before"])
def test_an_object_that_was_replaced_is_not_read_in_part(data: bytes) -> None:
    """The server knows no conditions: the marks of its answer are compared."""
    with HttpServer({"x": b"first"}) as server:
        store = RemoteStore(server.url)
        known = store.info("x")
        assert store.read_range(known, 1, 2) == b"ir"
        server.objects["x"] = data
        with pytest.raises(ChangedError, match="x is not the object that was indexed: 5 bytes"):
            store.read_range(known, 1, 2)
        assert store.read_range(store.info("x"), 0, 5) == data[:5]
