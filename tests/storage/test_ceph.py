"""S3 against Ceph's gateway: `tools/install_ceph.sh`, then `pytest -m ceph`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from penstock.errors import DeniedError, NotFoundError
from penstock.storage import RemoteStore, Store, StoreOptions, open_store
from penstock.testing.conformance import StoreConformance, fill
from penstock.testing.servers import CephCluster, S3Access

pytestmark = pytest.mark.ceph


@pytest.fixture(scope="module")
def ceph() -> Iterator[S3Access]:
    with CephCluster() as access:
        yield access


class TestCephStore(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def filled(cls, ceph: S3Access) -> Store:
        return fill(open_store(ceph.create_bucket("filled"), ceph.options))

    @pytest.fixture
    def store(self, ceph: S3Access) -> Store:
        return open_store(ceph.create_bucket(f"test-{uuid.uuid4().hex}"), ceph.options)


def test_ceph_names_a_missing_bucket(ceph: S3Access) -> None:
    with pytest.raises(NotFoundError, match="s3://nowhere/ does not exist"):
        RemoteStore("s3://nowhere", ceph.options).read("x")


def test_ceph_denies_a_wrong_secret(ceph: S3Access) -> None:
    options = StoreOptions(
        endpoint=ceph.endpoint, access_key=ceph.access_key, secret_key="very-wrong"
    )
    with pytest.raises(DeniedError, match="the secret does not belong to this key"):
        RemoteStore(ceph.create_bucket("denied"), options).read("x")
