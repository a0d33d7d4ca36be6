"""`probe_machine`: measures one resource after the other and returns a `Machine`.

Measurements never overlap, so they do not disturb each other. Notes name what could not be
measured, and the value that is used instead.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.errors import OptionError, StoreError
from penstock.machine import Curve, LinkModel, Machine, StoreModel, machine_toml
from penstock.memory import memory_left_bytes
from penstock.simulate.probe.copies import copy_curve, copy_working_set
from penstock.simulate.probe.decoding import DecodeFacts, measure_decoding
from penstock.simulate.probe.effort import COPY_BYTES, USUAL, Effort
from penstock.simulate.probe.limits import ResourceLimit, sample_limits
from penstock.simulate.probe.link import link_claimed
from penstock.simulate.probe.scratch import check_folder
from penstock.simulate.probe.stores import StoreFacts, measure_store
from penstock.simulate.probe.target import Target
from penstock.simulate.probe.tiers import (
    TierFacts,
    measure_disk,
    measure_memory,
)
from penstock.storage.folder import FolderStore
from penstock.units import show_bytes

MEMORY_FOLDER = Path("/dev/shm")
"""The tmpfs of a Linux system."""

Report = Callable[[str], None]
"""Called with the next measurement, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """A machine, and the cost of the probe."""

    machine: Machine
    folders: tuple[Path, ...]
    """The folder in which each tier of the machine was measured."""
    in_flight: int | None
    """The largest useful number of requests to the store in flight; None without a store."""
    read_bytes: int
    """Bytes read from the store."""
    num_requests: int
    """Requests to the store."""
    limits: tuple[ResourceLimit, ...] = ()
    """Samples a second, lowest first; empty without an indexed data set."""
    sample_bytes: float | None = None
    """Mean size of a sample of the data set."""


def probe_machine(
    *,
    target: Target | None = None,
    memory: Path | None = None,
    disks: Sequence[Path] = (),
    link: LinkModel | None = None,
    effort: Effort = USUAL,
    report: Report = lambda _: None,
) -> ProbeResult:
    """Measure this machine.

    Args:
        target: the store, and data in it to read.
        memory: a folder on a tmpfs; /dev/shm where it is not given, if it can be used.
        disks: folders, one on each disk that may hold a tier.
        link: the link to other nodes; without it, the claim of the network interface.
        effort: bounds of time and bytes.
        report: called with the next measurement, in words.
    """
    # All folders first: a wrong one must not be found after half a minute of measuring others.
    for folder in [*disks, *([memory] if memory else [])]:
        check_folder(folder)
    cores = len(os.sched_getaffinity(0))
    run = _ProbeRun(cores=cores, effort=effort, report=report, notes=_versions())
    copy = run.copy()
    tiers = run.tiers(memory, disks)
    store, decode = run.of_target(target)
    run.notes["link"] = "given"
    if link is None:
        link, run.notes["link"] = link_claimed()
    machine = Machine(
        store=store.model if store else _stand_in(tiers, run.notes),
        link=link,
        tiers=tuple(tier.model for tier in tiers),
        cores=cores,
        copy=copy,
        decode=decode.curve if decode else None,
        notes=run.notes,
    )
    return _probed(machine, tiers, store, decode, target)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProbeRun:
    """The measurements of one probe; each adds a note on its method."""

    cores: int
    effort: Effort
    report: Report
    notes: dict[str, str]

    def copy(self) -> Curve:
        self.report(f"copying memory, 1 to {self.cores} threads")
        available_bytes = memory_left_bytes()
        size_bytes = copy_working_set(self.effort, available_bytes)
        self.notes["copy"] = (
            f"copies of {show_bytes(COPY_BYTES)} at random in {show_bytes(size_bytes)}"
        )
        return copy_curve(self.cores, self.effort, available_bytes)

    def tiers(self, memory: Path | None, disks: Sequence[Path]) -> list[TierFacts]:
        """Return memory, then the disks, fastest first."""
        out = self._memory(memory)
        found = []
        for disk in disks:
            self.report(f"writing and reading a file in {disk}")
            found.append(measure_disk(disk, self.effort))
        found.sort(key=lambda facts: -max(facts.model.read.bytes_s))
        for number, facts in enumerate(found, 1):
            self.notes["disk" if number == 1 else f"disk{number}"] = facts.note
        return out + found

    def _memory(self, folder: Path | None) -> list[TierFacts]:
        self.report(f"writing and reading a file in {folder or MEMORY_FOLDER}")
        try:
            facts = measure_memory(folder or MEMORY_FOLDER, self.cores, self.effort)
        except (OptionError, StoreError) as error:
            if folder is not None:
                raise
            self.notes["memory"] = f"not measured: {error}"  # Nobody asked for it.
            return []
        self.notes["memory"] = facts.note
        return [facts]

    def of_target(self, target: Target | None) -> tuple[StoreFacts | None, DecodeFacts | None]:
        """Measure the store, and how fast its data is decoded."""
        if target is None:
            return None, None
        self.report(f"reading at random from {target.store.uri}")
        store = measure_store(target, self.effort)
        self.notes["store"] = store.note
        if target.dataset is None:
            self.notes["decode"] = "not measured: the data is not indexed; `penstock index` does it"
            return store, None
        self.report(f"decoding samples, 1 to {self.cores} threads")
        decode = measure_decoding(target.dataset, self.cores, store.in_flight, self.effort)
        self.notes["decode"] = decode.note if decode else "samples need none"
        return store, decode


def _probed(
    machine: Machine,
    tiers: list[TierFacts],
    store: StoreFacts | None,
    decode: DecodeFacts | None,
    target: Target | None,
) -> ProbeResult:
    counted = [facts for facts in (store, decode) if facts is not None]
    dataset = target.dataset if target else None
    sample_bytes = dataset.size_bytes / len(dataset) if dataset else None
    return ProbeResult(
        machine=machine,
        folders=tuple(tier.folder for tier in tiers),
        in_flight=store.in_flight if store else None,
        read_bytes=sum(facts.read_bytes for facts in counted),
        num_requests=sum(facts.num_requests for facts in counted),
        limits=tuple(sample_limits(machine, sample_bytes)) if sample_bytes else (),
        sample_bytes=sample_bytes,
    )


def _stand_in(tiers: list[TierFacts], notes: dict[str, str]) -> StoreModel:
    """Return the slowest tier as the store of a machine that was probed without one; note it."""
    if not tiers:
        raise OptionError(
            "nothing was measured that data could come from: name a data set or a disk "
            f"({notes['memory']})"
        )
    slowest = min(tiers, key=lambda facts: max(facts.model.read.bytes_s))
    notes["store"] = f"not measured: {slowest.folder} stands in for it; name a data set to probe"
    model = slowest.model
    return StoreModel(
        latency_s=model.latency_s,
        latency_p99_s=model.latency_s,
        throughput=model.read,
        request_bytes=model.request_bytes,
    )


def _versions() -> dict[str, str]:
    now = datetime.datetime.now(datetime.UTC)
    return {
        "date": now.isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def write_machine(machine: Machine, path: Path) -> None:
    """Write a machine to its file; an existing file is replaced atomically."""
    path = path.expanduser().absolute()
    FolderStore(path.parent).write(path.name, machine_toml(machine).encode())
