"""A site for jobs on many nodes: namespaces, a real S3 store behind its link, and a data set."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from testkit.network import Host, Link, Network
from testkit.network_store import NetworkStore

from benchmarks.cluster_data import payload_of
from benchmarks.cluster_job import ROOT

SHARD_SIZE = "2MB"
WRITE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Nodes, and a data set in a store that all can reach."""

    network: Network
    store: NetworkStore
    uri: str
    sizes: np.ndarray
    """Of the samples, in bytes."""

    @property
    def nodes(self) -> list[Host]:
        return [host for host in self.network.hosts if host is not self.store.host]

    @property
    def size_bytes(self) -> int:
        return int(self.sizes.sum())

    @property
    def num_samples(self) -> int:
        return len(self.sizes)


@contextlib.contextmanager
def open_site(
    nodes: dict[str, Link],
    *,
    num_samples: int,
    sample_bytes: int,
    store_rate: str = "1gbit",
    shard_size: str = SHARD_SIZE,
) -> Iterator[Site]:
    links = {"store": Link(rate=store_rate), **nodes}
    with Network(links) as network, NetworkStore(network.host("store")) as store:
        uri = store.create_bucket("cluster")
        data = [uri, store.access.endpoint, str(num_samples), str(sample_bytes), shard_size]
        # On the store's own host: its link is not in the way.
        store.host.run(
            [sys.executable, "-m", "benchmarks.cluster_data", *data],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT / "src")},
            timeout_s=WRITE_S,
        )
        sizes = [len(payload_of(number, sample_bytes)) for number in range(num_samples)]
        yield Site(network=network, store=store, uri=uri, sizes=np.array(sizes))
