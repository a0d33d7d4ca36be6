"""Models, batches and loops for tests of `attach`: on ranks, and on one process to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from penstock.step.attached.attach import Attached
from penstock.step.attached.optimizers import LAMB
from penstock.step.groups import Groups
from penstock.step.program.mesh import Mesh, mesh

BATCH = 12
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "lamb": lambda p: LAMB(p, lr=0.01),
}


OPTIONS = {"clip": None, "wire": None, "dtype": None, "buckets": "auto", "reshard": False}


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    ranks: Mesh | Groups | None = None,
    *,
    over: str = "sockets",
    **options: Any,
) -> Attached:
    """Attach over sockets, as ranks of several hosts do, or over "memory".

    One rank goes the way of several here, where `ps.attach` leaves it to the optimizer.
    """
    if over == "sockets" and distributed.is_initialized():
        ranks = Groups(mesh(dp=distributed.get_world_size()))
    return attach_as_many(model, optimizer, ranks, **options)


def attach_as_many(
    model: nn.Module, optimizer: Optimizer, ranks: Mesh | Groups | None = None, **options: Any
) -> Attached:
    """Attach with all that several ranks need, whatever their number."""
    attached = Attached(model, optimizer, ranks, **OPTIONS | options)
    attached._open()
    return attached


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(7, 13), nn.Tanh(), nn.LayerNorm(13), nn.Linear(13, 33), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(33, 5)).to(dtype)


def batches(
    count: int, rank: int = 0, size: int = 1, *, dtype: torch.dtype = torch.float64, seed: int = 1
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield a rank's part of batches that are the same for any number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(BATCH, 7, generator=generator, dtype=torch.float64)
        y = torch.randn(BATCH, 5, generator=generator, dtype=torch.float64)
        yield x.chunk(size)[rank].to(dtype), y.chunk(size)[rank].to(dtype)


def train(
    model: nn.Module,
    optimizer: Optimizer,
    data: Iterator[tuple[torch.Tensor, torch.Tensor]],
    after: Callable[[], object] | None = None,
) -> None:
    """The loop that users have."""
    for x, y in data:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        if after is not None:
            after()
        optimizer.step()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([w.detach().double().reshape(-1) for w in model.state_dict().values()])


def trained(rank: int, size: int, kind: str, steps: int, **options: Any) -> torch.Tensor:
    """Return the weights after some attached steps."""
    model = mlp()
    optimizer = OPTIMIZERS[kind](model.parameters())
    attach(model, optimizer, **options)
    train(model, optimizer, batches(steps, rank, size))
    return weights(model)


@cache
def plain(kind: str, steps: int, clip: float | None = None) -> torch.Tensor:
    """Return what one process makes of the same batches; callers share it and only compare."""
    model = mlp()
    optimizer = OPTIMIZERS[kind](model.parameters())

    def clipped() -> None:
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)

    train(model, optimizer, batches(steps), clipped)
    return weights(model)


def assert_same(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
