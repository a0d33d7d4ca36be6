"""Lightning with `attach` in the place of DDP: another strategy, the module stays.

    python examples/attach_lightning.py --devices 2
    python examples/attach_lightning.py --devices 2 --ddp     # the same losses

    python examples/attach_lightning.py --devices 2 --folder /tmp/pl --epochs 2
    python examples/attach_lightning.py --devices 3 --folder /tmp/pl --epochs 3

The last one goes on from the checkpoint of the one before it, on another number of ranks.
"""

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock.step as ps

GLOBAL_BATCH = 12


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        x, y = batch
        loss = (self.layers(x) - y).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        mean = self.trainer.callback_metrics["loss"]
        self.print(f"epoch {self.current_epoch}: loss {mean:.4f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(folder: Path | None, epochs: int, devices: int, ddp: bool) -> None:
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=devices,
        strategy="ddp" if ddp else ps.AttachStrategy(),
        max_epochs=epochs,
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        callbacks=[ModelCheckpoint(folder, "last", enable_version_counter=False)] if folder else [],
        enable_checkpointing=folder is not None,
        enable_progress_bar=False,
        logger=False,
    )
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(480, 16, generator=generator)
    data = DataLoader(TensorDataset(x, x.sin()), GLOBAL_BATCH // devices)
    last = None if folder is None else next(folder.glob("last.ckpt"), None)
    trainer.fit(Model(), data, ckpt_path=last)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--ddp", action="store_true")
    main(**vars(parser.parse_args()))
