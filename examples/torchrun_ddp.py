"""Distributed data parallel with torchrun: stop it anywhere, start it again, and it goes on.

    torchrun --nproc-per-node 2 examples/torchrun_ddp.py
    torchrun --nproc-per-node 2 examples/torchrun_ddp.py --folder /tmp/ddp --stop-after 25
    torchrun --nproc-per-node 4 examples/torchrun_ddp.py --folder /tmp/ddp

It prints a hash of all samples in order: the same on any number of ranks, with or without a stop.
"""

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import penstock
from penstock.order import StreamHash

EPOCHS, GLOBAL_BATCH_SIZE = 3, 64


def folder_for_all(given: Path | None) -> Path:
    """The first rank makes the data, the others hear where it is."""
    found = [None]
    if distributed.get_rank() == 0:
        folder = given or Path(tempfile.mkdtemp())
        if not (folder / "data").exists():
            (folder / "data").mkdir(parents=True)
            rows = np.random.default_rng(0).normal(size=(1000, 17)).astype(np.float32)
            np.save(folder / "data" / "rows.npy", rows)
        found = [folder]
    distributed.broadcast_object_list(found)
    return found[0]


def train(folder: Path, stop_after: int | None) -> str:
    dataset = penstock.open(folder / "data")
    model = DistributedDataParallel(nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = penstock.Loader(dataset, global_batch_size=GLOBAL_BATCH_SIZE, epochs=EPOCHS, seed=7)
    seen, checkpoint = StreamHash(), folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        loader.load_state_dict(saved["loader"])
        seen = StreamHash(**saved["seen"])
    with loader:
        for number, batch in enumerate(loader, 1):
            losses = (model(batch["data"][:, 1:]) - batch["data"][:, :1]).square().mean(1)
            optimizer.zero_grad()
            (losses * batch.mask).mean().backward()
            optimizer.step()
            parts = [None] * distributed.get_world_size()
            distributed.all_gather_object(parts, (batch.ids, batch.mask))
            ids, mask = (torch.cat(part).numpy() for part in zip(*parts, strict=True))
            positions = batch.step * GLOBAL_BATCH_SIZE + np.arange(GLOBAL_BATCH_SIZE)
            seen = seen.update(batch.epoch, positions, ids, mask)
            if number % 10 == 0 and distributed.get_rank() == 0:
                state = {"model": model.state_dict(), "loader": loader.state_dict()}
                torch.save({**state, "seen": asdict(seen)}, checkpoint)
            if number == stop_after:
                return "stopped"
    return f"{seen.num_samples} samples, {seen.hexdigest()}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--stop-after", type=int)
    options = parser.parse_args()
    distributed.init_process_group("gloo")
    result = train(folder_for_all(options.folder), options.stop_after)
    if distributed.get_rank() == 0:
        print(result, flush=True)
    distributed.barrier()
    distributed.destroy_process_group()
