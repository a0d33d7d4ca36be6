"""A measured machine shortens the start of a run: the first requests are as many as help."""

from __future__ import annotations

from pathlib import Path

import pytest
from testkit.shaper import Fixed, Shape, Shaper

import penstock
from penstock.flow.budget import REQUESTS_FIRST
from penstock.machine import (
    Curve,
    LinkModel,
    Machine,
    StoreModel,
    default_machine_path,
    machine_toml,
)

NUM_SAMPLES, BLOB_BYTES, BATCH = 640, 20_000, 16


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with penstock.Writer(tmp_path / "set", shard_size="1MB") as writer:
        for i in range(NUM_SAMPLES):
            writer.write({"bin": bytes([i % 251]) * BLOB_BYTES})
    return tmp_path / "set"


def measured(counts: tuple[int, ...]) -> Machine:
    """Return a machine whose link is full with the last of some numbers of requests."""
    alone_s = 0.4 + BLOB_BYTES / 50e6
    rates = tuple(count * BLOB_BYTES / alone_s for count in counts)
    store = StoreModel(
        latency_s=0.4,
        latency_p99_s=0.5,
        throughput=Curve(counts=counts, bytes_s=rates),
        request_bytes=BLOB_BYTES,
    )
    return Machine(store=store, link=LinkModel(bytes_s=1e9))


def most_at_once(folder: Path) -> int:
    """Return how many requests were under way at once before the first batch was there."""
    with Shaper.of_folder(folder, Shape()) as shaper:
        dataset = penstock.open(shaper.uri, store=shaper.options, check=False)
        shaper.reshape(Shape(latency=Fixed(0.4)))
        with penstock.Loader(dataset, batch_size=BATCH, epochs=1, output="numpy") as loader:
            next(iter(loader))
            return shaper.counts().concurrency_max


def test_the_first_requests_are_as_many_as_the_machine_says(folder: Path) -> None:
    guessed = most_at_once(folder)
    default_machine_path().parent.mkdir(parents=True)
    default_machine_path().write_text(machine_toml(measured((1, 4, 16, 48))))
    known = most_at_once(folder)
    assert guessed <= 2 * REQUESTS_FIRST
    assert known >= 4 * REQUESTS_FIRST
