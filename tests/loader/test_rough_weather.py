"""A store that refuses, stalls, cuts off, resets and lies: every byte arrives all the same."""

from pathlib import Path
from typing import Any

import pytest
from testkit.shaper import Fault, Fixed, Shape, Shaper

import penstock
from penstock.errors import CorruptError
from penstock.machine import (
    Curve,
    LinkModel,
    Machine,
    StoreModel,
    default_machine_path,
    machine_toml,
)

NUM_SAMPLES = 240
BLOB_BYTES = 66_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with penstock.Writer(tmp_path / "set", shard_size="4MB") as writer:
        for i in range(NUM_SAMPLES):
            writer.write({"bin": bytes([i]) * BLOB_BYTES})
    (tmp_path / "tier").mkdir()
    return tmp_path / "set"


WEATHER = {
    "refuses": Fault(kind="unavailable", share=0.2),
    "cuts off": Fault(kind="truncate", share=0.1),
    "resets": Fault(kind="reset", share=0.1),
    "lies": Fault(kind="corrupt", share=0.1),
    "stalls": Fault(kind="stall", share=0.05, stall_s=0.7),
}


def deliver(dataset: penstock.Dataset, **options: Any) -> penstock.Stats:
    ids: list[int] = []
    with penstock.Loader(dataset, batch_size=16, epochs=2, output="numpy", **options) as loader:
        for batch in loader:
            for i, value in zip(batch.ids.tolist(), batch["bin"], strict=True):
                assert len(value) == BLOB_BYTES
                assert (value == i).all()
            ids += batch.ids.tolist()
    assert sorted(ids) == sorted([*range(NUM_SAMPLES)] * 2)
    return loader.stats()


@pytest.mark.parametrize("kind", WEATHER)
@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_every_byte_arrives(folder: Path, tmp_path: Path, kind: str, share: float) -> None:
    shape = Shape(latency=Fixed(0.002), faults=(WEATHER[kind],))
    with Shaper.of_folder(folder, Shape(), seed=7) as shaper:
        dataset = penstock.open(shaper.uri, store=shaper.options, check=False)
        shaper.reshape(shape)
        tier = penstock.Disk(tmp_path / "tier", int(share * dataset.size_bytes) or 1)
        stats = deliver(dataset, tiers=[tier] if share else [])
        assert sum(shaper.counts().faults.values()) + shaper.counts().unavailable > 0
    if share == 1:
        assert stats.tiers[0].held_bytes == dataset.size_bytes


def test_damage_that_stays_is_named(folder: Path) -> None:
    with Shaper.of_folder(folder, Shape(), seed=7) as shaper:
        dataset = penstock.open(shaper.uri, store=shaper.options, check=False)
        shaper.reshape(Shape(faults=(Fault(kind="corrupt"),)))
        with pytest.raises(CorruptError, match=r"sample \d+ .*checksum.*read again.*verify"):
            deliver(dataset)


def test_one_request_that_hangs_does_not_hold_up_the_others(folder: Path, tmp_path: Path) -> None:
    # One request in a hundred takes a minute: only a second copy can end this test in time.
    shape = Shape(latency=Fixed(0.005), faults=(Fault(kind="stall", share=0.01, stall_s=60),))
    with Shaper.of_folder(folder, Shape(), seed=3) as shaper:
        dataset = penstock.open(shaper.uri, store=shaper.options, check=False)
        shaper.reshape(shape)
        stats = deliver(dataset, look_ahead="8MB")
        assert shaper.counts().faults.get("stall", 0) > 0
    assert stats.elapsed_s < 60


def test_what_a_run_sees_refines_the_machine(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    store = StoreModel(latency_s=0.001, latency_p99_s=0.001, throughput=Curve.flat(1e9))
    measured = Machine(store=store, link=LinkModel(bytes_s=1e9))
    default_machine_path().parent.mkdir(parents=True)
    default_machine_path().write_text(machine_toml(measured))
    with Shaper.of_folder(folder, Shape(latency=Fixed(0.05))) as shaper:
        dataset = penstock.open(shaper.uri, store=shaper.options, check=False)
        with penstock.Loader(dataset, batch_size=16, output="numpy") as loader:
            assert loader.machine() == measured
            for _ in loader:
                pass
            # Of many requests at once nobody knows whether they wait for first bytes or for the
            # link, so this is what the run has seen: many at once.
            seen = loader.machine().store
            assert seen.read_s(BLOB_BYTES, 16) > 5 * store.read_s(BLOB_BYTES, 16)


def test_every_run_ends_with_a_summary(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="penstock.loader")
    deliver(penstock.open(folder), tiers=[penstock.Disk(tmp_path / "tier", "1GB")])
    assert "480 samples in 30 batches" in caplog.text
    assert "times the least possible" in caplog.text
