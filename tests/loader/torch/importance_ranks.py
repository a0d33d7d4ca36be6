"""One rank of a job that samples by importance; it writes down what it was given.

    importance_ranks.py FOLDER RANK NUM_RANKS

All ranks go through the same acts, one after the other, in one default process group.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import penstock
from penstock.errors import PenstockError
from penstock.torch import world_of

BATCH, EPOCHS, SEED, SAVED_AT, FORGETS_AT = 12, 3, 3, 23, 5
IMPORTANCE = penstock.Importance(window=60, score="loss")


def loader_of(folder: Path, world: penstock.World | None = None) -> penstock.Loader:
    """Return the loader that all acts use."""
    return penstock.Loader(
        penstock.open(folder / "rows"),
        global_batch_size=BATCH,
        epochs=EPOCHS,
        seed=SEED,
        shuffle=IMPORTANCE,
        world=world,
        workers="here",
        output="torch",
    )


def loss_of(ids: torch.Tensor) -> torch.Tensor:
    """Return losses that depend on nothing but the sample."""
    return 1 + (ids * 37 % 101) / 20 + 9 * (ids % 11 == 0)


def trained(loader: penstock.Loader, group: Any = None, forgets_at: int = -1) -> list[Any]:
    """Train; every step ends with a collective, as those of DDP do."""
    seen = []
    for number, batch in enumerate(loader):
        losses = loss_of(batch.ids)
        if number != forgets_at:
            loader.observe(batch, losses)
        distributed.all_reduce((losses * batch.weights).mean(), group=group)
        seen.append([batch.epoch, batch.step, batch.ids.tolist(), batch.weights.tolist()])
    return seen


def whole(folder: Path, rank: int) -> list[Any]:
    """Train with all ranks, and save a state in the middle."""
    with loader_of(folder) as loader:
        seen = []
        for number, batch in enumerate(loader, 1):
            loader.observe(batch, loss_of(batch.ids))
            seen.append([batch.epoch, batch.step, batch.ids.tolist(), batch.weights.tolist()])
            if number == SAVED_AT and rank == 0:
                torch.save(loader.state_dict(), folder / "state.pt")
            distributed.all_reduce(batch.weights.sum())
        return seen


def in_parts(folder: Path, rank: int) -> list[Any]:
    """Go on with the saved state, the first two ranks together and the others alone."""
    groups = [distributed.new_group([0, 1]), distributed.new_group([2])]
    group = groups[rank // 2]
    with loader_of(folder, world_of(group)) as loader:
        loader.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
        return trained(loader, group)


def forgetful(folder: Path, rank: int) -> str:
    """Leave out one report on one rank; return the error that this rank has seen.

    It is the last act: ranks that have seen the error leave the job, as in any other failure.
    """
    try:
        with loader_of(folder) as loader:
            trained(loader, forgets_at=FORGETS_AT if rank == 1 else -1)
    except (PenstockError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main(folder: Path, rank: int, num_ranks: int) -> None:
    """Be one rank."""
    store = f"file://{folder}/store-{num_ranks}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    for act in (whole, in_parts, forgetful):
        torch.save(act(folder, rank), folder / f"{act.__name__}-{rank}.pt")
        if act is not forgetful:
            distributed.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    os._exit(0)  # Torch's gloo (2.13) now and then aborts as the interpreter ends.
