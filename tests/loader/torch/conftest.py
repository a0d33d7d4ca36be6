"""A data set whose samples name themselves."""

from pathlib import Path

import numpy as np
import pytest

import penstock


@pytest.fixture
def dataset(tmp_path: Path) -> penstock.Dataset:
    """Fifty-three rows that hold nothing but their own number."""
    rows = np.repeat(np.arange(53, dtype=np.int64)[:, None], 3, axis=1)
    np.save(tmp_path / "rows.npy", rows)
    return penstock.open(tmp_path)
