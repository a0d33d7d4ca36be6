"""Corners of `attach`: weights that are changed by hand, uneven evaluations, second derivatives."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tests.step.attached.cases import OPTIMIZERS, assert_same, attach, batches, mlp, train, weights
from tests.step.ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import StateError
from penstock.step.comms.completion import OPERATIONS_MAX

WIDTH = 16
DATA = torch.float64
CHANGES: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("set", {}, False),
    ("data", {}, True),
    ("set", {}, True),
    ("data", {"wire": "bf16"}, False),
    ("in place", {"dtype": torch.bfloat16}, False),
    ("data", {"dtype": torch.bfloat16}, True),
)


def deep(count: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [each for _ in range(count) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers).to(DATA)


def inputs(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=DATA)


def looked_at(attached: Any, model: nn.Module) -> torch.Tensor:
    with attached.whole():
        return torch.cat([param.detach().reshape(-1).clone() for param in model.parameters()])


# -- weights that are changed by hand ------------------------------------------------------------


def halved(model: nn.Module, how: str) -> None:
    for param in model.parameters():
        if how == "in place":
            with torch.no_grad():
                param.mul_(0.5)
        elif how == "data":
            param.data.mul_(0.5)
        else:
            param.data = param.data * 0.5


def changed(rank: int, size: int) -> dict[str, float]:
    """Return by how much weights that were halved are not, after steps that go nowhere."""
    made = {}
    for how, options, reshard in CHANGES:
        model = mlp(torch.float32)
        before = weights(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        attached = attach(model, optimizer, reshard=reshard, buckets=512, **options)
        for number in range(3):
            if number == 1:
                with attached.whole():
                    halved(model, how)
            optimizer.zero_grad()
            model(torch.ones(2, 7)).float().square().mean().backward()
            optimizer.step()
        error = (looked_at(attached, model).double() - before / 2).abs().max()
        made[f"{how} {options} {reshard}"] = float(error)
        if how == "set":
            still_trains(attached, model, optimizer, reshard=reshard)
    masters_kept(rank, size)
    return made


def still_trains(attached: Any, model: nn.Module, optimizer: Any, *, reshard: bool) -> None:
    """Check that weights that were set to other memory are in slices again."""
    before = looked_at(attached, model)
    optimizer.param_groups[0]["lr"] = 0.1
    model(torch.ones(2, 7)).square().mean().backward()
    if reshard:
        with attached.whole(), pytest.raises(StateError, match="leave it first"):
            optimizer.step()
    optimizer.step()
    assert (looked_at(attached, model) - before).abs().max() > 1e-4


def masters_kept(rank: int, size: int) -> None:
    """A state loaded into one module leaves the exact weights of others, and frozen ones stay."""
    model = mlp(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    attached = attach(model, optimizer, wire="bf16", buckets=256)

    def steps() -> None:
        for x, y in batches(2, rank, size, dtype=torch.float32):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        attached.synchronize()

    def exact() -> list[torch.Tensor]:
        last = {len(attached._params) - 1, len(attached._params) - 2}
        shares = attached._updates._shares.items()  # type: ignore[union-attr]
        return [
            share.masters[bucket.share][start:stop].clone()  # type: ignore[index]
            for bucket, share in shares
            for number, start, stop in bucket.segments
            if number not in last
        ]

    steps()
    before = exact()
    model[-1].load_state_dict(model[-1].state_dict())
    assert all(map(torch.equal, exact(), before))
    model[0].requires_grad_(False)
    steps()
    mine = model[0].weight.detach().clone()
    theirs = mine.clone()
    torch.distributed.broadcast(theirs, 0)
    assert torch.equal(mine, theirs), "ranks have other weights where nothing was trained"


def test_weights_changed_by_hand_count_whatever_way_they_are_kept() -> None:
    for found in run_ranks(changed, 2):
        for name, error in found.items():
            assert error < (2e-3 if "bf" in name else 1e-7), name


# -- evaluations, gradients and graphs -----------------------------------------------------------


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def uneven(rank: int, size: int, is_attached: bool) -> torch.Tensor:
    """Train while ranks evaluate as often as they like, look at gradients, and save."""
    model = deep()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    attached: Any = attach(model, optimizer, buckets=1024, reshard=True) if is_attached else None
    ranks = (rank,) if is_attached else range(size)
    for number in range(5):
        optimizer.zero_grad()
        for each in ranks:
            begun = penalty(model, inputs(each, number))
            (model(inputs(each, number + 50)).square().mean() / len(ranks)).backward()
            (begun / len(ranks)).backward()  # after weights of its graph have gone
        if is_attached:
            loss = model(inputs(rank, 9)).mean()
            with attached.whole():
                torch.autograd.grad(loss, list(model.parameters()))
        optimizer.step()
        if is_attached:
            around_steps(rank, number, attached, model, optimizer)
    if is_attached:
        return looked_at(attached, model)
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def around_steps(rank: int, number: int, attached: Any, model: nn.Module, optimizer: Any) -> None:
    with torch.inference_mode():
        for _ in range(1 + 2 * rank):
            model(inputs(rank, 7))
    if number == 1:
        optimizer.state_dict()
    elif number == 2:
        saved = model.state_dict()
        attached.synchronize()
        torch.distributed.barrier()
        assert not any(value.is_inference() for value in saved.values())
    elif number == 3:
        attached.synchronize()
        torch.distributed.all_reduce(torch.zeros(1))
        if rank:
            model.state_dict()  # on one rank: the other joins in at its next step


class Dropping(nn.Module):
    """Layers that are left out at times, in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.skip: int | None = None

    def some(self, x: torch.Tensor, first: int) -> torch.Tensor:
        for number in range(first, first + 3):
            if number != self.skip:
                x = x + torch.tanh(self.layers[number](x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first in (0, 3):
            x = checkpoint(self.some, x, first, use_reentrant=False)
        return x


def dropped(rank: int, size: int, is_attached: bool) -> torch.Tensor:
    model = Dropping().to(DATA)
    empty = nn.Parameter(torch.zeros(0, 3, dtype=DATA))
    groups = [{"params": [empty]}, {"params": list(model.parameters())}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    attached: Any = None
    if is_attached:
        attached = attach(model, optimizer, buckets=2 * 8 * WIDTH * (WIDTH + 1), reshard=True)
    ranks = (rank,) if is_attached else range(size)
    for number, model.skip in enumerate((3, None, 0, None)):
        optimizer.zero_grad()
        if number == 2:
            for group in optimizer.param_groups:
                group["momentum"] = 0.9
        for part in range(2):  # a second gradient after the first was sent
            for each in ranks:
                loss = model(inputs(each, number + 10 * part)).square().mean()
                (loss / len(ranks)).backward()
        optimizer.step()
        with torch.no_grad():
            for _ in range(rank if is_attached else 0):
                model(inputs(rank, 1))
    if is_attached:
        return looked_at(attached, model)
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def all_of_them(rank: int, size: int) -> list[torch.Tensor]:
    return [uneven(rank, size, True), dropped(rank, size, True)]


def test_second_derivatives_looks_at_gradients_and_uneven_evaluations_change_nothing() -> None:
    expected = [uneven(0, 2, False), dropped(0, 2, False)]
    for found in run_ranks(all_of_them, 2):
        for mine, theirs in zip(found, expected, strict=True):
            assert_same(mine, theirs)


# -- what stays, and how much there may be -------------------------------------------------------


def kept_by_forwards(rank: int, size: int) -> int:
    """Return how many tensors forwards leave whose loss was thrown away."""
    model = deep()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    attach(model, optimizer, buckets=1024, reshard=True)

    def count() -> int:
        gc.collect()
        return sum(type(each) is torch.Tensor for each in gc.get_objects())

    for number in range(2):
        model(inputs(rank, number)).square().mean().backward()
        optimizer.step()
    model(inputs(rank, 3))
    before = count()
    for _ in range(20):
        model(inputs(rank, 3))
    return count() - before


def many_units(rank: int, size: int) -> list[torch.Tensor]:
    assert kept_by_forwards(rank, size) < 60  # one output of each layer would be 120
    made = []
    for over in ("sockets", "memory"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 520), nn.Linear(520, WIDTH)).to(DATA)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attached = attach(model, optimizer, buckets=64, over=over)
        for number in range(3):
            optimizer.zero_grad()
            model(inputs(0, number)).square().mean().backward()
            optimizer.step()
        assert len(attached._flow.buckets) > OPERATIONS_MAX  # type: ignore[union-attr]
        made.append(looked_at(attached, model))
    return made


def test_nothing_stays_of_a_forward_and_units_may_be_many() -> None:
    found = run_ranks(many_units, 2)
    assert torch.equal(found[0][0], found[0][1])
    assert torch.equal(found[0][0], found[1][0])


def test_a_dampened_momentum_that_comes_later_begins_as_in_torch() -> None:
    found = []
    for is_attached in (False, True):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, dampening=0.5)
        if is_attached:
            attach(model, optimizer)
        train(model, optimizer, batches(1))
        optimizer.param_groups[0]["momentum"] = 0.9
        train(model, optimizer, batches(3))
        found.append(weights(model))
    assert torch.equal(*found)
