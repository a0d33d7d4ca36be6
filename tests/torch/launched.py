"""One rank of a job that some launcher has started; it writes down what it was given.

    torchrun … launched.py group FOLDER

Every rank goes through the data set in FOLDER, with a tier for each node and peers, looks at every
value, and leaves a file with the hash of its part of the stream and what it read from where.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import penstock
from penstock.order.stream_hash import StreamHash
from penstock.storage import StoreOptions

NUM_SAMPLES = 96
EPOCHS, GLOBAL_BATCH_SIZE = 2, 12
STEP_S = 0.03
"""A loop that does nothing but wait for the next batch would have what is late asked for twice."""
STEPS = NUM_SAMPLES // GLOBAL_BATCH_SIZE
SAVED_AT, FAILS_AT = STEPS // 2, STEPS + 1
"""Steps after which a rank that can fail saves its place, and fails, once."""

Step = Callable[[Any], None]


def far_data(folder: Path) -> penstock.Dataset:
    """Return the data set at the store whose address was written down for all ranks."""
    options = StoreOptions(endpoint=(folder / "endpoint").read_text(), anonymous=True)
    return penstock.open("s3://data/", store=options, check=False)


def deliver(folder: Path, name: str, step: Step, *, fails: bool = False) -> None:
    """Be one rank; all ranks use the same name, and no two deliveries do."""
    world = penstock.World.from_env()
    tier = folder / f"{name}-node{world.node}"
    tier.mkdir(exist_ok=True)
    saved, stream = folder / f"{name}-saved-{world.rank}.json", StreamHash()
    is_again = saved.exists()
    with penstock.Loader(
        far_data(folder),
        global_batch_size=GLOBAL_BATCH_SIZE,
        epochs=EPOCHS,
        seed=7,
        tiers=[penstock.Disk(tier, "1GB")],
        peers=True,
        output="torch" if "torch" in sys.modules else "numpy",
    ) as loader:
        if is_again:
            state = json.loads(saved.read_text())
            loader.load_state_dict(state["loader"])
            stream = StreamHash(**state["stream"])
        for number, batch in enumerate(loader, 1):
            assert (batch["npy"] == batch.ids[:, None]).all()
            step(batch)
            stream = stream.update(batch.epoch, batch.positions, batch.ids, batch.mask)
            said = {**asdict(stream), **counts(loader), "node": world.node, "steps": number}
            write(folder / f"{name}-{int(is_again)}-{world.rank}.json", said)
            if fails and not is_again and number == SAVED_AT:
                write(saved, {"loader": loader.state_dict(), "stream": asdict(stream)})
            if fails and not is_again and number == FAILS_AT and world.rank == world.num_ranks - 1:
                os._exit(1)
        write(folder / f"{name}-{int(is_again)}-{world.rank}.json", {**said, **counts(loader)})


def counts(loader: penstock.Loader) -> dict[str, Any]:
    stats = loader.stats()
    names = ("store_bytes", "peer_bytes", "tier_bytes")
    return {**{name: getattr(stats, name) for name in names}, "summary": str(stats)}


def write(path: Path, what: Any) -> None:
    """Write a file at once: whoever writes may be ended in the middle."""
    path.with_suffix(".new").write_text(json.dumps(what))
    path.with_suffix(".new").rename(path)


def nothing(batch: Any) -> None:
    """Take as long as a small step of a training would."""
    time.sleep(STEP_S)


def ddp_step() -> Step:
    """Return a step that waits for all ranks, as those of most trainings do."""
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(nn.Linear(16, 1))

    def step(batch: Any) -> None:
        model(batch["npy"][:, :16]).mean().backward()
        time.sleep(STEP_S)

    return step


# -- ways to be launched -----------------------------------------------------------------------


def plain(folder: Path) -> None:
    """Without torch, as Slurm and MPI start programs."""
    deliver(folder, "plain", nothing)
    assert "torch" not in sys.modules


def torchrun(folder: Path) -> None:
    """First without a process group, then, in the same process, with one."""
    from torch import distributed

    deliver(folder, "without", nothing)
    distributed.init_process_group("gloo")
    deliver(folder, "with", ddp_step())
    distributed.destroy_process_group()


def restarted(folder: Path) -> None:
    """With a group, and one rank that fails in the middle the first time."""
    from torch import distributed

    distributed.init_process_group("gloo")
    deliver(folder, "restarted", ddp_step(), fails=True)
    distributed.destroy_process_group()


def restarted_without(folder: Path) -> None:
    """The same without a group: ranks wait for nobody."""
    import torch  # noqa: F401  # Peers meet in the store of torchrun's agents.

    deliver(folder, "restarted_without", nothing, fails=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
