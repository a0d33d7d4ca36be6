"""What the trainers train in tests: a small model in float64, on the same samples at any size."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

GLOBAL_BATCH = 6
STEPS = 8
"""Of the optimizer, in two epochs; each is made of two batches."""
NUM_SAMPLES = STEPS * GLOBAL_BATCH


class Net(nn.Module):
    """Layers, and a parameter that no layer owns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))
        self.scale = nn.Parameter(torch.ones(5))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(x) * self.scale
        return made


class HeadedNet(Net):
    """As the Hugging Face Trainer calls models."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
        return {"loss": (super().forward(x) - y).square().mean()}


def samples(count: int = NUM_SAMPLES) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 7, generator=generator, dtype=torch.float64)
    y = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    return [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]


def loader(size: int, *, count: int = NUM_SAMPLES) -> Any:
    """Return a DataLoader of a rank's batches, before a trainer has divided it among ranks."""
    return torch.utils.data.DataLoader(samples(count), batch_size=GLOBAL_BATCH // size)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([w.detach().double().reshape(-1) for w in model.state_dict().values()])
