from __future__ import annotations

import sys

from benchmarks.cluster_site import Site
from testkit.network_store import Front
from testkit.shaper import Fault, Shape

from penstock.testing.servers import S3Access

USE = """
import sys
from penstock.errors import PenstockError
from penstock.storage import RemoteStore
from penstock.testing.servers import S3Access
store = RemoteStore(sys.argv[1], S3Access(endpoint=sys.argv[2]).options)
try:
    sys.stdout.write(f"{len(list(store.list()))} objects")
except PenstockError as error:
    sys.stdout.write(type(error).__name__)
"""


def listed(site: Site, access: S3Access, name: str = "n0") -> str:
    return site.network.host(name).run([sys.executable, "-c", USE, site.uri, access.endpoint])


def test_nodes_reach_the_store_by_both_families_and_its_front_can_refuse(site: Site) -> None:
    found = listed(site, site.store.access)
    assert found.endswith(" objects")
    assert listed(site, site.store.access_ipv6, "v0") == found
    with Front(site.store) as front:
        assert listed(site, front.access) == found
        front.reshape(Shape(faults=(Fault(kind="unavailable"),)))
        assert listed(site, front.access) == "UnavailableError"
        assert front.counts().unavailable > 0
