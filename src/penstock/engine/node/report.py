"""The status and metrics of the service: for peers, for people, and for Prometheus."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import penstock
from penstock.engine.node.grants import DatasetKey
from penstock.engine.node.sets import KnownSet
from penstock.engine.peers.status import NodeStatus, RunStatus, TierStatus
from penstock.engine.prometheus import Metric, MetricRow, one

if TYPE_CHECKING:
    from penstock.engine.node.service import NodeService


def node_status(service: NodeService, runs: tuple[RunStatus, ...]) -> NodeStatus:
    """Return the status of a node, with these runs."""
    known, counts = service.known, service.server.counts()
    return NodeStatus(
        name=service.name,
        host=socket.gethostname(),
        carrier="node",
        version=penstock.__version__,
        uptime_s=service.uptime_s,
        is_draining=service.is_draining,
        tiers=tuple(
            TierStatus(
                kind="memory" if place.kind == "memory" else "disk",
                capacity_bytes=place.capacity_bytes,
                held_bytes=sum(each.held_bytes[number] for each in known),
                path=place.root.path,
            )
            for number, place in enumerate(service.sets.places)
        ),
        served_bytes=counts["bytes"],
        served_requests=counts["requests"],
        num_parked=counts["parked"],
        num_connections=counts["connections"],
        num_refused=counts["refused"],
        runs=runs,
        clock_ns=time.perf_counter_ns(),
    )


def metrics_of(service: NodeService) -> list[Metric]:
    """Return all metrics."""
    return [*_of_sets(service), *_of_server(service), *_of_service(service)]


def _of_sets(service: NodeService) -> list[Metric]:
    places, known = service.sets.places, service.known

    def by_set(name: str, text: str, value: Callable[[KnownSet, int], int]) -> Metric:
        rows = [
            MetricRow(
                value=value(each, number),
                labels={**_labels(place.kind, place.root.path), **_names(each)},
            )
            for number, place in enumerate(places)
            for each in known
        ]
        return Metric(name=name, kind="gauge", help=text, rows=tuple(rows))

    capacities = [
        MetricRow(value=place.capacity_bytes, labels=_labels(place.kind, place.root.path))
        for place in places
    ]
    return [
        Metric(
            name="tier_capacity_bytes",
            kind="gauge",
            help="Bytes that may be granted in a place.",
            rows=tuple(capacities),
        ),
        by_set("tier_held_bytes", "Bytes that a data set takes.", lambda s, n: s.held_bytes[n]),
        by_set(
            "tier_granted_bytes",
            "Bytes that a data set in use may take.",
            lambda s, n: s.granted_bytes[n] if s.is_open else 0,
        ),
        Metric(
            name="dataset_processes",
            kind="gauge",
            help="Processes that have a data set open.",
            rows=tuple(MetricRow(value=each.num_clients, labels=_names(each)) for each in known),
        ),
        one("dropped_total", "counter", "Parts of data sets dropped to make room.",
            service.sets.num_dropped),
        one("dropped_bytes_total", "counter", "Bytes dropped to make room.",
            service.sets.dropped_bytes),
    ]  # fmt: skip


def _of_server(service: NodeService) -> list[Metric]:
    counts = service.server.counts()
    return [
        Metric(
            name="served_bytes_total",
            kind="counter",
            help="Bytes sent to peers, by data set.",
            rows=_served(service),
        ),
        one("served_requests_total", "counter", "Requests of peers.", counts["requests"]),
        one("absent_ranges_total", "counter", "Ranges asked for that were not here.",
            counts["absent"]),
        one("parked_total", "counter", "Requests that had to wait for bytes to arrive.",
            counts["was_parked"]),
        one("parked_requests", "gauge", "Requests that wait now.", counts["parked"]),
        one("peer_connections", "gauge", "Connections of peers.", counts["connections"]),
        one("peer_connections_total", "counter", "Connections accepted so far.",
            counts["accepted"]),
        one("refused_handshakes_total", "counter",
            "Peers that could not prove that they belong to a run here.", counts["refused"]),
        one("broken_connections_total", "counter", "Connections dropped because of invalid bytes.",
            counts["broken"]),
    ]  # fmt: skip


def _served(service: NodeService) -> tuple[MetricRow, ...]:
    """Return the bytes served by data set; those of unknown shelves have no name."""
    names = service.runs.datasets_by_shelf()
    uris = {each.key: each.about.get("uri", "") for each in service.known}
    total = dict.fromkeys([DatasetKey("", ""), *names.values()], 0)
    all_bytes = service.server.counts()["bytes"]
    for shelf, count in service.server.bytes_by_shelf().items():
        total[names.get(shelf, DatasetKey("", ""))] += count
    total[DatasetKey("", "")] += max(0, all_bytes - sum(total.values()))
    return tuple(
        MetricRow(
            value=count,
            labels={"owner": key.owner, "dataset": key.dataset, "uri": uris.get(key, "")},
        )
        for key, count in total.items()
    )


def _of_service(service: NodeService) -> list[Metric]:
    return [
        one("runs", "gauge", "Runs that are served.", service.runs.num_runs),
        one("registrations_total", "counter", "Data sets of runs registered so far.",
            service.runs.num_registered),
        one("job_processes", "gauge", "Processes of jobs that are connected.",
            service.listener.num_clients),
        one("draining", "gauge", "1 while the service is being stopped.", service.is_draining),
        one("uptime_seconds", "gauge", "How long the service runs.", service.uptime_s),
        Metric(
            name="info",
            kind="gauge",
            help="Always 1; who this is.",
            rows=(
                MetricRow(value=1, labels={"version": penstock.__version__, "name": service.name}),
            ),
        ),
    ]  # fmt: skip


def _labels(kind: str, path: str) -> dict[str, str]:
    return {"tier": kind, "path": path}


def _names(known: KnownSet) -> dict[str, str]:
    return {
        "owner": known.key.owner,
        "dataset": known.key.dataset,
        "uri": known.about.get("uri", ""),
    }
