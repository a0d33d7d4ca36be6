"""Stop and go on, each time on another number of ranks: nothing is lost, nothing comes twice.

    python examples/resume_anywhere.py

Ranks are made one after the other in this one process; what each of them gets is what it would get
in a job of its own. A hash of everything delivered is compared with what the seed alone promises.
"""

import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import penstock
from penstock.order import StreamHash

EPOCHS, GLOBAL_BATCH_SIZE = 3, 48
STOPS = [(1, 7), (4, 20), (3, 1), (6, 19), (2, 16)]
"""Number of ranks, and steps until the job is killed."""


def run(
    dataset: penstock.Dataset, num_ranks: int, num_steps: int, state: dict[str, Any] | None
) -> tuple[StreamHash, dict[str, Any]]:
    """Return what a job of some ranks delivers in some steps, and the state that it leaves."""
    seen, saved = StreamHash(), dict[str, Any]()
    for rank in range(num_ranks):
        world = penstock.World(rank=rank, num_ranks=num_ranks)
        first = rank * GLOBAL_BATCH_SIZE // num_ranks
        with penstock.Loader(
            dataset, global_batch_size=GLOBAL_BATCH_SIZE, epochs=EPOCHS, seed=7, world=world
        ) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for batch in islice(loader, num_steps):
                positions = batch.step * GLOBAL_BATCH_SIZE + first + np.arange(len(batch.ids))
                seen = seen.update(batch.epoch, positions, batch.ids, batch.mask)
            saved = loader.state_dict()
    return seen, saved


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        np.save(Path(name, "rows.npy"), np.arange(1000))
        dataset = penstock.open(name)
        delivered, state = StreamHash(), None
        for num_ranks, num_steps in STOPS:
            seen, state = run(dataset, num_ranks, num_steps, state)
            delivered = delivered.merge(seen)
            place = f"epoch {state['epoch']}, position {state['position']}"
            print(f"{num_ranks} ranks, {num_steps:>2} steps, killed at {place}")
        order, promised = penstock.Loader(dataset, batch_size=1, seed=7).order, StreamHash()
        for epoch in range(EPOCHS):
            promised = promised.update(epoch, np.arange(1000), order.ids(epoch, 0, 1000))
    print(f"delivered  {delivered.num_samples} samples  {delivered.hexdigest()}")
    print(f"promised   {promised.num_samples} samples  {promised.hexdigest()}")
    assert delivered == promised


if __name__ == "__main__":
    main()
