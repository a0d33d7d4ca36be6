"""The ranks of a run, from its trace: rows say what they did, counters what they use.

Works for every loader, for runs on a shared file system, and for runs that are over. A row counts
when it is finished, so a wait that is not over is not in the figures; `silent` and the time since
the last batch tell of it.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.engine.snapshot import LiveCounts, LiveRank, LiveSnapshot
from penstock.engine.stats import SourceStats
from penstock.trace.boot import boot_id
from penstock.trace.chunks import Rows
from penstock.trace.following import FollowedProcess, TraceFollower
from penstock.trace.schema import Flag, Kind

RECENT_S = 10.0
"""What "the last seconds" are."""
_SILENT_S = 10.0
_READS = (Kind.FETCH, Kind.TIER_READ, Kind.PEER_REQUEST)
_WORK = (Kind.DECODE, Kind.JOIN, Kind.COLLATE)
_KEPT = [int(kind) for kind in (Kind.NEXT, Kind.HAND_OVER, Kind.READ, Kind.BATCH, *_READS, *_WORK)]


@dataclass(kw_only=True)
class _Followed:
    """One process and what of it is recent."""

    process: FollowedProcess
    recent: deque[Rows] = field(default_factory=deque)
    """Its rows of the last seconds, times in nanoseconds since 1970."""
    counters: deque[tuple[float, dict[str, float]]] = field(default_factory=deque)
    total: LiveCounts = field(default_factory=LiveCounts)
    first_s: float = np.inf
    """When its first batch was asked for."""
    last_s: float = 0.0
    """When it last recorded anything."""
    last_batch_s: float = 0.0
    """When it got its last batch."""
    epoch: int = -1

    def take(self) -> None:
        """Add what the last look at its trace has found."""
        offset_ns = self.process.unix_offset_ns
        for _, rows in self.process.rows:
            kept = rows[np.isin(rows["kind"], _KEPT)].copy()
            kept["start_ns"] += offset_ns
            if not len(kept):
                continue
            self.total += _counts(kept, self.process.names)
            self.recent.append(kept)
            self.last_s = max(self.last_s, float(_ends(kept).max()) / 1e9)
            asked = kept[kept["kind"] == Kind.NEXT]
            if len(asked):
                self.first_s = min(self.first_s, float(asked["start_ns"][0]) / 1e9)
                self.last_batch_s = max(self.last_batch_s, float(_ends(asked)[-1]) / 1e9)
                self.epoch = int(asked["epoch"][-1])

    def take_counters(self, at_s: float, values: dict[str, float]) -> None:
        """Add its counters of a time."""
        self.last_s = max(self.last_s, at_s)
        if "cpu.user_s" in values:  # Others are of the machine.
            self.counters.append((at_s, values))

    def rows_since(self, since_s: float) -> Rows | None:
        """Return its rows that end later; earlier ones are forgotten."""
        since_ns = int(since_s * 1e9)
        parts = [part[_ends(part) > since_ns] for part in self.recent]
        self.recent = deque(part for part in parts if len(part))
        return np.concatenate(self.recent) if self.recent else None

    def cpu_s(self, since_s: float) -> tuple[float, float]:
        """Return its processor time in all, and since a time."""
        while len(self.counters) > 2 and self.counters[1][0] <= since_s:
            self.counters.popleft()
        used = [_cpu(values) for _, values in self.counters]
        return (used[-1], used[-1] - used[0]) if used else (0.0, 0.0)

    @property
    def memory_bytes(self) -> int:
        """Its memory, as it was last recorded."""
        latest = self.counters[-1][1] if self.counters else {}
        return int(latest.get("memory.rss_bytes", 0) - latest.get("memory.shared_bytes", 0))


class FollowedRun:
    """The ranks of a run whose trace is followed."""

    def __init__(self, folder: str | Path) -> None:
        self._follower = TraceFollower(folder)
        self._followed: dict[str, _Followed] = {}
        self._here = boot_id(), socket.gethostname()

    def look(self) -> list[LiveRank]:
        """Return the ranks as they are now."""
        ranks: dict[int, list[_Followed]] = {}
        for process in self._follower.look():
            known = self._followed.setdefault(process.path.name, _Followed(process=process))
            known.take()
            if process.head["role"] != "launch":
                ranks.setdefault(process.head["rank"], []).append(known)
        self._hand_out_counters()
        return [self._rank(number, some) for number, some in sorted(ranks.items())]

    def _hand_out_counters(self) -> None:
        """Give counters to the processes that they are of: another one may have read them."""
        everyone = list(self._followed.values())
        owners = {(f.process.head["boot"], f.process.head["pid"]): f for f in everyone}
        for reader in everyone:
            process = reader.process
            for pid, at_ns, values in process.counters:
                is_own = pid == process.head["pid"]
                owner = reader if is_own else owners.get((process.head["boot"], pid))
                if owner is not None:
                    owner.take_counters((at_ns + process.unix_offset_ns) / 1e9, values)

    def _rank(self, rank: int, processes: list[_Followed]) -> LiveRank:
        state = self._state(processes)
        # A rank that is over is shown as it was at its end.
        now_s = max(p.last_batch_s for p in processes) or max(p.last_s for p in processes)
        if state == "running":
            now_s = time.time()
        first_s = min(p.first_s for p in processes)
        since_s = max(now_s - RECENT_S, first_s if np.isfinite(first_s) else now_s)
        elapsed_s = max(0.0, now_s - first_s) if np.isfinite(first_s) else 0.0
        total = recent = LiveCounts()
        ready_s = 0.0
        for one in processes:
            rows = one.rows_since(since_s)
            role = one.process.head["role"]
            cpu_s, cpu_recent_s = one.cpu_s(since_s)
            total += replace(one.total, cpu_s={role: cpu_s} if cpu_s else {})
            if rows is not None:
                recent += _counts(rows, one.process.names, since_ns=int(since_s * 1e9))
                ready_s += float(rows["duration_ns"][rows["kind"] == Kind.HAND_OVER].sum()) / 1e9
            recent += LiveCounts(cpu_s={role: cpu_recent_s} if cpu_s else {})
        window_s = now_s - since_s
        return LiveRank(
            now=LiveSnapshot(
                rank=rank,
                host=processes[0].process.head["host"],
                at_s=now_s,
                epoch=max(p.epoch for p in processes),
                counts=replace(_settled(total), elapsed_s=elapsed_s),
                ready_batches=ready_s / window_s if ready_s and window_s > 0 else None,
                memory_bytes=_memory_bytes(processes),
                state=state if total.batches or state != "running" else "starting",
            ),
            recent=replace(_settled(recent), elapsed_s=window_s),
        )

    def _state(self, processes: list[_Followed]) -> str:
        """Return the state of a rank: of its training process where it recorded, else of any."""
        trains = [p for p in processes if p.process.head["role"] == "train"] or processes
        if any(map(self._is_alive, trains)):
            return "running"
        # Whoever ends in order closes its trace, and the files of its threads go away with that.
        if not any(p.process.is_open for p in trains):
            return "ended"
        is_here = (trains[0].process.head["boot"], trains[0].process.head["host"]) == self._here
        return "killed" if is_here else "silent"

    def _is_alive(self, followed: _Followed) -> bool:
        process = followed.process
        if (process.head["boot"], process.head["host"]) == self._here:
            return Path(f"/proc/{process.head['pid']}").exists()
        return process.is_open and time.time() - followed.last_s < _SILENT_S


def _counts(rows: Rows, names: dict[int, str], since_ns: int = 0) -> LiveCounts:
    """Return the sums of rows; a wait that began before `since_ns` counts from then on."""
    kind = rows["kind"]
    asked = rows[kind == Kind.NEXT]
    waits_ns = asked["wait_ns"]
    if since_ns:
        waits_ns = np.minimum(waits_ns, _ends(asked) - since_ns)
    return LiveCounts(
        samples=int(asked["count"].sum()),
        batches=len(asked),
        stall_s=float(waits_ns.sum()) / 1e9,
        decode_s=_decode_s(rows),
        sources=_sources(rows, names),
    )


def _decode_s(rows: Rows) -> float:
    kind = rows["kind"]
    # A worker of a foreign loader reads and decodes in one go.
    batches_ns = rows["duration_ns"][kind == Kind.BATCH].sum()
    reads_ns = rows["duration_ns"][kind == Kind.READ].sum() if batches_ns else 0
    work_ns = rows["duration_ns"][np.isin(kind, [int(k) for k in _WORK])].sum()
    return float(max(work_ns, batches_ns - reads_ns)) / 1e9


def _sources(rows: Rows, names: dict[int, str]) -> dict[str, SourceStats]:
    found: dict[str, SourceStats] = {}
    good = rows[(rows["flags"] & Flag.ERROR) == 0]
    for kind in (*_READS, Kind.READ):
        of_kind = good[good["kind"] == kind]
        for number, flags in np.unique(
            np.stack([of_kind["source"], of_kind["flags"] & Flag.NATIVE], axis=1), axis=0
        ).tolist():
            some = of_kind[
                (of_kind["source"] == number) & (of_kind["flags"] & Flag.NATIVE == flags)
            ]
            name = _source_name(kind, names.get(number, ""), bool(flags))
            had = found.get(name, SourceStats())
            found[name] = SourceStats(
                size_bytes=had.size_bytes + int(some["size_bytes"].sum()),
                requests=had.requests + len(some),
                seconds=had.seconds + float(some["duration_ns"].sum()) / 1e9,
            )
    return found


def _source_name(kind: Kind, name: str, is_native: bool) -> str:
    if kind == Kind.PEER_REQUEST:
        return "peers"
    if kind == Kind.READ:
        return _NATIVE if is_native else _FILES
    return name or "store"


_FILES, _NATIVE = "files", "files (native)"
"""What the hooks of `penstock trace` saw being read, in Python or below, whoever read it."""


def _settled(counts: LiveCounts) -> LiveCounts:
    """Return counts without reads that the loader and a hook, or two hooks, have recorded."""
    sources = dict(counts.sources)
    seen = [name for name in (_FILES, _NATIVE) if name in sources]
    most = max(seen, key=lambda name: sources[name].size_bytes, default="")
    for name in seen:
        if name != most or len(sources) > len(seen):
            del sources[name]
    return replace(counts, sources=sources)


def _memory_bytes(processes: list[_Followed]) -> int:
    apart = [p for p in processes if p.process.head["role"] != "train"]
    return sum(max(0, p.memory_bytes) for p in apart or processes)


def _ends(rows: Rows) -> Any:
    return rows["start_ns"] + rows["duration_ns"]


def _cpu(values: dict[str, float]) -> float:
    return values.get("cpu.user_s", 0.0) + values.get("cpu.system_s", 0.0)
