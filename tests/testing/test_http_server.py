from __future__ import annotations

import urllib.error
import urllib.request

import pytest

from penstock.testing.http_server import Fault, HttpServer


def _get(url: str, **headers: str) -> tuple[int, bytes]:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
        return answer.status, answer.read()


def test_ranges_are_answered_as_http_says() -> None:
    with HttpServer({"a b": b"0123456789"}) as server:
        assert _get(f"{server.url}/a%20b") == (200, b"0123456789")
        assert _get(f"{server.url}/a%20b", Range="bytes=2-4") == (206, b"234")
        assert _get(f"{server.url}/a%20b", Range="bytes=8-") == (206, b"89")
        assert _get(f"{server.url}/a%20b", Range="bytes=8-99") == (206, b"89")
        with pytest.raises(urllib.error.HTTPError, match="416"):
            _get(f"{server.url}/a%20b", Range="bytes=10-11")
        assert [request.path for request in server.log] == ["a b"] * 5


def test_a_fault_hits_only_the_requests_it_names() -> None:
    fault = Fault(kind="status", status=503, path="bad", first=1, count=1)
    with HttpServer({"bad": b"1", "good": b"1"}, faults=(fault,)) as server:
        statuses = []
        for name in ("good", "bad", "bad", "good", "bad"):
            try:
                statuses.append(_get(f"{server.url}/{name}")[0])
            except urllib.error.HTTPError as error:
                statuses.append(error.code)
        assert statuses == [200, 200, 503, 200, 200]


def test_the_same_seed_corrupts_the_same_byte() -> None:
    found = set()
    for _ in range(2):
        fault = Fault(kind="corrupt", count=9)
        with HttpServer({"x": bytes(1000)}, faults=(fault,), seed=5) as server:
            found.add(_get(f"{server.url}/x")[1])
    (data,) = found
    assert data.count(0) == 999


def test_a_server_can_be_entered_again() -> None:
    server = HttpServer({"x": b"1"})
    for _ in range(2):
        with server:
            assert _get(f"{server.url}/x") == (200, b"1")
