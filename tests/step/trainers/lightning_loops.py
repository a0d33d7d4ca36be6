"""Lightning's Trainer on one rank, with DDP and with `attach`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from tests.step.trainers.work import STEPS, Net, loader, weights
from tests.step.trainers.worlds import as_under_torchrun
from torch import nn
from torch.optim.lr_scheduler import StepLR

import penstock.step as ps

KINDS = ("ddp", "attach")


class Regression(lightning.LightningModule):
    """A net that is called as a module, and a parameter that is used in the steps themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.own = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.losses: list[float] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = (self.net(batch["x"]) * self.own - batch["y"]).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        loss = (self.own * self.net(batch["x"]) - batch["y"]).square().mean()
        self.losses.append(loss.item())
        self.log("error", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = {"scheduler": StepLR(optimizer, 2, 0.9), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Adversaries(lightning.LightningModule):
    """Two models, two optimizers, and steps made by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.maker, self.judge = nn.Linear(7, 5).double(), nn.Linear(5, 1).double()

    def training_step(self, batch: Any, number: int) -> None:
        first, second = self.optimizers()
        with second.toggle_model():
            made = self.maker(batch["x"]).detach()
            self._step(second, (self.judge(batch["y"]) - self.judge(made)).mean())
        with first.toggle_model():
            self._step(first, self.judge(self.maker(batch["x"])).mean())

    def _step(self, optimizer: Any, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.3, "norm")
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(each.parameters(), lr=0.05) for each in (self.maker, self.judge)]


def trainer(kind: str, folder: Path, size: int, **options: Any) -> Any:
    keep = ModelCheckpoint(
        folder / kind, filename="{step}", save_top_k=-1, save_on_train_epoch_end=True
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(
        accelerator="cpu",
        devices=size,
        strategy={"ddp": DDPStrategy, "attach": ps.AttachStrategy}[kind](
            find_unused_parameters=True  # by models that are trained in turns
        ),
        max_epochs=2,
        callbacks=[keep],
        **quiet,
        **options,
    )


def trained_both_ways(
    rank: int, size: int, folder: Path, algorithm: str, precision: str
) -> list[Any]:
    as_under_torchrun(rank, size)
    most = {"norm": 0.5, "value": 0.02}[algorithm]
    said = []
    for kind in KINDS:
        model = Regression()
        options = {"gradient_clip_val": most, "gradient_clip_algorithm": algorithm}
        options["precision"] = precision
        made = trainer(
            kind, folder, size, accumulate_grad_batches=2, val_check_interval=6, **options
        )
        made.fit(model, loader(size), loader(size, count=18))
        made.save_checkpoint(folder / kind / "last.ckpt")
        if rank == 0:
            torch.save([model.state_dict(), made.optimizers[0].state_dict()], folder / f"{kind}.pt")
        error = made.validate(model, loader(size, count=18), verbose=False)[0]["error"]
        said.append((model.losses, error, weights(model)))
    return said


class Failing(Regression):
    is_failing = True

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        if self.is_failing and number == 3:
            raise ZeroDivisionError
        return super().training_step(batch, number)


def fitted_after_an_error(rank: int, size: int, folder: Path) -> int:
    """Go on with a trainer whose fit has ended in an error; return the steps that it has made."""
    as_under_torchrun(rank, size)
    model, made = Failing(), trainer("attach", folder, size)
    with pytest.raises(ZeroDivisionError):
        made.fit(model, loader(size))
    model.is_failing = False
    made.fit(model, loader(size))
    return int(made.global_step)


def resumed(rank: int, size: int, folder: Path) -> torch.Tensor:
    """Go on from the checkpoint in the middle."""
    as_under_torchrun(rank, size)
    model = Regression()
    made = trainer(
        "attach", folder / "again", size, gradient_clip_val=0.5, accumulate_grad_batches=2
    )
    made.fit(model, loader(size), ckpt_path=folder / "attach" / f"step={STEPS // 2}.ckpt")
    return weights(model)


def adversaries(rank: int, size: int, folder: Path) -> list[torch.Tensor]:
    as_under_torchrun(rank, size)
    said = []
    for kind in KINDS:
        model = Adversaries()
        trainer(kind, folder, size).fit(model, loader(size))
        said.append(weights(model))
    return said
