"""Fixtures that tests of several rooms share."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import settings

from penstock.storage import StoreOptions
from penstock.testing.servers import S3Access, SeaweedServer

# A run in the background ignores Ctrl-C, and so would all programs that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A deadline is a time limit on a test: it would fail on a busy machine and prove nothing.
settings.register_profile("penstock", deadline=None)
settings.load_profile("penstock")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A fresh bucket on a real server."""

    uri: str
    options: StoreOptions
    access: S3Access


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Access]:
    """Start SeaweedFS on first use; it ends with the session."""
    with SeaweedServer() as access:
        yield access


@pytest.fixture
def s3(s3_server: S3Access) -> Bucket:
    """Give an empty bucket."""
    uri = s3_server.create_bucket(f"test-{uuid.uuid4().hex}")
    return Bucket(uri=uri, options=s3_server.options, access=s3_server)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave Ceph out unless it is asked for, and say so."""
    if "ceph" in (config.getoption("markexpr") or ""):
        return
    for item in items:
        if item.get_closest_marker("ceph"):
            item.add_marker(pytest.mark.skip(reason="needs Ceph: run `pytest -m ceph`"))
