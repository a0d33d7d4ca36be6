"""Accelerate: `prepare` leaves the loader alone, `register_for_checkpointing` saves its place.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py --folder /tmp/acc --stop-after 25
    torchrun --nproc-per-node 2 examples/accelerate_loop.py --folder /tmp/acc

A loader gives each rank its own share and needs no wrapper: batches only have to be moved to the
device. A torch DataLoader over `penstock.torch.IterableDataset` must *not* be prepared, for
Accelerate would split each rank's share once more; Penstock raises an error rather than lose data.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn

import penstock

EPOCHS, GLOBAL_BATCH_SIZE = 3, 64


def folder_for_all(accelerator: Accelerator, given: Path | None) -> Path:
    """The main process makes the data, the others hear where it is."""
    found = [None]
    if accelerator.is_main_process:
        folder = given or Path(tempfile.mkdtemp())
        if not (folder / "data").exists():
            (folder / "data").mkdir(parents=True)
            rows = np.random.default_rng(0).normal(size=(1000, 17)).astype(np.float32)
            np.save(folder / "data" / "rows.npy", rows)
        found = [str(folder)]
    return Path(broadcast_object_list(found)[0])


def train(accelerator: Accelerator, folder: Path, stop_after: int | None) -> None:
    dataset = penstock.open(folder / "data")
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = penstock.Loader(dataset, global_batch_size=GLOBAL_BATCH_SIZE, epochs=EPOCHS, seed=7)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(loader)
    if (folder / "checkpoint").exists():
        accelerator.load_state(folder / "checkpoint")
    log = folder / f"ids-{accelerator.process_index}.jsonl"
    for number, batch in enumerate(loader, 1):
        batch = batch.to(accelerator.device)  # noqa: PLW2901
        losses = (model(batch["data"][:, 1:]) - batch["data"][:, :1]).square().mean(1)
        accelerator.backward((losses * batch.mask).mean())
        optimizer.step()
        optimizer.zero_grad()
        with log.open("a") as file:
            file.write(json.dumps([batch.epoch, batch.step, batch.ids[batch.mask].tolist()]) + "\n")
        if number % 10 == 0:
            accelerator.save_state(folder / "checkpoint")
        if number == stop_after:
            return
    # Steps after the last checkpoint were done twice: the same both times.
    used = {tuple(map(str, json.loads(line))) for line in log.read_text().splitlines()}
    total = sum(len(json.loads(ids)) for _, _, ids in gather_object(list(used)))
    accelerator.print(f"{total} samples of {EPOCHS * len(dataset)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--stop-after", type=int)
    options = parser.parse_args()
    main = Accelerator(cpu=True)
    train(main, folder_for_all(main, options.folder), options.stop_after)
    main.wait_for_everyone()
    main.end_training()
