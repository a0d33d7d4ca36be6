"""A loop with Accelerate on one rank, with DDP and with `attach`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from tests.step.trainers.work import Net, loader, weights
from tests.step.trainers.worlds import as_under_torchrun
from torch import nn
from torch.optim.lr_scheduler import StepLR

import penstock.step as ps
from penstock.errors import OptionError, StateError

KINDS = ("ddp", "attach")


def accelerator(kind: str, **options: Any) -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    # Each batch is divided among ranks, so schedulers are stepped alike on any number of them.
    split = DataLoaderConfiguration(split_batches=True)
    made = {"ddp": Accelerator, "attach": ps.AttachAccelerator}[kind]
    return made(cpu=True, dataloader_config=split, **options)


class Loop:
    """A model, what belongs to it, and two epochs of the usual loop."""

    def __init__(self, kind: str, clip: str) -> None:
        self.accelerator = accelerator(kind, gradient_accumulation_steps=2)
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        scheduler = StepLR(optimizer, 2, 0.9)
        # In an order of the user's own.
        self.optimizer, self.model, self.loader, self.evaluation, self.scheduler = (
            self.accelerator.prepare(optimizer, net, loader(1), loader(1, count=17), scheduler)
        )
        self.clip = clip
        self.losses: list[float] = []

    def train(self) -> None:
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = (self.model(batch["x"]) - batch["y"]).square().mean()
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self._clip()
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(self.accelerator.gather(loss.detach()).mean().item())

    def _clip(self) -> None:
        if self.clip == "norm":
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.losses.append(float(norm))
        elif self.clip == "value":
            self.accelerator.clip_grad_value_(self.model.parameters(), 0.02)

    @torch.no_grad()
    def evaluate(self) -> None:
        self.model.eval()
        for batch in self.evaluation:
            errors = (self.model(batch["x"]) - batch["y"]).square().mean(1)
            self.losses += self.accelerator.gather_for_metrics(errors).tolist()
        self.model.train()


def trained_both_ways(rank: int, size: int, folder: Path, clip: str) -> list[Any]:
    as_under_torchrun(rank, size)
    said = []
    for kind in KINDS:
        loop = Loop(kind, clip)
        loop.train()
        loop.accelerator.save_state(folder / kind)
        loop.evaluate()
        loop.train()
        net = loop.accelerator.unwrap_model(loop.model)
        loop.accelerator.save_model(loop.model, folder / f"{kind}-last")
        loop.accelerator.free_memory()
        if rank == 0:
            torch.save([net.state_dict(), loop.optimizer.state_dict()], folder / f"{kind}.pt")
        said.append((loop.losses, weights(net)))
    return said


def resumed(rank: int, size: int, folder: Path) -> torch.Tensor:
    """Make the second epoch from the state after the first one."""
    as_under_torchrun(rank, size)
    loop = Loop("attach", "norm")
    loop.accelerator.load_state(folder / "attach")
    loop.train()
    return weights(loop.model)


def adversaries(rank: int, size: int) -> list[torch.Tensor]:
    """Train two models against each other, each with an optimizer of its own."""
    as_under_torchrun(rank, size)
    said = []
    for kind in KINDS:
        accelerated = accelerator(kind)
        torch.manual_seed(0)
        maker, judge = nn.Linear(7, 5).double(), nn.Linear(5, 1).double()
        optimizers = [torch.optim.Adam(each.parameters(), lr=0.05) for each in (maker, judge)]
        maker, judge, first, second, data = accelerated.prepare(
            maker, judge, *optimizers, loader(1)
        )
        for batch in data:
            second.zero_grad()
            accelerated.backward((judge(batch["y"]) - judge(maker(batch["x"]).detach())).mean())
            accelerated.clip_grad_norm_(judge.parameters(), 0.3)
            second.step()
            first.zero_grad()
            accelerated.backward(judge(maker(batch["x"])).mean())
            accelerated.clip_grad_norm_(maker.parameters(), 0.3)
            first.step()
        said.append(torch.cat([weights(maker), weights(judge)]))
        accelerated.free_memory()
    return said


def mistakes(rank: int, size: int) -> None:
    as_under_torchrun(rank, size)
    _refused(OptionError, "in 0 prepared models", lambda made, net, other: made.prepare(other))

    def idle(made: Any, net: Any, optimizer: Any) -> None:
        made.prepare(net, Net(), optimizer)
        made.backward(net(torch.zeros(1, 7).double()).sum())

    _refused(StateError, "1 of 2 models are prepared without", idle)

    def in_part(made: Any, net: Any, optimizer: Any) -> None:
        made.prepare(net, optimizer)
        made.clip_grad_norm_(net.layers.parameters(), 1.0)

    _refused(OptionError, "clip 4 parameters, of which .* 4 of 5", in_part)


def _refused(kind: type[Exception], words: str, call: Callable[..., Any]) -> None:
    made, net = accelerator("attach"), Net()
    optimizer = torch.optim.Adam(net.parameters())
    with pytest.raises(kind, match=words):
        call(made, net, optimizer)
    made.free_memory()
