"""A data set whose samples name themselves, and what is read from them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock

NUM_SAMPLES = 53


def write_rows(folder: Path, num_samples: int = NUM_SAMPLES) -> penstock.Dataset:
    """Write rows that hold nothing but their own number."""
    rows = np.repeat(np.arange(num_samples, dtype=np.int64)[:, None], 3, axis=1)
    np.save(folder / "rows.npy", rows)
    return penstock.open(folder)


def ids_of(batches: Iterable[Any]) -> list[list[int]]:
    """Sample ids by batch, read from the samples themselves."""
    return [b["data"][:, 0].tolist() for b in batches]


@pytest.fixture
def dataset(tmp_path: Path) -> penstock.Dataset:
    """Rows that name themselves."""
    return write_rows(tmp_path)
