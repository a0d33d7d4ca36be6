"""Page-locked batches on a GPU: memory is not used again while a copy from it runs."""

from pathlib import Path

import numpy as np
import pytest
import torch

import penstock

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

ROWS, WIDTH = 256, 1 << 18


@pytest.fixture
def rows(tmp_path: Path) -> penstock.Dataset:
    data = np.repeat(np.arange(ROWS, dtype=np.int32)[:, None], WIDTH, axis=1)
    np.save(tmp_path / "rows.npy", data)
    return penstock.open(tmp_path / "rows.npy")


def copies_are_right(rows: penstock.Dataset, stream: torch.cuda.Stream) -> None:
    options = {"batch_size": 16, "epochs": 4, "workers": "processes", "look_ahead": "1MB"}
    found = []
    with penstock.Loader(rows, **options) as loader:
        for batch in loader:
            field = next(iter(batch.values()))
            assert field.is_pinned()
            assert field.pin_memory() is field
            with torch.cuda.stream(stream):
                torch.cuda._sleep(60_000_000)  # The copy waits behind this.
                found.append((batch.ids.tolist(), field.to("cuda", non_blocking=True)))
            del batch, field
        torch.cuda.synchronize()
    assert len(found) == 64
    for ids, copied in found:
        expected = torch.tensor(ids, dtype=torch.int32, device="cuda")[:, None]
        assert bool((copied == expected).all())


@pytest.mark.parametrize("side_stream", [False, True])
def test_a_batch_may_be_dropped_while_its_copy_is_under_way(
    rows: penstock.Dataset, side_stream: bool
) -> None:
    torch.cuda.init()
    copies_are_right(rows, torch.cuda.Stream() if side_stream else torch.cuda.current_stream())


def test_the_guard_is_what_makes_it_right(
    rows: penstock.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the same loop gets wrong rows: the test above can fail."""
    monkeypatch.setattr(
        "penstock.loader.torch.pinning.PinnedMemory.free", lambda self, dropped: list(dropped)
    )
    with pytest.raises(AssertionError):
        copies_are_right(rows, torch.cuda.Stream())
