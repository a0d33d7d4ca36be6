"""One rank of a job that some launcher has started; it writes down what it was given.

    torchrun … launched.py torchrun FOLDER

Every rank goes through the data set, with a tier for each node and peers, looks at every value, and
leaves a file with the hash of its part of the stream and what it read from where.
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

NUM_SAMPLES, EPOCHS, GLOBAL_BATCH_SIZE, SEED = 96, 2, 12, 7
STEPS = NUM_SAMPLES // GLOBAL_BATCH_SIZE
SAVED_AT, FAILS_AT = STEPS // 2, STEPS + 2
"""Steps after which a job that is to fail saves its place, and fails, once."""
STEP_S = 0.02
"""A loop that does nothing but wait for batches would have what is late asked for twice."""

Step = Callable[[Any], None]


def deliver(folder: Path, name: str, step: Step | None = None, *, fails: bool = False) -> None:
    """Go through all epochs as one rank; the name tells several deliveries of a job apart."""
    world = penstock.World.from_env()
    saved, stream = folder / f"{name}-saved-{world.rank}.json", StreamHash()
    is_again = saved.exists()
    with make_loader(folder, folder / f"{name}-node{world.node}") as loader:
        if is_again:
            state = json.loads(saved.read_text())
            loader.load_state_dict(state["loader"])
            stream = StreamHash(**state["stream"])
        for number, batch in enumerate(loader, 1):
            assert (batch["npy"] == batch.ids[:, None]).all()
            if step is not None:
                step(batch)
            time.sleep(STEP_S)
            stream = stream.update(batch.epoch, batch.positions, batch.ids, batch.mask)
            if fails and not is_again and number == SAVED_AT:
                write(saved, {"loader": loader.state_dict(), "stream": asdict(stream)})
            if fails and not is_again and number == FAILS_AT and world.rank == world.num_ranks - 1:
                os._exit(1)
        stats = loader.stats()
        said = {"store_bytes": stats.store_bytes, "peer_bytes": stats.peer_bytes}
        said |= {"stream": asdict(stream), "node": world.node, "summary": str(stats)}
        write(folder / f"{name}-{world.rank}.json", said)


def make_loader(folder: Path, tier: Path) -> penstock.Loader:
    """Return a loader over a store whose address was written down for all ranks."""
    options = StoreOptions(endpoint=(folder / "endpoint").read_text(), anonymous=True)
    tier.mkdir(exist_ok=True)
    return penstock.Loader(
        penstock.open("s3://data/", store=options, check=False),
        global_batch_size=GLOBAL_BATCH_SIZE,
        epochs=EPOCHS,
        seed=SEED,
        tiers=[penstock.Disk(tier, "1GB")],
        peers=True,
        output="torch" if "torch" in sys.modules else "numpy",
    )


def write(path: Path, what: Any) -> None:
    """Write a file at once: whoever writes may be ended in the middle."""
    path.with_suffix(".new").write_text(json.dumps(what))
    path.with_suffix(".new").rename(path)


def reduced(batch: Any) -> None:
    """Wait for all ranks, as the steps of most trainings do.

    Without DistributedDataParallel, which imports torch's compiler: as much time as torch itself.
    """
    from torch import distributed

    distributed.all_reduce(batch["npy"][:, :16].mean())


# -- ways to be launched -----------------------------------------------------------------------


def plain(folder: Path) -> None:
    """Without torch, as Slurm and MPI start programs."""
    deliver(folder, "plain")
    assert "torch" not in sys.modules


def torchrun(folder: Path) -> None:
    """First without a process group, then, in the same processes, with one."""
    from torch import distributed

    deliver(folder, "without")
    distributed.init_process_group("gloo")
    deliver(folder, "with", reduced)
    distributed.destroy_process_group()


def restarted(folder: Path) -> None:
    """With a group, and one rank that fails in the middle the first time."""
    from torch import distributed

    distributed.init_process_group("gloo")
    deliver(folder, "restarted", reduced, fails=True)
    distributed.destroy_process_group()


def accelerate(folder: Path) -> None:
    """As Accelerate's users write it; the accelerator makes the group."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    deliver(folder, "accelerate", lambda batch: accelerator.reduce(batch["npy"][:, :16].mean()))
    accelerator.end_training()


def ray(config: dict[str, str]) -> None:
    """Train as one worker of Ray Train, which has made the group; the first time one fails."""
    deliver(Path(config["folder"]), "ray", reduced, fails=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
    os._exit(0)  # Torch's gloo (2.13) now and then aborts as the interpreter ends.
