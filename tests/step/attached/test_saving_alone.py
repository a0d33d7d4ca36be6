"""`if rank == 0: torch.save(...)`, as people save: others need not call anything."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.step.attached.cases import OPTIMIZERS, assert_same, attach, batches, mlp, train, weights
from tests.step.ranks import run_ranks
from torch import distributed

from penstock.errors import PeerError, StateError


def saved(*what: Any) -> Any:
    file = io.BytesIO()
    torch.save([each.state_dict() for each in what], file)
    file.seek(0)
    return torch.load(file)


WAYS = [
    {"buckets": 512},
    {"buckets": 512, "over": "memory"},
    {"buckets": 512, "reshard": True},
]


def alone(rank: int, size: int) -> list[Any]:
    """Save on one rank, or two, while others wait in a barrier, or go on; with each way."""
    found = []
    for options in WAYS:
        model = mlp()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        attach(model, optimizer, **options)
        for savers, has_barrier in (((0,), True), ((size - 1,), False), ((0, 1), False)):
            train(model, optimizer, batches(2, rank, size))
            if rank in savers:
                found.append(saved(model, optimizer))
            if has_barrier:
                distributed.barrier()
        train(model, optimizer, batches(2, rank, size))
        found.append(weights(model) if rank < 2 else None)
    return found


def test_one_rank_saves_what_all_have_while_others_do_something_else() -> None:
    model = mlp()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    expected = []
    for _ in range(3):
        train(model, optimizer, batches(2))
        expected.append(saved(model, optimizer))
    train(model, optimizer, batches(2))
    first, second, third = run_ranks(alone, 3)
    for at in range(0, len(first), 3):
        assert_same(first[at + 2], weights(model))
        assert_alike(first[at], expected[0])
        assert_alike(third[at // 3 * 2], expected[1])
        for found in (first[at + 1], second[at // 3 * 2]):
            assert_alike(found, expected[2])


def assert_alike(found: Any, expected: Any) -> None:
    (weights_of, state_of), (model, optimizer) = found, expected
    for name, value in model.items():
        assert_same(weights_of[name], value)
    for number, state in optimizer["state"].items():
        for name, value in state.items():
            assert_same(state_of["state"][number][name], value)


def apart(rank: int, size: int) -> list[str]:
    """Save on a rank where another loads alone, or is gone."""
    model = mlp()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    attach(model, optimizer)
    train(model, optimizer, batches(2, rank, size))
    state = optimizer.state_dict()
    with pytest.raises(StateError) as loaded:
        if rank == 1:
            optimizer.load_state_dict(state)
        else:
            optimizer.state_dict()  # while the other one waits
            optimizer.step()
    for _ in range(20):
        optimizer.load_state_dict(optimizer.state_dict())  # who is first waits for who saves yet
    distributed.barrier()
    if rank == 1:
        os._exit(3)
    with pytest.raises(PeerError) as gone:
        while True:
            optimizer.state_dict()
    return [str(loaded.value), str(gone.value), *gone.value.__notes__]


def test_who_saves_is_told_at_once_why_a_slice_is_not_to_be_had() -> None:
    loaded, gone, note = run_ranks(apart, 2, dies={1})[0]
    assert "rank 0 calls optimizer.step() while rank 1 calls optimizer.load_state_dict()" in loaded
    assert "rank 1 does not answer rank 0" in gone
    assert "torch.distributed.barrier()" in note


ENDING = """
import sys, torch
from datetime import timedelta
from torch import distributed
from penstock.step import attach
from tests.step.attached.cases import OPTIMIZERS, batches, mlp, train
rank, file = int(sys.argv[1]), sys.argv[2]
store = distributed.FileStore(file, 2)
distributed.init_process_group(
    "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20)
)
model = mlp()
optimizer = OPTIMIZERS["adamw"](model.parameters())
attach(model, optimizer, reshard=sys.argv[3] == "resharded")
train(model, optimizer, batches(2, rank, 2))
if rank == 1:
    store.set("ends", "")
else:
    store.wait(["ends"])
    torch.save([model.state_dict(), optimizer.state_dict()], file + ".pt")
    train(model, optimizer, batches(1, rank, 2))
"""
"""A last save has no barrier after it; a loop that is longer on one rank is an error."""


@pytest.mark.parametrize("how", ["attached", "resharded"])
def test_who_ends_stays_for_the_last_save_and_not_for_another_step(
    tmp_path: Path, how: str
) -> None:
    command = [sys.executable, "-c", ENDING]
    given = {"cwd": Path(__file__).parents[3], "stderr": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), how], **given)
        for rank in range(2)
    ]
    (_, first), (_, second) = (rank.communicate() for rank in ranks)
    assert ranks[1].returncode == 0, second
    assert "PeerError" in first
    assert "Timed out" not in first, first
    model = mlp()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, batches(2))
    found = torch.load(tmp_path / "store.pt")
    assert_alike(found, [model.state_dict(), optimizer.state_dict()])


FORKED = """
import multiprocessing, sys, torch
from datetime import timedelta
from torch import distributed
from penstock.step import attach
from tests.step.attached.cases import OPTIMIZERS, batches, mlp, train

def work(rank, file):
    store = distributed.FileStore(file, 2)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    model = mlp()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    attach(model, optimizer)
    train(model, optimizer, batches(2, rank, 2))
    if rank == 0:
        torch.save([model.state_dict(), optimizer.state_dict()], file + ".pt")

context = multiprocessing.get_context("fork")
ranks = [context.Process(target=work, args=(rank, sys.argv[1])) for rank in range(2)]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join()
sys.exit(max(rank.exitcode for rank in ranks))
"""
"""As launchers of notebooks do: such processes end without atexit."""


def test_a_forked_rank_that_ends_stays_for_the_last_save(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKED, str(tmp_path / "store")]
    subprocess.run(command, cwd=Path(__file__).parents[3], check=True, timeout=60)
    assert (tmp_path / "store.pt").exists()
