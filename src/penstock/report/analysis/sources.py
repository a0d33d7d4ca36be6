"""Where bytes come from: the names of stores, tiers, peers and files, folded to a few."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.report.analysis.values import Ints
from penstock.trace.reading import Trace
from penstock.trace.schema import Flag, Kind

FILES = "files"
"""Reads of files by anybody in a process."""
NETWORK = "network"
"""Reads of connections."""
SOURCES_MAX = 24
"""Sources that are told apart; further ones are `other`."""
_READS = (Kind.FETCH, Kind.TIER_READ, Kind.PEER_REQUEST, Kind.READ)
_LOCAL = ("memory", "ram", "shm", "disk", "files", "folder", "file", "local", "nvme", "pages")


@dataclass(frozen=True, kw_only=True)
class SourceNames:
    """The sources of a trace."""

    names: tuple[str, ...]
    number: Ints
    """The place in `names`, for each key of `key`."""
    num_trace_names: int
    is_penstock: bool

    def key(self, rows: npt.NDArray[np.void]) -> Ints:
        """Return, for each row, the place of its source in `number`."""
        source = rows["source"].astype(np.int64)
        sockets = (rows["flags"] & int(Flag.SOCKET)) > 0
        return np.where(source > 0, source, self.num_trace_names + sockets)

    def of(self, rows: npt.NDArray[np.void]) -> Ints:
        """Return, for each row, the place of its source in `names`."""
        return self.number[self.key(rows)]


def is_of(rows: npt.NDArray[np.void], *kinds: Kind) -> npt.NDArray[np.bool_]:
    """Return which rows are of some kinds."""
    wanted = np.zeros(1 << 16, bool)
    wanted[[int(kind) for kind in kinds]] = True
    found: npt.NDArray[np.bool_] = wanted[rows["kind"]]
    return found


def is_read(rows: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Return which rows bring bytes: requests, reads of tiers, of peers and of files."""
    return is_of(rows, *_READS)


def is_of_loader(trace: Trace, rows: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Return which rows may be the loader's.

    Where workers make batches, what the training process receives is other ranks' gradients.
    """
    made = trace.of(Kind.BATCH)
    pid = np.array([p.pid for p in trace.processes], np.int64)
    training = {p.pid for p in trace.processes if p.role == "train"}
    if not len(made) or np.isin(pid[made["process"]], list(training)).any():
        return np.ones(len(rows), bool)
    sockets = is_of(rows, Kind.READ) & ((rows["flags"] & int(Flag.SOCKET)) > 0)
    others: npt.NDArray[np.bool_] = ~np.isin(pid[rows["process"]], list(training))
    return ~sockets | others


def is_of_validation(trace: Trace, rows: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Return which rows are of validation: inside of one, and not by a worker of the training.

    Workers of the training loader go on reading ahead while a validation runs.
    """
    passes, made = trace.of(Kind.VALIDATE), trace.of(Kind.BATCH)
    if not len(passes) or not len(rows):
        return np.zeros(len(rows), bool)
    num = len(trace.processes)
    inside = np.bincount(made["process"][_inside_of(passes, made)], minlength=num)
    pid = np.array([(p.host, p.pid) for p in trace.processes])
    trains = np.bincount(made["process"], minlength=num) > 2 * inside
    of_training = {tuple(who) for who in pid[trains].tolist()}
    has_loop = {(p.host, str(p.pid)) for p in trace.processes if p.role == "train"}
    is_worker = np.array([tuple(w) in of_training - has_loop for w in pid.tolist()], bool)
    found: npt.NDArray[np.bool_] = _inside_of(passes, rows) & ~is_worker[rows["process"]]
    return found


def _inside_of(passes: npt.NDArray[np.void], rows: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Return which rows begin inside of a pass of their rank; passes of a rank do not overlap."""
    inside = np.zeros(len(rows), bool)
    for rank in np.unique(passes["rank"]).tolist():
        mine, of = passes[passes["rank"] == rank], np.flatnonzero(rows["rank"] == rank)
        start = rows["start_ns"][of]
        at = np.searchsorted(mine["start_ns"], start, side="right") - 1
        end = (mine["start_ns"] + mine["duration_ns"])[np.clip(at, 0, None)]
        inside[of] = (at >= 0) & (start < end)
    return inside


def source_names(trace: Trace) -> SourceNames:
    """Return the sources of a trace, the busiest first."""
    rows = trace.spans[is_read(trace.spans)]
    count = np.bincount(rows["source"], minlength=len(trace.names))
    folded: dict[str, int] = {}
    number = np.zeros(len(trace.names) + 2, np.int64)
    for i in np.argsort(-count, kind="stable").tolist():
        if i and not count[i]:
            continue
        name = _folded(trace.names[i]) if i else FILES
        if name not in folded and len(folded) >= SOURCES_MAX:
            name = "other"
        number[i] = folded.setdefault(name, len(folded))
    number[len(trace.names)] = folded.setdefault(FILES, len(folded))
    number[len(trace.names) + 1] = folded.setdefault(NETWORK, len(folded))
    return SourceNames(
        names=tuple(folded),
        number=number,
        num_trace_names=len(trace.names),
        is_penstock=trace.facts().get("loader", "") == "penstock"
        or (len(trace.of(Kind.PLAN)) > 0 and not len(trace.of(Kind.BATCH))),
    )


def _folded(name: str) -> str:
    """Return the kind of a source: a run may have a thousand peers.

    >>> _folded("peer:12"), _folded("s3://bucket/data/"), _folded("tier:disk")
    ('peer', 's3://bucket', 'disk')
    """
    scheme, mark, rest = name.partition("://")
    if mark:
        return f"{scheme}://{rest.split('/', 1)[0]}"
    return name.removeprefix("tier:").split(":", 1)[0]


NOT_SEEN = "not seen"
"""The source of time in which a worker is blocked, and no read was recorded."""


def is_remote(name: str) -> bool:
    """Return whether bytes of a source come over a network.

    >>> is_remote("s3://bucket"), is_remote("peer"), is_remote("disk"), is_remote("files")
    (True, True, False, False)
    """
    scheme = name.partition("://")[0]
    return scheme not in _LOCAL and name not in ("", "other", NOT_SEEN)


def is_peer(name: str) -> bool:
    """Return whether a source is another node of the job."""
    return name == "peer"
