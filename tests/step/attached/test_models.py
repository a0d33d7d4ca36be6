"""Models as they are: tied, frozen and unused parameters, many types and groups, attention."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from tests.step.attached.cases import (
    OPTIMIZERS,
    assert_same,
    attach,
    batches,
    mlp,
    train,
    weights,
)
from tests.step.ranks import run_ranks
from torch import distributed, nn


class Odd(nn.Module):
    """Tied and frozen weights, a layer that is used in every other step only, one that never is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Linear(7, 9)
        self.again = nn.Linear(9, 9)
        self.tied = nn.Linear(9, 9)
        self.tied.weight = self.again.weight
        self.frozen = nn.Linear(9, 9).requires_grad_(False)
        self.sometimes = nn.Linear(9, 9)
        self.never = nn.Linear(9, 9)
        self.wide = nn.Conv1d(1, 4, 3, padding=1).to(torch.float32)
        self.out = nn.Linear(9, 5)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(torch.tanh(self.again(torch.tanh(self.into(x)))))
        x = self.frozen(x)
        if self.count % 2:
            x = self.sometimes(x)
        self.count += 1
        x = x + self.wide(x.float()[:, None]).mean(1).to(x.dtype)
        # Another module's weights, which it is not called for.
        return torch.nn.functional.linear(x, self.out.weight) * self.scale


def odd() -> Odd:
    model = Odd().double()
    model.wide.float()
    return model


def groups_of(model: Odd) -> list[dict[str, Any]]:
    special = [model.scale, *model.wide.parameters()]
    others = [p for p in model.parameters() if not any(p is s for s in special)]
    return [{"params": others}, {"params": special, "lr": 0.002, "weight_decay": 0.3}]


def train_odd(rank: int, size: int, kind: str, is_attached: bool) -> list[torch.Tensor]:
    model = odd()
    optimizer = OPTIMIZERS[kind](groups_of(model))
    if is_attached:
        attach(model, optimizer, buckets=512)
    train(model, optimizer, batches(12, rank, size))
    state = optimizer.state_dict()["state"]
    steps = torch.tensor([float(state[number].get("step", 0)) for number in sorted(state)])
    return [weights(model), steps, torch.tensor(sorted(state), dtype=torch.float64)]


def train_odd_all(rank: int, size: int) -> list[list[torch.Tensor]]:
    return [train_odd(rank, size, kind, True) for kind in ("adam", "nesterov", "lamb")]


def test_odd_models_train_as_on_one_process() -> None:
    made = run_ranks(train_odd_all, 2)
    for rank in range(2):
        for kind, found in zip(("adam", "nesterov", "lamb"), made[rank], strict=True):
            values, steps, numbers = train_odd(0, 1, kind, False)
            assert_same(found[0], values, 2e-6)  # a part of it computes in float32
            assert torch.equal(found[1], steps)
            assert torch.equal(found[2], numbers)


def uneven(rank: int, size: int) -> torch.Tensor:
    """Train with a layer that only one rank uses."""
    model = odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, buckets=512)
    for x, y in batches(4, rank, size):
        model.count = rank
        train(model, optimizer, iter([(x, y)]))
    return weights(model)


def test_a_parameter_used_on_one_rank_counts_on_all() -> None:
    first, second = run_ranks(uneven, 2)
    assert torch.equal(first, second)
    model = odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(4):
        optimizer.zero_grad()
        for rank in range(2):
            model.count = rank
            part = x.chunk(2)[rank], y.chunk(2)[rank]
            ((model(part[0]) - part[1]).square().mean() / 2).backward()
        optimizer.step()
    assert_same(first, weights(model), 2e-6)


def transformer() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()


def train_attention(rank: int, size: int, is_attached: bool) -> list[torch.Tensor]:
    model = transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if is_attached:
        attach(model, optimizer, buckets=1024)
    seen = []
    for x, _ in batches(5, rank, size):
        part = x[:, None, :1].expand(-1, 3, 8)
        optimizer.zero_grad()
        model(part).square().mean().backward()
        optimizer.step()
        model.eval()  # there is another way through these layers for it
        with torch.no_grad():
            seen.append(model(torch.ones(1, 3, 8, dtype=torch.float64)))
        model.train()
    return [*seen, weights(model)]


def test_attention_waits_for_weights_that_it_uses_without_calling_their_module() -> None:
    expected = train_attention(0, 1, False)
    for found in run_ranks(train_attention, 2, True):
        for mine, theirs in zip(found, expected, strict=True):
            assert_same(mine, theirs)


def looked_at(rank: int, size: int) -> list[torch.Tensor]:
    """Return weights in the middle of training, seen in all ways there are."""
    model = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    attached = attach(model, optimizer, buckets=512, over="memory")
    train(model, optimizer, batches(5, rank, size))
    file = io.BytesIO()
    seen = [weights(model)]
    train(model, optimizer, batches(1, rank, size))
    attached.synchronize()
    copied = copy.deepcopy(model)
    torch.save(model, file)
    file.seek(0)
    seen += [weights(copied), weights(torch.load(file, weights_only=False))]
    copied(torch.zeros(2, 7, dtype=torch.float64)).sum().backward()  # has no hooks
    assert len(next(iter(model.parameters())).untyped_storage()) == 7 * 13 * 8
    assert len(copied[0].weight.untyped_storage()) == 7 * 13 * 8
    # What is loaded is trained from there.
    model.load_state_dict({name: 0 * value for name, value in model.state_dict().items()})
    train(model, optimizer, batches(1, rank, size))
    return [*seen, weights(model)]


def test_weights_can_be_looked_at_copied_saved_and_loaded_in_between() -> None:
    model = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    train(model, optimizer, batches(5))
    expected = [weights(model)]
    train(model, optimizer, batches(1))
    expected += [weights(model)] * 2
    model.load_state_dict({name: 0 * value for name, value in model.state_dict().items()})
    train(model, optimizer, batches(1))
    expected.append(weights(model))
    for found in run_ranks(looked_at, 2):
        for mine, theirs in zip(found, expected, strict=True):
            assert_same(mine, theirs)


def in_bf16(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    model = mlp(torch.float32)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    attached = attach(model, optimizer, dtype=torch.bfloat16, buckets=512)
    for x, y in batches(40, rank, size, dtype=torch.float32):
        optimizer.zero_grad()
        (model(x).float() - y).square().mean().backward()
        optimizer.step()
    kinds = {str(param.dtype) for param in model.parameters()}
    made = weights(model)
    whole = []
    for share in attached._shares:
        parts = [torch.empty_like(share.masters) for _ in range(size)]
        distributed.all_gather(parts, share.masters)
        whole.append(share.put_together(parts))
    flat = torch.cat([share.arena.data.double() for share in attached._shares])
    assert torch.equal(torch.cat(whole).bfloat16().double(), flat)
    states = optimizer.state_dict()["state"][0]
    return made, torch.cat(whole).double(), [*kinds, str(states["exp_avg"].dtype)]


def test_bf16_computes_in_half_and_keeps_float32_in_slices() -> None:
    first, second = run_ranks(in_bf16, 2)
    assert first[2] == ["torch.bfloat16", "torch.float32"]
    assert torch.equal(first[0], second[0])
    model = mlp(torch.float32)
    train(model, OPTIMIZERS["adam"](model.parameters()), batches(40, dtype=torch.float32))
    torch.testing.assert_close(first[0], weights(model), rtol=0.1, atol=0.1)


def by_channels(rank: int, size: int, is_attached: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 8, 3, padding=1).double().to(memory_format=torch.channels_last)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    if is_attached:
        attach(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        x = torch.randn(4, 3, 5, 5, generator=generator, dtype=torch.float64).chunk(size)[rank]
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    made = weights(model)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    return torch.cat([made, optimizer.state_dict()["state"][0]["exp_avg"].reshape(-1)])


def test_the_order_of_memory_stays() -> None:
    assert_same(run_ranks(by_channels, 2, True)[1], by_channels(0, 1, False))


def test_one_process_needs_no_group() -> None:
    model, other = mlp(), mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    with attach(model, optimizer) as attached:
        train(model, optimizer, batches(3))
        assert attached.sent_bytes == 0
    reference = OPTIMIZERS["adam"](other.parameters())
    train(other, reference, batches(3))
    assert_same(weights(model), weights(other))
    # What was attached goes on alone.
    train(model, optimizer, batches(2))
    train(other, reference, batches(2))
    assert_same(weights(model), weights(other))
    assert optimizer.state[model[0].weight]["step"] == 5


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_recomputing_in_backward_is_no_trouble(is_reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner[0](x)
            again = checkpoint(self.inner[1:4], x, use_reentrant=is_reentrant)
            return self.inner[4:](again)

    model, other = Again(), mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    attach(model, optimizer, buckets=512)
    train(model, optimizer, batches(3))
    train(other, OPTIMIZERS["adam"](other.parameters()), batches(3))
    assert_same(weights(model.inner), weights(other))
