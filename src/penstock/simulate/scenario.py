"""Scenarios: descriptions of a data set, a job and a machine.

A scenario is a TOML file. Sizes are numbers of bytes or words such as "110 KB"; `[machine]` is
either the table that `penstock probe` writes or, as `machine = "machine.toml"`, the path of one.
A key that is left out has a default; a key that is misspelt is refused by name.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from penstock.dataset.part import Ints
from penstock.errors import OptionError
from penstock.machine import Curve, Machine, TierModel, load_machine
from penstock.units import bytes_of


class DatasetTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The number of samples and their sizes."""

    num_samples: int = 0
    """May be left out where `sizes` are given."""
    sample_bytes: int = 0
    """Mean size."""
    spread_bytes: int = 0
    """Standard deviation; sizes are drawn from a normal distribution cut at zero."""
    sizes: str | list[int] = ""
    """Every size: a list, or the path of a .npy file beside the scenario."""


class JobTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The training job and the number of nodes."""

    epochs: int
    batch: int
    """Samples per rank and step."""
    nodes: int = 1
    ranks: int = 1
    """Per node."""
    compute_samples_s: float = 0.0
    """Samples that one rank trains on a second if it never waits; or give `compute_bytes_s`."""
    compute_bytes_s: float = 0.0
    seed: int = 0
    drop_last: bool = False


class LoaderTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of loaders that do not adapt."""

    threads: int = 8
    """Reads in flight per rank."""
    fill_threads: int = 2
    """Threads per rank that fill each tier in the background, or before the start."""
    stage_bytes: int = 1 << 30
    """Room for samples that wait for their step, per node."""


class ModelTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How nodes share the store. The defaults are physical; others are for a published model."""

    store_share: Literal["node", "thread"] = "node"
    """What gets shared(n)/n when n nodes read: a node, or each of its threads."""
    readers: Literal["together", "in_turn"] = "together"
    """Which nodes count as reading at once: all, or for each node only those before it."""


class SweepTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `penstock simulate` compares where its options say nothing."""

    policies: tuple[str, ...] = ()
    nodes: tuple[int, ...] = ()
    cache: tuple[float, ...] = ()
    """Capacity of all nodes together, as a share of the data set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A data set, a job, a machine, and what to compare on it."""

    dataset: DatasetTable
    job: JobTable
    machine: Machine
    name: str = ""
    loader: LoaderTable = field(default_factory=LoaderTable)
    model: ModelTable = field(default_factory=ModelTable)
    sweep: SweepTable = field(default_factory=SweepTable)
    folder: str = "."
    """Where relative paths begin."""

    def __post_init__(self) -> None:
        for check in (_check_dataset, _check_job, _check_loader, _check_machine):
            check(self)

    def sizes(self) -> Ints:
        """Return the size of every sample; drawn anew, and the same, at every call."""
        given = self.dataset.sizes
        if isinstance(given, str) and given:
            return _load_sizes(Path(self.folder) / given)
        if given:
            return np.asarray(given, np.int64)
        return draw_sizes(self.dataset, self.job.seed)

    def with_nodes(self, nodes: int) -> Scenario:
        """Return the same on another number of nodes; each node keeps its own capacity."""
        return replace(self, job=msgspec.structs.replace(self.job, nodes=nodes))

    def with_cache(self, share: float, size_bytes: int) -> Scenario:
        """Return the same with tiers that hold a share of `size_bytes` on all nodes together.

        Tiers keep their proportions; a machine without tiers gets memory as fast as its copies.
        """
        per_node = share * size_bytes / self.job.nodes
        tiers = self.machine.tiers or (_plain_memory(self.machine),)
        total = sum(tier.capacity_bytes for tier in tiers)
        cut = [
            replace(tier, capacity_bytes=math.ceil(per_node * tier.capacity_bytes / total))
            for tier in tiers
        ]
        return replace(self, machine=replace(self.machine, tiers=tuple(cut)))


def load_scenario(path: str | Path) -> Scenario:
    """Return a scenario from its file; an `OptionError` names the key that is wrong."""
    try:
        tables = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} is not TOML: {error}") from error
    try:
        return scenario_of(tables, folder=Path(path).parent)
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from error


def scenario_of(tables: dict[str, Any], folder: str | Path = ".") -> Scenario:
    """Return a scenario from plain tables, as they stand in its file."""
    known = {
        "dataset": DatasetTable,
        "job": JobTable,
        "loader": LoaderTable,
        "model": ModelTable,
        "sweep": SweepTable,
    }
    for name in tables:
        if name not in (*known, "name", "machine"):
            raise OptionError(
                f"there is no key {name!r}; a scenario has name, machine, {', '.join(known)}"
            )
    for name in ("dataset", "job", "machine"):
        if name not in tables:
            raise OptionError(f"[{name}] is missing; see `penstock simulate --help`")
    parts = {name: _table(kind, name, tables.get(name, {})) for name, kind in known.items()}
    return Scenario(
        name=str(tables.get("name", "")),
        machine=_machine(tables["machine"], Path(folder)),
        folder=str(folder),
        **parts,
    )


def draw_sizes(dataset: DatasetTable, seed: int) -> Ints:
    """Return sizes from a normal distribution cut at zero, at least one byte each."""
    if not dataset.spread_bytes:
        return np.full(dataset.num_samples, dataset.sample_bytes, np.int64)
    rng = np.random.default_rng([seed, dataset.num_samples])
    sizes = rng.normal(dataset.sample_bytes, dataset.spread_bytes, dataset.num_samples)
    # Drawn again and not clipped: a heap of samples of one byte would change the mean.
    while len(low := np.flatnonzero(sizes < 1)):
        sizes[low] = rng.normal(dataset.sample_bytes, dataset.spread_bytes, len(low))
    return sizes.astype(np.int64)


def _load_sizes(path: Path) -> Ints:
    try:
        sizes = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise OptionError(f"dataset.sizes: {path} cannot be read as .npy: {error}") from error
    if sizes.ndim != 1 or not np.issubdtype(sizes.dtype, np.integer) or not len(sizes):
        raise OptionError(f"dataset.sizes: {path} must hold one whole number per sample")
    if int(sizes.min()) < 1:
        raise OptionError(f"dataset.sizes: {path} has a size of {int(sizes.min())}; 1 is the least")
    checked: Ints = sizes.astype(np.int64)
    return checked


def _table(kind: Any, name: str, table: Any) -> Any:
    """Return one table of the file, with the name of the key in every complaint."""
    try:
        return msgspec.convert(_in_bytes(table), kind)
    except msgspec.ValidationError as error:
        fields = ", ".join(kind.__struct_fields__)
        raise OptionError(f"[{name}] {_in_words(error)}; it has {fields}") from error


def _machine(given: Any, folder: Path) -> Machine:
    if isinstance(given, str):
        return load_machine(folder / given)
    try:
        return msgspec.convert(_in_bytes(given), Machine)
    except msgspec.ValidationError as error:
        raise OptionError(
            f"[machine] {_in_words(error)}; `penstock probe` writes one to start from"
        ) from error


def _in_words(error: msgspec.ValidationError) -> str:
    return str(error).replace("Object ", "").replace("`$.", "`")


def _in_bytes(value: Any, key: str = "") -> Any:
    """Return plain values with sizes in words turned into numbers, wherever a key says bytes."""
    if isinstance(value, dict):
        return {name: _in_bytes(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_in_bytes(item, key) for item in value]
    if isinstance(value, str) and key.endswith(("_bytes", "bytes_s")):
        try:
            return bytes_of(value.removesuffix("/s"))
        except OptionError as error:
            raise OptionError(f"{key}: {error}") from error
    return value


def _plain_memory(machine: Machine) -> TierModel:
    copy: Curve = machine.copy
    return TierModel(kind="memory", capacity_bytes=1, read=copy, write=copy)


def _check_dataset(scenario: Scenario) -> None:
    data = scenario.dataset
    if data.sizes:
        return
    if data.num_samples < 1 or data.sample_bytes < 1 or data.spread_bytes < 0:
        raise OptionError(
            f"[dataset] has num_samples = {data.num_samples}, sample_bytes = {data.sample_bytes}, "
            f"spread_bytes = {data.spread_bytes}; give numbers above 0 (spread_bytes: 0 or more), "
            "or sizes"
        )


def _check_job(scenario: Scenario) -> None:
    job = scenario.job
    for name in ("epochs", "batch", "nodes", "ranks"):
        if getattr(job, name) < 1:
            raise OptionError(f"job.{name} is {getattr(job, name)}; the least is 1")
    rates = (job.compute_samples_s, job.compute_bytes_s)
    if min(rates) < 0 or (rates[0] > 0) == (rates[1] > 0):
        raise OptionError(
            f"job.compute_samples_s is {rates[0]:g} and job.compute_bytes_s {rates[1]:g}; "
            "give one of them, above 0"
        )


def _check_loader(scenario: Scenario) -> None:
    for name in ("threads", "fill_threads", "stage_bytes"):
        if getattr(scenario.loader, name) < 1:
            raise OptionError(f"loader.{name} is {getattr(scenario.loader, name)}; the least is 1")
    for share in scenario.sweep.cache:
        if share < 0:
            raise OptionError(f"sweep.cache has {share:g}; shares of the data set are 0 or more")
    for nodes in scenario.sweep.nodes:
        if nodes < 1:
            raise OptionError(f"sweep.nodes has {nodes}; the least is 1")


def _check_machine(scenario: Scenario) -> None:
    for number, tier in enumerate(scenario.machine.tiers):
        if tier.capacity_bytes < 0:
            raise OptionError(f"machine.tiers {number} holds {tier.capacity_bytes} bytes; give 0+")
