"""Torch's store as the rendezvous of the nodes.

A job that has a process group, or was started by torchrun, has such a store already; it is used
under a prefix of our own. No store and no group is started here. Keys are polled: a client of
torch's store does one call at a time, and a long wait in it would block all other users of the
group's store, such as the watchdog of NCCL.
"""

from __future__ import annotations

import contextlib
import os
from base64 import b64decode, b64encode
from collections.abc import Iterator
from datetime import timedelta

from torch import distributed

from penstock.engine.peers.rendezvous import PollSchedule, wait_for
from penstock.errors import RendezvousError
from penstock.units import show_seconds

_CONNECT_TIMEOUT = timedelta(seconds=60)
_PREFIX = "penstock"


class TorchRendezvous:
    """Keys in one of torch's stores: TCPStore, FileStore, HashStore, or another of a group."""

    def __init__(self, store: distributed.Store) -> None:  # type: ignore[name-defined]
        self._store = distributed.PrefixStore(_PREFIX, store)  # type: ignore[attr-defined]

    def put(self, key: str, value: bytes) -> None:
        """Set a key."""
        with _translated(key):
            self._store.set(key, _text(value))

    def put_once(self, key: str, value: bytes) -> bytes:
        """Set a key if it is not set, which torch expresses by an empty expected value."""
        with _translated(key):
            return b64decode(self._store.compare_set(key, "", _text(value)))

    def get(self, key: str, timeout_s: float) -> bytes:
        """Poll a key until it is set."""
        value = wait_for(self, key, PollSchedule(timeout_s))
        if value is None:
            raise RendezvousError(
                f"nobody set {key} in torch's store within {show_seconds(timeout_s)}; see whether "
                "all ranks of the job are running"
            )
        return value

    def try_get(self, key: str) -> bytes | None:
        """Return the value of a key that is set."""
        with _translated(key):
            return b64decode(self._store.get(key)) if self._store.check([key]) else None


def rendezvous_here() -> TorchRendezvous | None:
    """Return the store of the default process group, else torchrun's, if there is one."""
    if not distributed.is_available():
        return None
    if distributed.is_initialized():
        store = distributed.distributed_c10d._get_default_store()
        return None if store is None else TorchRendezvous(store)
    # Only the store of torchrun's agents is sure to run before any rank has made a group.
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    is_there = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not is_there or not address or not port.isdecimal():
        return None
    with _translated(f"{address}:{port}"):
        client = distributed.TCPStore(  # type: ignore[attr-defined]
            address, int(port), is_master=False, wait_for_workers=False, timeout=_CONNECT_TIMEOUT
        )
    return TorchRendezvous(client)


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # Also torch's own kinds, which say in C++ what failed.
        raise RendezvousError(
            f"torch's store does not answer ({what}): {str(error).splitlines()[0]}; it runs where "
            "rank 0 or the first agent of torchrun does, see whether that host is up"
        ) from error


def _text(value: bytes) -> str:
    # Only strings are documented; arbitrary bytes work in some versions and calls only.
    return b64encode(value).decode()
