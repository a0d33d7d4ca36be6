"""Column files appear whole, or not at all."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from penstock.dataset.columns import write_columns


def test_a_file_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_columns(tmp_path / "part.idx", {"a": np.arange(3)}, {})
    assert not list(tmp_path.iterdir())
