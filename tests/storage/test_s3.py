"""S3 against SeaweedFS."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest

from penstock.errors import DeniedError, NotFoundError
from penstock.storage import (
    ReadPool,
    RemoteStore,
    RetryingStore,
    Store,
    StoreOptions,
    open_store,
    resolve,
)
from penstock.testing.conformance import StoreConformance, fill, some_bytes
from penstock.testing.servers import S3Access

if TYPE_CHECKING:
    from tests.conftest import Bucket


class TestS3Store(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def filled(cls, s3_server: S3Access) -> Store:
        uri = s3_server.create_bucket("filled")  # once: tests only read from it
        return fill(RemoteStore(uri + "some/prefix", s3_server.options))

    @pytest.fixture
    def store(self, s3: Bucket) -> Store:
        return RemoteStore(s3.uri + "some/prefix", s3.options)


class TestRetryingS3Store(TestS3Store):
    @pytest.fixture(scope="class")
    @classmethod
    def filled(cls, s3_server: S3Access) -> Store:
        return fill(open_store(s3_server.create_bucket("filled-retrying"), s3_server.options))

    @pytest.fixture
    def store(self, s3: Bucket) -> Store:
        return open_store(s3.uri, s3.options)


def test_a_prefix_hides_what_lies_beside_it(s3: Bucket) -> None:
    outer = RemoteStore(s3.uri, s3.options)
    outer.write("train/a", b"1")
    outer.write("train-old/b", b"2")
    inner = RemoteStore(s3.uri + "train", s3.options)
    assert [info.key for info in inner.list()] == ["a"]
    assert inner.uri == s3.uri + "train/"
    assert inner.read("a") == b"1"


def test_listings_of_several_pages_are_complete_and_sorted(s3: Bucket) -> None:
    store = RemoteStore(s3.uri, s3.options)
    names = [f"{number:04d}{'/' if number % 7 else '-'}x" for number in range(1100)]
    with ReadPool(8) as pool:
        list(pool.map_unordered(lambda name: store.write(name, b""), names))
    assert [info.key for info in store.list()] == sorted(names)
    assert 0 < len(store.peek()) <= 1000


def test_an_etag_changes_with_the_content(s3: Bucket) -> None:
    store = RemoteStore(s3.uri, s3.options)
    first = store.write("x", b"1").etag
    assert first
    assert store.write("x", b"2").etag != first
    assert store.info("x").mtime_ns > 0


def test_a_wrong_secret_is_denied_and_not_told(s3: Bucket) -> None:
    options = StoreOptions(
        endpoint=s3.access.endpoint, access_key=s3.access.access_key, secret_key="very-wrong"
    )
    store = RemoteStore(s3.uri, options)
    for ask in (lambda: store.read("x"), lambda: store.info("x"), lambda: list(store.list())):
        with pytest.raises(DeniedError, match=r"access key pens… of the options \(403") as caught:
            ask()
        assert "very-wrong" not in str(caught.value)
    assert "very-wrong" not in repr(store)


def test_no_credentials_at_all_are_denied_with_a_way_out(s3: Bucket) -> None:
    options = StoreOptions(endpoint=s3.access.endpoint, anonymous=True)
    with pytest.raises(DeniedError, match=r"no credentials \(anonymous\).*profile="):
        RemoteStore(s3.uri, options).read("x")


def test_a_missing_bucket_is_named(s3: Bucket) -> None:
    store = RemoteStore("s3://no-such-bucket-here/", s3.options)
    for ask in (lambda: store.read("x"), lambda: list(store.list())):
        with pytest.raises(NotFoundError, match=r"s3://no-such-bucket-here/ does not exist"):
            ask()


def test_credentials_come_from_the_environment(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.access.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.access.secret_key)
    store = RemoteStore(s3.uri, StoreOptions(timeout_s=29))  # an address no other test has used
    store.write("x", b"1")
    assert store.read("x") == b"1"


def test_options_are_not_mixed_with_the_environment(
    s3: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-another-account")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-another-account")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-another-account")
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
    store = RemoteStore(s3.uri, s3.options)  # a fresh bucket has no client yet
    store.write("x", b"1")
    assert store.read("x") == b"1"


def test_s3_folders_globs_and_braces_are_resolved(s3: Bucket) -> None:
    store = open_store(s3.uri, s3.options)
    for number in range(12):
        store.write(f"train/{number:03d}.tar", some_bytes(number))
    store.write("train/_SUCCESS", b"")
    everything = resolve(s3.uri + "train", s3.options)
    assert (len(everything.objects), everything.is_everything) == (12, True)
    assert everything.store.uri == s3.uri + "train/"
    assert isinstance(everything.store, RetryingStore)
    globbed = resolve(s3.uri + "train/00[0-4].tar", s3.options)
    assert [info.key for info in globbed.objects] == [f"00{number}.tar" for number in range(5)]
    assert not globbed.is_everything
    braced = resolve(s3.uri + "train/{003..005}.tar", s3.options)
    assert [info.size_bytes for info in braced.objects] == [3, 4, 5]
    single = resolve(s3.uri + "train/004.tar", s3.options)
    assert [info.key for info in single.objects] == ["004.tar"]
    with pytest.raises(NotFoundError, match=r"train/003\.tar"):
        resolve(s3.uri + "train/03.tar", s3.options)


def test_a_pickled_store_carries_its_options(s3: Bucket) -> None:
    store = RemoteStore(s3.uri, s3.options)
    assert pickle.loads(pickle.dumps(store)) == store
