"""A network small enough for two slow cores, and the few lines that train it on some ranks.

Four convolutions and a linear layer, about a hundred thousand
parameters. Ranks average their gradients with one all-reduce a step; nothing here is special, so
that what the loader does is plain to see.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional

from penstock.world import World

_CHANNELS = (16, 32, 64, 128)
_WARM_UP = 0.15
"""Share of all steps in which the rate rises; it falls in the rest."""
_JOIN_TIMEOUT = datetime.timedelta(seconds=60)


class TinyNet(nn.Module):
    """Images of any size, eight-bit RGB with channels last, to scores of classes."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for channels in _CHANNELS:
            k = 5 if before == 3 else 3
            layers += [
                nn.Conv2d(before, channels, k, stride=2, padding=k // 2, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(inplace=True),
            ]
            before = channels
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(before, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores; the bytes of the images become numbers around zero here."""
        x = images.permute(0, 3, 1, 2).float().sub_(128).div_(64)
        scores: torch.Tensor = self.head(self.layers(x).amax(dim=(2, 3)))
        return scores


class TinyTrainer:
    """A model, its optimizer and its schedule; a step is a few lines of plain torch."""

    def __init__(self, *, num_classes: int, num_steps: int, rate: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = TinyNet(num_classes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=rate, total_steps=num_steps, pct_start=_WARM_UP
        )

    @property
    def num_parameters(self) -> int:
        """Numbers to learn."""
        return sum(p.numel() for p in self.model.parameters())

    def step(self, images: Any, classes: Any, mask: Any) -> tuple[float, int]:
        """Train on one batch; return its mean loss and how many classes were right.

        Samples that only fill up the batch have a mask of False and do not count.
        """
        self.model.train()
        scores = self.model(images)
        losses = functional.cross_entropy(scores, classes, reduction="none") * mask
        loss = losses.sum() / mask.sum().clamp(min=1)
        self.optimizer.zero_grad()
        loss.backward()
        self._average_gradients()
        self.optimizer.step()
        self.schedule.step()
        return float(loss.detach()), int(((scores.argmax(1) == classes) & mask).sum())

    def _average_gradients(self) -> None:
        if not distributed.is_initialized():
            return
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        distributed.all_reduce(flat)
        flat /= distributed.get_world_size()
        start = 0
        for g in gradients:
            g.copy_(flat[start : start + g.numel()].view_as(g))
            start += g.numel()

    @torch.no_grad()
    def accuracy(self, batches: Iterable[tuple[Any, Any, Any]]) -> float:
        """Return the share of samples whose class is found; batches as `step` takes them."""
        self.model.eval()
        right = total = 0
        for images, classes, mask in batches:
            found = self.model(images).argmax(1)
            right += int(((found == classes) & mask).sum())
            total += int(mask.sum())
        return right / max(1, total)

    def save(self, path: Path, **more: Any) -> None:
        """Write a checkpoint: at any instant the file holds the old one or the new one."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            **more,
        }
        temporary = path.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(path)

    def load(self, path: Path) -> dict[str, Any]:
        """Go on from a checkpoint; return all of it, with what else was saved there."""
        state: dict[str, Any] = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        return state


def join(world: World, meeting_point: Path) -> None:
    """Meet the other ranks of this machine at a file; no port has to be free."""
    # On a machine that others use too, threads that wait for each other are slower than one alone.
    torch.set_num_threads(1)
    if world.num_ranks == 1:
        return
    if "lo" in (name for _, name in socket.if_nameindex()):
        # Names of machines often resolve to nothing at home or in a container.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo",
        init_method=meeting_point.as_uri(),
        rank=world.rank,
        world_size=world.num_ranks,
        timeout=_JOIN_TIMEOUT,
    )


def leave() -> None:
    """Part from the other ranks."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
