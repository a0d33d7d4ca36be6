"""Importance sampling in real process groups: one stream for all ranks, however many there are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

import penstock
from penstock.errors import OptionError
from penstock.loader.torch.losses import GroupExchange
from penstock.torch import IterableDataset

from . import importance_ranks as job

NUM_RANKS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job of three ranks that has been through all acts."""
    folder = tmp_path_factory.mktemp("importance")
    (folder / "rows").mkdir()
    np.save(folder / "rows" / "rows.npy", np.arange(240 * 4, dtype=np.int32).reshape(240, 4))
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    env |= {"PENSTOCK_CACHE": str(folder / "cache"), "PYTHONWARNINGS": "error::FutureWarning"}
    ranks = [
        subprocess.Popen(
            [sys.executable, job.__file__, str(folder), str(rank), str(NUM_RANKS)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(NUM_RANKS)
    ]
    try:
        outputs = [rank.communicate(timeout=200)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * NUM_RANKS, "\n".join(outputs)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Any]:
    """What one rank alone is given."""
    seen = []
    with job.loader_of(folder, penstock.World()) as loader:
        for batch in loader:
            loader.observe(batch, job.loss_of(batch.ids))
            seen.append([batch.epoch, batch.step, batch.ids.tolist(), batch.weights.tolist()])
    return seen


def of_act(folder: Path, act: str) -> list[Any]:
    return [torch.load(folder / f"{act}-{rank}.pt") for rank in range(NUM_RANKS)]


def joined(ranks: list[list[Any]]) -> list[Any]:
    """Return the global batches of all ranks."""
    out = []
    for shares in zip(*ranks, strict=True):
        assert len({(epoch, step) for epoch, step, _, _ in shares}) == 1
        ids, weights = ([x for share in shares for x in share[i]] for i in (2, 3))
        out.append([*shares[0][:2], ids, weights])
    return out


def test_ranks_of_a_group_share_the_stream_of_one_rank(folder: Path, alone: list[Any]) -> None:
    assert joined(of_act(folder, "whole")) == alone
    assert any(weight != 1 for *_, weights in alone for weight in weights)


def test_a_run_goes_on_in_groups_of_other_sizes_which_exchange_among_their_members(
    folder: Path, alone: list[Any]
) -> None:
    parts = of_act(folder, "in_parts")
    assert joined(parts[:2]) == alone[job.SAVED_AT :]
    assert parts[2] == alone[job.SAVED_AT :]


def test_a_rank_that_forgets_to_observe_is_found_out_and_named(folder: Path) -> None:
    first, forgetful, last = of_act(folder, "forgetful")
    # Who sees it first leaves the job; another rank may then be in a collective that breaks.
    told = [e for e in (first, last) if e.startswith("StateError")]
    assert told, (first, last)
    for error in told:
        assert "ranks have reported losses of different batches" in error
        assert "rank 0: 5 of epoch 0, rank 1: 6 of epoch 0, rank 2: 5 of epoch 0" in error
    assert all("Error" in error for error in (first, forgetful, last))


def test_a_world_that_is_not_the_group_is_refused() -> None:
    distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        with pytest.raises(OptionError, match=r"2 ranks and the job 4.*world_of\(mesh\[\"dp\"\]\)"):
            GroupExchange(penstock.World(rank=0, num_ranks=2), 8)
    finally:
        distributed.destroy_process_group()


def test_a_training_loop_with_tensors_learns_and_moves_batches(dataset: penstock.Dataset) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    shuffle = penstock.Importance(window=0.5, score="loss")
    options: dict[str, Any] = {"batch_size": 8, "epochs": 4, "shuffle": shuffle, "workers": "here"}
    totals = [0.0] * 4
    with penstock.Loader(dataset, **options) as loader:
        for batch in loader:
            moved = batch.to("cpu")
            moved["data"] = moved["data"].float()
            losses = (model(moved["data"]).squeeze(1) - 2 * moved["data"][:, 0]).square()
            loader.observe(moved, losses.to(torch.bfloat16))
            loss = (losses * moved.weights).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            totals[batch.epoch] += float(loss.detach())
        assert loader.importance is not None
        assert loader.importance.num_observed == len(loader)
    assert totals[-1] < totals[0]


def test_views_for_a_dataloader_are_refused(dataset: penstock.Dataset) -> None:
    with pytest.raises(OptionError, match=r"use penstock\.Loader"):
        IterableDataset(dataset, batch_size=8, shuffle=penstock.Importance())  # type: ignore[typeddict-item]


def test_a_loader_inside_of_a_dataloaders_worker_is_refused(dataset: penstock.Dataset) -> None:
    loader = penstock.Loader(dataset, batch_size=8, shuffle=penstock.Importance(window=0.5))
    data: DataLoader[Any] = DataLoader(_View(loader), batch_size=None, num_workers=1)
    with pytest.raises(OptionError, match="iterate over the penstock"):
        next(iter(data))


class _View(torch.utils.data.IterableDataset[Any]):
    """What people write themselves around a loader."""

    def __init__(self, loader: penstock.Loader) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return iter(self.loader)
