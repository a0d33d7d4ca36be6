"""The whole probe: a machine that can be saved, read again, and trusted to say what it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock
from penstock.errors import OptionError
from penstock.machine import LinkModel, default_machine_path, load_machine
from penstock.simulate.probe import Target, measure, probe_machine, write_machine
from penstock.simulate.probe.decoding import measure_decoding, needs_decoding

from .conftest import TINY


def test_a_probe_measures_everything_and_leaves_nothing(shards: Path, disk: Path) -> None:
    dataset, said = penstock.open(shards), list[str]()
    before = sorted(shards.rglob("*"))
    probed = probe_machine(target=Target.of(shards), disks=[disk], effort=TINY, report=said.append)
    machine = probed.machine
    assert [tier.kind for tier in machine.tiers] == ["memory", "disk"]
    assert probed.folders == (Path("/dev/shm"), disk)
    assert machine.decode is not None
    assert machine.cores >= 1
    assert probed.read_bytes > 0
    assert probed.sample_bytes == dataset.size_bytes / len(dataset)
    names = [limit.resource for limit in probed.limits]
    assert sorted(names) == ["copies", "decoding", "disk tier", "memory tier", "store"]
    rates = [limit.samples_s for limit in probed.limits]
    assert rates == sorted(rates)
    assert len(said) == 5
    assert list(disk.iterdir()) == []
    assert sorted(shards.rglob("*")) == before
    assert {"date", "copy", "memory", "disk", "store", "decode", "link"} <= machine.notes.keys()
    assert "host" not in machine.notes


def test_without_data_the_slowest_tier_stands_in_for_the_store(disk: Path) -> None:
    probed = probe_machine(disks=[disk], link=LinkModel(bytes_s=1e9), effort=TINY)
    tiers = probed.machine.tiers
    slowest = min(tiers, key=lambda tier: max(tier.read.bytes_s))
    assert probed.machine.store.throughput == slowest.read
    assert probed.machine.notes["store"].startswith("not measured: ")
    assert probed.machine.notes["link"] == "given"
    assert probed.machine.decode is None
    assert (probed.in_flight, probed.read_bytes, probed.limits) == (None, 0, ())


def test_data_without_an_index_is_read_but_not_decoded(shards: Path) -> None:
    probed = probe_machine(target=Target.of(shards), effort=TINY)
    assert probed.in_flight is not None
    assert probed.machine.decode is None
    assert "penstock index" in probed.machine.notes["decode"]


def test_memory_that_nobody_asked_for_may_be_missing(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "MEMORY_FOLDER", tmp_path / "nowhere")
    machine = probe_machine(disks=[disk], effort=TINY).machine
    assert [tier.kind for tier in machine.tiers] == ["disk"]
    assert machine.notes["memory"].startswith("not measured: ")
    with pytest.raises(OptionError, match="name a data set or a disk"):
        probe_machine(effort=TINY)
    with pytest.raises(FileNotFoundError):
        probe_machine(memory=tmp_path / "nowhere", effort=TINY)


def test_a_machine_is_written_in_one_step_and_read_again(disk: Path, tmp_path: Path) -> None:
    machine = probe_machine(disks=[disk], effort=TINY).machine
    path = tmp_path / "new" / "folder" / "machine.toml"
    write_machine(machine, path)
    assert load_machine(path) == machine
    write_machine(machine, path)
    assert [p.name for p in path.parent.iterdir()] == ["machine.toml"]


def test_the_file_of_a_user_lies_in_the_folder_for_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/settings")
    assert default_machine_path() == Path("/settings/penstock/machine.toml")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_machine_path() == tmp_path / ".config" / "penstock" / "machine.toml"


def test_rows_of_arrays_need_no_decoding(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((50, 16), np.float32))
    dataset = penstock.open(tmp_path / "rows.npy")
    assert not needs_decoding(dataset)
    assert measure_decoding(dataset, 1, 1, TINY) is None


def test_blocks_are_unpacked_whole(tmp_path: Path) -> None:
    table = pa.table({"x": np.arange(1000), "text": [f"row {i}" for i in range(1000)]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=100)
    dataset = penstock.open(tmp_path / "t.parquet")
    facts = measure_decoding(dataset, 2, 2, TINY)
    assert facts is not None
    assert facts.curve.counts == (1, 2)
    assert facts.num_requests == 10
    assert facts.note.startswith("1,000 parquet samples")
    assert facts.read_bytes == dataset.size_bytes


def test_samples_are_held_once_and_decoded(shards: Path) -> None:
    dataset = penstock.open(shards)
    facts = measure_decoding(dataset, 1, 4, TINY)
    assert facts is not None
    assert (facts.num_requests, facts.read_bytes) == (80, dataset.size_bytes)
