"""The metrics of ranks, and the endpoint of a loader if `PENSTOCK_METRICS_PORT` asks for one.

The endpoint is in the engine's process, or in the training process if that makes the batches. It
reads the figures when somebody asks for them, so an endpoint that nobody scrapes costs nothing.
Counters in seconds are summed over reads or processes: their `rate()` is how many there are at a
time, such as reads in flight or cores in use.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.engine.prometheus import Metric, MetricRow, rows_of, text_of
from penstock.engine.snapshot import LiveCounts, LiveSnapshot
from penstock.engine.stats import SourceStats
from penstock.errors import OptionError
from penstock.world import World

if TYPE_CHECKING:
    from penstock.engine.web import WebPages

PORT_VARIABLE = "PENSTOCK_METRICS_PORT"
"""Port of local rank 0; other ranks count up from it. 0: any free port, which the log names."""
HOST_VARIABLE = "PENSTOCK_METRICS_HOST"
"""The address to listen on; by default only this machine can ask."""
_LOADERS_MAX = 8
"""Loaders of a rank that get a port: for training, for validation, …"""
_log = logging.getLogger("penstock.metrics")

_Values = Callable[[LiveSnapshot], Mapping[str, float]]
"""Returns the values of a metric by its own label; by "" if it has none."""


def _one(value: Callable[[LiveSnapshot], float]) -> _Values:
    return lambda snapshot: {"": value(snapshot)}


def _sources(value: Callable[[SourceStats], float]) -> _Values:
    return lambda snapshot: {name: value(s) for name, s in snapshot.counts.sources.items()}


def _ready(snapshot: LiveSnapshot) -> Mapping[str, float]:
    return {} if snapshot.ready_batches is None else {"": snapshot.ready_batches}


_METRICS: tuple[tuple[str, str, _Values, str], ...] = (
    ("samples_total", "",
     _one(lambda s: s.counts.samples), "Samples handed to the training loop."),
    ("batches_total", "",
     _one(lambda s: s.counts.batches), "Batches handed to the training loop."),
    ("elapsed_seconds_total", "",
     _one(lambda s: s.counts.elapsed_s), "Time inside iterations, the loop's own work included."),
    ("stall_seconds_total", "",
     _one(lambda s: s.counts.stall_s), "Time that the training loop waited for batches."),
    ("decode_seconds_total", "",
     _one(lambda s: s.counts.decode_s), "Time in decoding and joining, summed over workers."),
    ("source_bytes_total", "source",
     _sources(lambda s: s.size_bytes), "Bytes read, by source: a store, a tier, peers."),
    ("source_requests_total", "source",
     _sources(lambda s: s.requests), "Reads, by source."),
    ("source_seconds_total", "source",
     _sources(lambda s: s.seconds), "Time in reads, summed over reads, by source."),
    ("cpu_seconds_total", "role",
     lambda s: s.counts.cpu_s, "Processor time, by role of the process."),
    ("memory_bytes", "",
     _one(lambda s: s.memory_bytes), "Memory of the processes that load."),
    ("ready_batches", "",
     _ready, "Batches that are made and not taken yet."),
    ("epoch", "",
     _one(lambda s: s.epoch), "Epoch of the latest batch; -1 before the first."),
)  # fmt: skip
"""Name, label of its own, value, help."""


def metrics_text(snapshots: Sequence[LiveSnapshot]) -> str:
    """Return the page of some ranks."""
    return text_of(
        Metric(
            name=name,
            kind="counter" if name.endswith("_total") else "gauge",
            help=text,
            rows=tuple(
                MetricRow(value=value, labels=_labels(snapshot) | ({label: own} if label else {}))
                for snapshot in snapshots
                for own, value in values(snapshot).items()
            ),
        )
        for name, label, values, text in _METRICS
    )


def _labels(snapshot: LiveSnapshot) -> dict[str, str]:
    return {"rank": str(snapshot.rank), "host": snapshot.host}


def snapshots_of(page: str, at_s: float) -> list[LiveSnapshot]:
    """Return the ranks of a page that was read at a time."""
    own_label = {name: label for name, label, _, _ in _METRICS}
    found: dict[tuple[int, str], dict[str, dict[str, float]]] = {}
    for name, row in rows_of(page):
        if name in own_label and "rank" in row.labels:
            values = found.setdefault((int(row.labels["rank"]), row.labels.get("host", "")), {})
            values.setdefault(name, {})[row.labels.get(own_label[name], "")] = row.value
    return [_snapshot(rank, host, at_s, values) for (rank, host), values in sorted(found.items())]


def _snapshot(
    rank: int, host: str, at_s: float, values: Mapping[str, Mapping[str, float]]
) -> LiveSnapshot:
    def value(name: str, label: str = "") -> float:
        return values.get(name, {}).get(label, 0.0)

    return LiveSnapshot(
        rank=rank,
        host=host,
        at_s=at_s,
        epoch=int(value("epoch")),
        counts=LiveCounts(
            samples=int(value("samples_total")),
            batches=int(value("batches_total")),
            elapsed_s=value("elapsed_seconds_total"),
            stall_s=value("stall_seconds_total"),
            decode_s=value("decode_seconds_total"),
            sources={
                name: SourceStats(
                    size_bytes=int(size_bytes),
                    requests=int(value("source_requests_total", name)),
                    seconds=value("source_seconds_total", name),
                )
                for name, size_bytes in values.get("source_bytes_total", {}).items()
            },
            cpu_s=dict(values.get("cpu_seconds_total", {})),
        ),
        ready_batches=values.get("ready_batches", {}).get(""),
        memory_bytes=int(value("memory_bytes")),
    )


def metrics_for(world: World, snapshot: Callable[[], LiveSnapshot]) -> WebPages | None:
    """Return the endpoint of a loader of this rank, if the environment asks for one.

    A second loader of a rank takes the next port that belongs to the rank. If no port is free, the
    run goes on and the log has a warning.
    """
    text = os.environ.get(PORT_VARIABLE)
    if not text:
        return None
    if not text.isdecimal() or int(text) > 65535:
        raise OptionError(f"{PORT_VARIABLE} must be a port from 0 to 65535, got {text!r}")
    # Imported here, because few processes have an endpoint.
    from penstock.engine.peers.base import Address
    from penstock.engine.web import WebPages

    host = os.environ.get(HOST_VARIABLE) or "127.0.0.1"
    first = int(text)
    ports = [first + world.local_rank + world.num_local_ranks * n for n in range(_LOADERS_MAX)]
    ports = [port for port in ports if port <= 65535] if first else [0]
    why: OSError | None = None
    for port in ports:
        try:
            web = WebPages(Address(host=host, port=port), lambda: metrics_text([snapshot()]))
        except OSError as error:
            why = error
            continue
        web.start()
        _log.info("metrics of rank %d are at http://%s/metrics", world.rank, web.address)
        return web
    _log.warning(
        "metrics of rank %d are not served: none of the ports %s could be opened at %s (%s); set "
        "%s to the first of a free range",
        world.rank, ports, host, why, PORT_VARIABLE,
    )  # fmt: skip
    return None


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def cpu_and_memory(pid: int) -> tuple[float, int]:
    """Return the processor time of a process, and its memory without files and shared memory."""
    try:
        # The name of the command may hold anything; nothing after it holds a parenthesis.
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
    except OSError:
        return 0.0, 0  # It has ended.
    return (int(words[11]) + int(words[12])) / _TICKS_PER_S, (resident - shared) * _PAGE_BYTES
