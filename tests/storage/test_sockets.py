"""Connections to a store: no more than requests in flight, and none that nobody uses."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from testkit.shaper import Fixed, Shape, Shaper

import penstock
from penstock.storage import clients


def num_sockets(port: int) -> int:
    """Return how many connections this process holds to a port of this machine."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            own.add(str(descriptor.readlink()))
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    remote = [row for row in rows if int(row[2].partition(":")[2], 16) == port]
    return sum(f"socket:[{row[9]}]" in own for row in remote)


def test_many_short_epochs_keep_few_connections_and_none_when_they_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(clients, "IDLE_S", 0.5)
    with penstock.Writer(tmp_path / "set", shard_size="1MB") as writer:
        for i in range(128):
            writer.write({"bin": bytes([i]) * 8000})
    with Shaper.of_folder(tmp_path / "set", Shape(latency=Fixed(0.005))) as shaper:
        assert shaper.options.endpoint is not None
        port = int(shaper.options.endpoint.rpartition(":")[2])
        dataset = penstock.open(shaper.uri, store=shaper.options, check=False)
        for epoch in range(12):
            with penstock.Loader(dataset, batch_size=16, epochs=1, seed=epoch) as loader:
                assert sum(len(batch.ids) for batch in loader) == 128
            assert num_sockets(port) <= clients.IDLE_MAX
        deadline_s = time.monotonic() + 30
        while num_sockets(port) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert num_sockets(port) == 0
        assert bytes(dataset[3]["bin"]) == bytes([3]) * 8000
        assert num_sockets(port) == 1
