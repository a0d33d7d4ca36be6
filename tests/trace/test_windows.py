"""Differential windows: real and resident batches in turns, and the cursor moves with real ones."""

from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.errors import OptionError
from penstock.trace import Flag, Kind, read_trace
from penstock.trace.windows import DIFFERENTIAL_VARIABLE, is_resident, window_asked_for


def test_windows_alternate_and_the_first_is_real() -> None:
    assert [is_resident(step, 2) for step in range(8)] == [False, False, True, True] * 2
    assert not any(is_resident(step, 0) for step in range(8))


@pytest.mark.parametrize("text", ["-1", "two", "1.5"])
def test_a_window_that_is_no_number_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIFFERENTIAL_VARIABLE, text)
    with pytest.raises(OptionError, match=DIFFERENTIAL_VARIABLE):
        window_asked_for()


@pytest.mark.parametrize("workers", ["here", 1])
def test_a_resident_window_repeats_the_last_real_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: str | int
) -> None:
    np.save(tmp_path / "rows.npy", np.arange(48, dtype=np.int32).reshape(12, 4))
    monkeypatch.setenv(DIFFERENTIAL_VARIABLE, "2")
    dataset = penstock.open(tmp_path / "rows.npy")
    with penstock.Loader(
        dataset,
        batch_size=2,
        shuffle=None,
        output="numpy",
        workers=workers,  # type: ignore[arg-type]
        trace=tmp_path / "run",
    ) as loader:
        found = [batch.ids[0] // 2 for batch in loader]
        # Six real batches, two at a time; the window goes on where the iteration before ended.
        assert found == [0, 1, 1, 1, 2, 3, 3, 3, 4, 5, 5, 5]
        assert loader.stats().batches == 6
        assert loader.epoch == 1
        assert next(iter(loader)).ids[0] == 0
    spans = read_trace(tmp_path / "run").of(Kind.NEXT)
    is_kept = (spans["flags"] & Flag.RESIDENT) != 0
    assert is_kept.tolist() == [False, False, True, True] * 3 + [False]
    assert spans["step"][:4].tolist() == [0, 1, 1, 1]
