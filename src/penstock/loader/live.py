"""Metrics of a loader that makes its batches in the training process.

With an engine process, that process has the endpoint. Without one, the endpoint takes a thread of
the training process, and only if `PENSTOCK_METRICS_PORT` is set.
"""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.engine.metrics import cpu_and_memory, metrics_for
from penstock.engine.snapshot import LiveCounts, LiveSnapshot
from penstock.engine.stats import Stats
from penstock.world import World

if TYPE_CHECKING:
    from penstock.engine.web import WebPages


def open_metrics(loader: Any, world: World) -> Callable[[], Any] | None:
    """Return a function that ends the endpoint of a loader; it ends with the loader anyway."""
    ref = weakref.ref(loader)

    def snapshot() -> LiveSnapshot:
        there = ref()
        return LiveSnapshot(rank=world.rank) if there is None else _snapshot(there, world.rank)

    web = metrics_for(world, snapshot)
    if web is None:
        return None
    end = weakref.finalize(loader, _stop, web, os.getpid())
    end.atexit = False  # Its thread is a daemon.
    return end


def _stop(web: WebPages, pid: int) -> None:
    if os.getpid() == pid:  # A forked child has the socket, but not the thread.
        web.stop()


def _snapshot(loader: Any, rank: int) -> LiveSnapshot:
    stats: Stats = loader.stats()
    cpu_s, memory_bytes = cpu_and_memory(os.getpid())
    return LiveSnapshot(
        rank=rank,
        host=socket.gethostname(),
        at_s=time.time(),
        epoch=loader.epoch,
        counts=LiveCounts(
            samples=stats.samples,
            batches=stats.batches,
            elapsed_s=stats.elapsed_s,
            stall_s=stats.stall_s,
            decode_s=stats.decode_s,
            sources=stats.sources,
            cpu_s={"train": cpu_s},
        ),
        memory_bytes=memory_bytes,
    )
