"""Lightning: a loader is a train_dataloader like any other, and its place is in the checkpoint.

    python examples/lightning_trainer.py --devices 2
    python examples/lightning_trainer.py --devices 2 --folder /tmp/pl --stop-after 25
    python examples/lightning_trainer.py --devices 2 --folder /tmp/pl

Make the loader in `train_dataloader`, where the process group is there already. Leave `epochs` at
1: one epoch of the loader is one epoch of the trainer. For a schedule take `len(loader)` rather
than `trainer.estimated_stepping_batches`: read before a checkpoint is restored, it makes Lightning
forget the loader's place.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

import penstock

EPOCHS, GLOBAL_BATCH_SIZE = 3, 64


class Model(lightning.LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.layer = nn.Linear(16, 1)

    def train_dataloader(self) -> penstock.Loader:
        dataset = penstock.open(self.folder / "data")
        return penstock.Loader(dataset, global_batch_size=GLOBAL_BATCH_SIZE, seed=7)

    def training_step(self, batch: penstock.Batch, number: int) -> torch.Tensor:
        with (self.folder / f"ids-{self.global_rank}.jsonl").open("a") as file:
            used = [batch.epoch, batch.step, batch.ids[batch.mask].tolist()]
            file.write(json.dumps(used) + "\n")
        losses = (self.layer(batch["data"][:, 1:]) - batch["data"][:, :1]).square().mean(1)
        return (losses * batch.mask).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main(folder: Path, devices: int, stop_after: int) -> None:
    if not (folder / "data").exists():
        (folder / "data").mkdir(parents=True)
        rows = np.random.default_rng(0).normal(size=(1000, 17)).astype(np.float32)
        np.save(folder / "data" / "rows.npy", rows)
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=10, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=EPOCHS,
        max_steps=stop_after,
        use_distributed_sampler=False,
        callbacks=[keep],
        logger=False,
    )
    trainer.fit(Model(folder), ckpt_path=max(folder.glob("*.ckpt"), default=None))
    if trainer.is_global_zero and stop_after < 0:
        lines = {line for log in folder.glob("ids-*") for line in log.read_text().splitlines()}
        print(sum(len(json.loads(line)[2]) for line in lines), "samples of", EPOCHS * 1000)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    # Lightning starts this program once more for each device: they have to agree on the folder.
    made = os.environ.setdefault("EXAMPLE_FOLDER", tempfile.mkdtemp())
    parser.add_argument("--folder", type=Path, default=Path(made))
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--stop-after", type=int, default=-1)
    main(**vars(parser.parse_args()))
