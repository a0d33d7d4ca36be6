"""A new job beside processes that are stopped: it goes on without them, and soon."""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.engine.node.jobs import StartedNode

import penstock
from penstock.storage.tier_locks import OPENING, RecordLocks

LONG_S = 15.0
"""Jobs were held up for 30 and 60 s."""

Start = Callable[..., StartedNode]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> penstock.Dataset:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows").mkdir()
    np.save(tmp_path / "rows" / "x.npy", np.arange(4000).reshape(1000, 4))
    return penstock.open(tmp_path / "rows")


def check_an_epoch(loader: penstock.Loader) -> None:
    with loader:
        for batch in loader:
            assert (batch["data"][:, 0] == batch.ids * 4).all()


@pytest.fixture
def stopped_in_opening(tmp_path: Path, rows: penstock.Dataset) -> Iterator[int]:
    """A process that was stopped while it opened the tier of the data set."""
    tier = penstock.Disk(tmp_path, "1MB")
    with penstock.Loader(rows, batch_size=100, tiers=[tier], output="numpy") as loader:
        check_an_epoch(loader)
    lock = next(tmp_path.glob("penstock/*/lock"))
    pid = os.fork()
    if pid == 0:
        try:
            if RecordLocks(os.open(lock, os.O_RDWR)).try_alone(OPENING):
                os.kill(os.getpid(), signal.SIGSTOP)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_process_stopped_in_opening_holds_no_job_up(
    tmp_path: Path,
    rows: penstock.Dataset,
    stopped_in_opening: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tier = penstock.Disk(tmp_path, "1MB")
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING):
        check_an_epoch(penstock.Loader(rows, batch_size=100, tiers=[tier], output="numpy"))
    assert time.monotonic() - begin < LONG_S
    assert caplog.text.count("is held by") == 1
    assert f"held by process {stopped_in_opening}," in caplog.text


def test_a_stopped_node_service_holds_no_job_up(
    rows: penstock.Dataset,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    node = start()
    monkeypatch.setenv("PENSTOCK_NODE", node.socket)
    os.kill(node.pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        tier = penstock.Disk(tmp_path, "1MB")
        with caplog.at_level(logging.WARNING):
            check_an_epoch(
                penstock.Loader(rows, batch_size=100, tiers=[tier], peers=True, output="numpy")
            )
        assert time.monotonic() - begin < LONG_S
        assert f"process {node.pid} makes no progress" in caplog.text
        assert "goes on with tiers of its own" in caplog.text
    finally:
        os.kill(node.pid, signal.SIGCONT)
