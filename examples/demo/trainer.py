"""One training process of the demo: `python -m examples.demo.trainer JOB`.

It is written as a user would write it: open the data, make a loader, train, save the model beside
`loader.state_dict()`. The same code starts and resumes, on one rank and on several.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from examples.demo.messages import (
    DemoJob,
    Event,
    RankDone,
    RankReady,
    StepDone,
    decode_job,
    encode,
)
from examples.demo.shapes import split
from examples.demo.tiny_net import TinyTrainer, join, leave

from penstock.dataset.dataset import Dataset
from penstock.dataset.open import open as open_dataset
from penstock.loader.loader import Loader
from penstock.order import Steps, StreamHash
from penstock.world import World

_RATE = 0.008

Send = Callable[[Event], None]


def num_classes_of(dataset: Dataset) -> int:
    """Return how many classes there are, from the samples at the end of each run of ids."""
    return 1 + max(int(dataset[i]["cls"]) for i in np.linspace(0, len(dataset) - 1, 64).astype(int))


def train(job: DemoJob, send: Send) -> None:
    """Train from the checkpoint, or from the beginning, to the end of the last epoch."""
    world = World(rank=job.rank, num_ranks=job.num_ranks)
    join(world, Path(job.meeting_point))
    training, held_out = split(open_dataset(job.data))
    with Loader(
        training,
        global_batch_size=job.global_batch_size,
        epochs=job.epochs,
        seed=job.seed,
        world=world,
    ) as loader:
        trainer = TinyTrainer(
            num_classes=num_classes_of(training), num_steps=len(loader), rate=_RATE, seed=job.seed
        )
        step, delivered = _go_on(job, trainer, loader)
        send(_ready(job, trainer, loader, step))
        for batch in loader:
            loss, right = trainer.step(batch["jpg"], batch["cls"], batch.mask)
            step += 1
            delivered = _add(delivered, batch, loader)
            if job.save_every and step % job.save_every == 0:
                trainer.save(Path(job.checkpoint), **_state(loader, step, delivered))
            send(_progress(job, loader, batch, step=step, loss=loss, right=right))
    leave()
    accuracy = trainer.accuracy(_batches_of(held_out)) if job.rank == 0 else None
    send(
        RankDone(
            rank=job.rank,
            hash_total=delivered.total,
            hash_samples=delivered.num_samples,
            accuracy=accuracy,
        )
    )


def _state(loader: Loader, step: int, delivered: StreamHash) -> dict[str, Any]:
    return {
        "loader": loader.state_dict(),
        "step": step,
        # As text, because torch's safe loader knows no integers beyond 63 bits.
        "delivered": f"{delivered.total} {delivered.num_samples}",
    }


def _go_on(job: DemoJob, trainer: TinyTrainer, loader: Loader) -> tuple[int, StreamHash]:
    """Return the steps done and what was delivered in them, after loading a checkpoint if any."""
    path = Path(job.checkpoint)
    if not path.exists():
        return 0, StreamHash()
    state = trainer.load(path)
    loader.load_state_dict(state["loader"])
    # What came before the checkpoint is counted once, by one rank.
    total, samples = map(int, state["delivered"].split()) if job.rank == 0 else (0, 0)
    return state["step"], StreamHash(total=total, num_samples=samples)


def _add(delivered: StreamHash, batch: Any, loader: Loader) -> StreamHash:
    steps = Steps(
        num_samples=len(loader.dataset),
        global_batch_size=loader.global_batch_size or 1,
        num_ranks=loader.world.num_ranks,
    )
    positions, mask = steps.positions(batch.step, loader.world.rank)
    return delivered.update(batch.epoch, positions, batch.ids.numpy(), mask)


def _batches_of(dataset: Dataset) -> Iterator[tuple[Any, Any, Any]]:
    with Loader(dataset, batch_size=100, shuffle=None, world=World()) as loader:
        for batch in loader:
            yield batch["jpg"], batch["cls"], batch.mask


def _ready(job: DemoJob, trainer: TinyTrainer, loader: Loader, step: int) -> RankReady:
    state = loader.state_dict()
    return RankReady(
        rank=job.rank,
        first_step=step,
        num_steps=len(loader),
        num_parameters=trainer.num_parameters,
        epoch=state["epoch"],
        position=state["position"],
    )


def _progress(
    job: DemoJob, loader: Loader, batch: Any, *, step: int, loss: float, right: int
) -> StepDone:
    stats = loader.stats()
    return StepDone(
        rank=job.rank,
        step=step,
        loss=loss,
        right=right,
        samples=int(batch.mask.sum()),
        samples_total=stats.samples,
        elapsed_s=stats.elapsed_s,
        stall_s=stats.stall_s,
        decode_s=stats.decode_s,
        sources={name: (s.size_bytes, s.requests) for name, s in stats.sources.items()},
    )


def main() -> None:
    """Do the job of the command line; end quietly when the story is gone."""
    job = decode_job(sys.argv[1])

    def send(event: Event) -> None:
        # A single write below the atomic size of pipes, so that lines of several ranks do not mix.
        os.write(job.events, encode(event) + b"\n")

    try:
        train(job, send)
    except BrokenPipeError:
        os._exit(1)
    # Everything is sent and saved, and gloo threads of torch sometimes abort an exiting
    # interpreter.
    os._exit(0)


if __name__ == "__main__":
    main()
