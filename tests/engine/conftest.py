"""A tiny data set for tests of single modules."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import penstock


@pytest.fixture
def rows_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], penstock.Dataset]:
    """Returns a data set of so many rows; row i is 4 numbers from 4 * i on."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))

    def make(num_samples: int) -> penstock.Dataset:
        folder = tmp_path / f"rows-{num_samples}"
        folder.mkdir()
        rows = np.arange(num_samples * 4, dtype=np.int32).reshape(num_samples, 4)
        np.save(folder / "rows.npy", rows)
        return penstock.open(folder)

    return make
