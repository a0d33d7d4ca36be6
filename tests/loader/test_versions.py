"""A data set that grows while it is read."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Disk, World
from penstock.errors import OptionError

_writing = threading.Lock()


def grown(folder: Path, number: int) -> penstock.Dataset:
    """Append 20 samples."""
    with _writing, penstock.Writer(folder, append=number > 0) as writer:
        for i in range(20):
            writer.write({"label": np.int64(number * 20 + i)})
    return penstock.open(folder)


def test_a_loader_moves_to_the_newest_version_between_epochs_only(tmp_path: Path) -> None:
    dataset = grown(tmp_path / "set", 0)
    loader = penstock.Loader(dataset, batch_size=8, output="numpy")
    assert not loader.refresh(), "there is nothing newer"
    batches = iter(loader)
    next(batches)
    grown(tmp_path / "set", 1)
    with pytest.raises(OptionError, match="between epochs"):
        loader.refresh()
    assert sum(int(batch.mask.sum()) for batch in batches) == 12, "an epoch ends as it began"
    assert loader.refresh()
    assert sorted(i for b in loader for i in b.ids[b.mask].tolist()) == list(range(40))
    assert loader.epoch == 2


def test_a_state_is_resumed_with_the_version_it_was_saved_with(tmp_path: Path) -> None:
    first = grown(tmp_path / "set", 0)
    loader = penstock.Loader(first, batch_size=8, output="numpy")
    next(iter(loader))
    state = loader.state_dict()
    newest = grown(tmp_path / "set", 1)
    resumed = penstock.Loader(newest, batch_size=8, output="numpy")
    resumed.load_state_dict(state)
    assert len(resumed.dataset) == 20
    assert sum(int(batch.mask.sum()) for batch in resumed) == 12


@pytest.mark.parametrize("peers", [True, False])
def test_all_ranks_move_to_the_same_version_at_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peers: bool
) -> None:
    """Though a writer appends while they ask, one after the other."""
    monkeypatch.setenv("PENSTOCK_RENDEZVOUS", str(tmp_path / "meet"))
    folder = tmp_path / "set"
    dataset = grown(folder, 0)

    def be(rank: int) -> list[tuple[int, int]]:
        options: dict[str, Any] = {}
        if peers:
            tier = tmp_path / f"tier{rank}"
            tier.mkdir()
            options = {"tiers": [Disk(tier, "1GB")], "peers": True}
        world = World(rank=rank, num_ranks=3, num_nodes=3)
        seen = []
        with penstock.Loader(
            dataset, global_batch_size=12, world=world, output="numpy", **options
        ) as loader:
            for epoch in range(3):
                seen.append((len(loader.dataset), sum(int(b.mask.sum()) for b in loader)))
                grown(folder, 1 + 3 * epoch + rank)
                loader.refresh()
        return seen

    with ThreadPoolExecutor(3) as pool:
        seen = [run.result(timeout=120) for run in [pool.submit(be, rank) for rank in range(3)]]
    for epoch in range(3):
        sizes = {rank[epoch][0] for rank in seen}
        assert len(sizes) == 1, f"epoch {epoch}: ranks read versions of {sizes} samples"
        assert sum(rank[epoch][1] for rank in seen) == sizes.pop()
    assert seen[0][2][0] > seen[0][0][0]
