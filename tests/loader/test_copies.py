"""Local files are copied into batches by worker processes, whatever happens to file or worker."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import ChangedError

from .conftest import write_tar

pytest.importorskip("torch")

ROW = 1024
NUM_ROWS = 6000


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Two files, so that a batch has rows of both: row i begins with the number i."""
    data = np.arange(NUM_ROWS * ROW, dtype=np.int32).reshape(NUM_ROWS, ROW)
    data[:, 0] = np.arange(NUM_ROWS)
    folder = tmp_path / "rows"
    folder.mkdir()
    np.save(folder / "a.npy", data[:2500])
    np.save(folder / "b.npy", data[2500:])
    return folder


def workers_of(loader: penstock.Loader) -> list[int]:
    assert loader._client is not None
    pids: list[int] = loader._client._ask("pids")
    return pids


def test_rows_of_several_files_are_those_of_one_process(rows: Path) -> None:
    options: dict[str, Any] = {"batch_size": 500, "seed": 3, "epochs": 2}
    dataset = penstock.open(rows)
    with penstock.Loader(dataset, workers="here", **options) as here:
        expected = [(b.ids.tolist(), b.mask.tolist(), b["data"].clone()) for b in here]
    with penstock.Loader(dataset, workers=2, **options) as loader:
        found = [(b.ids.tolist(), b.mask.tolist(), b["data"]) for b in loader]
        assert workers_of(loader)
        stats = loader.stats()
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one[:2] == other[:2]
        assert (one[2] == other[2]).all()
        assert one[2][:, 0].tolist() == one[0]
    assert stats.sources["folder"].size_bytes >= 2 * NUM_ROWS * ROW * 4


def test_samples_of_different_sizes_are_those_of_one_process(tmp_path: Path) -> None:
    blobs = {i: np.random.default_rng(i).bytes(20_000 + 37 * i) for i in range(300)}
    write_tar(tmp_path / "a.tar", [{"bin": b, "cls": b"7"} for b in blobs.values()], 0)
    dataset = penstock.open(tmp_path)
    with penstock.Loader(dataset, batch_size=100, workers=2, epochs=2) as loader:
        for batch in loader:
            for i, blob in zip(batch.ids.tolist(), batch["bin"], strict=True):
                assert bytes(blob.numpy()) == blobs[i]
            assert batch["cls"].tolist() == [7] * 100
        assert workers_of(loader)


def test_a_worker_that_is_killed_while_it_copies_is_replaced(rows: Path) -> None:
    loader = penstock.Loader(penstock.open(rows), batch_size=500, workers=2, epochs=4, seed=1)
    seen = []
    with loader:
        for n, batch in enumerate(loader):
            seen += batch.ids.tolist()
            assert batch["data"][:, 0].tolist() == batch.ids.tolist()
            if n in (3, 20):
                for pid in workers_of(loader):
                    os.kill(pid, signal.SIGKILL)
        events = loader.stats().events
    assert sorted(seen) == sorted(list(range(NUM_ROWS)) * 4)
    assert events
    assert "was ended by SIGKILL" in events[0]


def test_a_file_that_is_cut_off_while_it_is_mapped_is_an_error_that_names_it(rows: Path) -> None:
    loader = penstock.Loader(penstock.open(rows), batch_size=500, workers=1, epochs=None)
    with loader, pytest.raises(ChangedError, match=r"b\.npy"):
        for n, _ in enumerate(loader):
            if n == 2:
                os.truncate(rows / "b.npy", 4096)
