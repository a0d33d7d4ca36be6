"""Nodes of `predict_record` that are hosts of a network: each behind a link of its own.

The store is a host, too, without a limit of its own: what nodes get from it shares their links.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testkit.network import Link, Network
from testkit.network_process import Program
from testkit.shaper_server import Orders

from benchmarks.predict_cases import Case

_NEWNET = 0x40000000


@contextmanager
def linked_nodes(case: Case, data: Path) -> Iterator[dict]:
    """Yield what a job has to know: the store's address, and the namespace of each node."""
    rate = f"{case.task['link_bytes_s'] * 8 / 1e6:g}mbit"
    nodes = [f"node{number}" for number in range(case.task["nodes"])]
    links = {"store": Link()} | dict.fromkeys(nodes, Link(rate=rate))
    front = Program("network_front_process")
    with Network(links) as network:
        store = network.host("store")
        front.start(store.namespace)
        try:
            front.ask(store.ipv4)
            orders = Orders(
                shape=case.shape, seed=0, port=0, address=None, folder=str(data), bucket="data"
            )
            endpoint = f"http://{store.ipv4}:{front.ask(orders)}"
            yield {
                "options": {"endpoint": endpoint, "anonymous": True},
                "namespaces": [network.host(node).namespace for node in nodes],
            }
        finally:
            front.stop()


def enter_namespace(name: str) -> None:
    """Be on another host from now on; only while this process has no other thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    try:
        if libc.setns(file, _NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")
    finally:
        os.close(file)
