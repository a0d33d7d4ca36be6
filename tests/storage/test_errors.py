"""Each failure as a sentence: what failed, the numbers, the way out."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path

import pytest

from penstock.errors import (
    DeniedError,
    ExistsError,
    NotFoundError,
    OptionError,
    RangeError,
    StoreError,
    TruncatedError,
    UnavailableError,
    UnreachableError,
)
from penstock.storage import ObjectInfo, RemoteStore, StoreOptions
from penstock.testing.http_server import Fault, HttpServer
from penstock.testing.ports import free_ports

_STATUSES = [
    (401, "", DeniedError, "refuses no credentials (anonymous) (401)"),
    (403, "AccessDenied", DeniedError, "it is not public: leave out anonymous=True"),
    (403, "SignatureDoesNotMatch", DeniedError, "the secret does not belong to this key"),
    (403, "InvalidAccessKeyId", DeniedError, "the store does not know this key"),
    (403, "ExpiredToken", DeniedError, "sign in again"),
    (400, "ExpiredToken", DeniedError, "(400 ExpiredToken); the session has expired"),
    (400, "ExpiredTokenException", DeniedError, "sign in again or set new keys"),
    (400, "RequestExpired", DeniedError, "resume the run from its last state"),
    (400, "InvalidToken", DeniedError, "its token is not valid"),
    (400, "InvalidRequest", StoreError, "refused the request (400 InvalidRequest)"),
    (403, "RequestTimeTooSkewed", DeniedError, "clock is wrong"),
    (404, "NoSuchKey", NotFoundError, "s3://bucket/x does not exist (404)"),
    (404, "NoSuchBucket", NotFoundError, "s3://bucket/ does not exist (404 NoSuchBucket)"),
    (409, "", ExistsError, "exists already (409)"),
    (412, "PreconditionFailed", ExistsError, "exists already (412 PreconditionFailed)"),
    (409, "ConditionalRequestConflict", UnavailableError, "two writers at once"),
    (429, "", UnavailableError, "answered 429; it is overloaded"),
    (500, "InternalError", UnavailableError, "answered 500 InternalError"),
    (503, "SlowDown", UnavailableError, "503 SlowDown"),
    (301, "PermanentRedirect", OptionError, "another region"),
    (418, "", StoreError, "refused the request (418)"),
]


def test_who_is_refused_is_told_what_to_change_and_not_what_was_done_already() -> None:
    fault = Fault(kind="status", status=403, code="AccessDenied", count=9)
    with HttpServer({"bucket/x": b"1"}, faults=(fault,)) as server:
        options = StoreOptions(endpoint=server.url, access_key="me", secret_key="secret")
        with pytest.raises(DeniedError, match=r"may read this.* or pass anonymous=True"):
            RemoteStore("s3://bucket", options).read_range(ObjectInfo(key="x", size_bytes=1), 0, 1)
        with pytest.raises(DeniedError, match="plain http sends none"):
            RemoteStore(f"{server.url}/bucket", StoreOptions()).read_range(
                ObjectInfo(key="x", size_bytes=1), 0, 1
            )
        with pytest.raises(DeniedError) as caught:
            options = StoreOptions(endpoint=server.url, anonymous=True)
            RemoteStore("s3://bucket", options).read_range(ObjectInfo(key="x", size_bytes=1), 0, 1)
    assert "pass anonymous=True" not in str(caught.value)


@pytest.mark.parametrize(("status", "code", "kind", "words"), _STATUSES)
def test_a_status_becomes_an_error_with_a_way_out(
    status: int, code: str, kind: type[Exception], words: str
) -> None:
    fault = Fault(kind="status", status=status, code=code, count=9)
    with HttpServer({"bucket/x": b"1"}, faults=(fault,)) as server:
        store = RemoteStore("s3://bucket", StoreOptions(endpoint=server.url, anonymous=True))
        with pytest.raises(kind, match=re.escape(words)) as caught:
            store.read_range(ObjectInfo(key="x", size_bytes=1), 0, 1)
    assert "s3://bucket/" in str(caught.value)
    assert "Debug source" not in str(caught.value)
    if isinstance(caught.value, StoreError):
        assert caught.value.uri == "s3://bucket/x"
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_no_credentials_anywhere_says_where_they_were_sought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with HttpServer({}) as server:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", server.url)
        store = RemoteStore("s3://bucket", StoreOptions(endpoint=server.url))
        with pytest.raises(DeniedError, match=r"no credentials were found.*anonymous=True"):
            store.read("x")


def test_416_names_the_size() -> None:
    with HttpServer({"x": bytes(100)}) as server:
        with pytest.raises(RangeError, match="bytes 200 to 210 were asked for, the object has 100"):
            RemoteStore(server.url).read_range(ObjectInfo(key="x", size_bytes=100), 200, 10)
        with pytest.raises(RangeError, match="bytes 95 to 105 were asked for, the object has 100"):
            RemoteStore(server.url).read_range(ObjectInfo(key="x", size_bytes=100), 95, 10)


@pytest.mark.parametrize("whole", [True, False])
def test_a_body_that_ends_early_is_truncated(whole: bool) -> None:
    with HttpServer({"x": bytes(100_000)}, faults=(Fault(kind="truncate"),)) as server:
        store = RemoteStore(server.url)
        with pytest.raises(TruncatedError, match="ended before all promised bytes"):
            info = ObjectInfo(key="x", size_bytes=100_000)
            store.read("x") if whole else store.read_range(info, 0, 50_000)


def test_silence_is_a_time_out_that_names_host_and_seconds() -> None:
    with HttpServer({"x": b"1"}, faults=(Fault(kind="delay"),)) as server:
        host = server.url.removeprefix("http://")
        words = f"cannot reach {host}: nothing arrived within 0.3 s"
        with pytest.raises(UnreachableError, match=words):
            RemoteStore(server.url, StoreOptions(timeout_s=0.3)).read("x")


def test_a_broken_connection_is_unreachable() -> None:
    with (
        HttpServer({"x": b"1"}, faults=(Fault(kind="reset"),)) as server,
        pytest.raises(UnreachableError, match="the connection broke"),
    ):
        RemoteStore(server.url).read("x")


def test_a_refused_connection_names_the_port() -> None:
    (port,) = free_ports(1)
    with pytest.raises(UnreachableError, match=rf"127.0.0.1:{port}: the connection was refused"):
        RemoteStore(f"http://127.0.0.1:{port}").read("x")


def test_an_unknown_name_says_so() -> None:
    with pytest.raises(UnreachableError, match=r"no-such-host\.invalid: its name cannot be resol"):
        RemoteStore("http://no-such-host.invalid").read("x")


def test_a_server_without_ranges_says_so() -> None:
    with HttpServer({"x": bytes(100)}) as server:
        server.ignores_ranges = True
        with pytest.raises(StoreError, match="answers no ranges"):
            RemoteStore(server.url).read_range(ObjectInfo(key="x", size_bytes=100), 0, 10)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"endpoint": "localhost:9000"}, "must start with http://"),
        ({"access_key": "a"}, "access_key is given without secret_key"),
        ({"secret_key": "a"}, "secret_key is given without access_key"),
        ({"anonymous": True, "profile": "p"}, "exclude each other"),
        ({"timeout_s": 0.0}, "timeout_s must lie between"),
        ({"timeout_s": 500.0}, "timeout_s must lie between"),
    ],
)
def test_options_refuse_nonsense(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        StoreOptions(**wrong)  # type: ignore[arg-type]


def test_the_secret_is_in_no_representation() -> None:
    options = StoreOptions(access_key="id", secret_key="hush", session_token="hush")
    assert "hush" not in repr(RemoteStore("s3://bucket", options))
