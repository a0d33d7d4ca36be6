"""Training loops as people write them: what they do around a step is what plain torch does."""

from __future__ import annotations

import copy
import pickle
import time
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
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.swa_utils import AveragedModel

from penstock.errors import OptionError, StateError


def buffered(rank: int) -> nn.Module:
    """Return a model whose buffers are drawn on each rank alone."""
    model = mlp()
    torch.manual_seed(rank)
    spectral_norm(model[3])
    model.register_buffer("turn", torch.full((2,), complex(rank, 1)), persistent=False)
    model.register_buffer("is_first", torch.tensor(rank == 0))
    model.register_buffer("places", torch.arange(3).expand(2, 3))
    return model


def with_buffers(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    model = buffered(rank)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    if size:
        attach(model, optimizer)
    train(model, optimizer, batches(4, rank, max(1, size)))
    return weights(model), model.turn, bool(model.is_first)  # type: ignore[arg-type]


def other_buffers(rank: int, size: int) -> str:
    model = mlp()
    model.register_buffer("cache", torch.zeros(2 + rank))
    with pytest.raises(OptionError) as caught:
        attach(model, OPTIMIZERS["adam"](model.parameters()))
    return str(caught.value)


def all_buffers(rank: int, size: int) -> Any:
    return with_buffers(rank, size), other_buffers(rank, size)


def test_ranks_begin_with_the_buffers_of_the_first() -> None:
    expected, turn, _ = with_buffers(0, 0)
    for rank, ((found, mine, is_first), said) in enumerate(run_ranks(all_buffers, 2)):
        assert_same(found, expected)
        assert torch.equal(mine, turn)
        assert is_first
        assert f"buffer 'cache': ({2 + rank},)" in said


def _by_hand(kept: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for mine, theirs in zip(kept.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.5)


def _averaged(kept: nn.Module, model: nn.Module) -> None:
    average = AveragedModel(kept)
    average.update_parameters(model)
    average.update_parameters(model)
    kept.load_state_dict(average.module.state_dict())


def _copied(kept: nn.Module, model: nn.Module) -> None:
    kept.load_state_dict(copy.deepcopy(model).state_dict())


def _part_copied(kept: nn.Module, model: nn.Module) -> None:
    kept[5].load_state_dict(copy.deepcopy(model[5]).state_dict())  # type: ignore[index]


def _pickled(kept: nn.Module, model: nn.Module) -> None:
    kept.load_state_dict(pickle.loads(pickle.dumps(model)).state_dict())


def _clamped(kept: nn.Module, model: nn.Module) -> None:
    for param in model.parameters():
        param.data.clamp_(-0.2, 0.2)


READERS = (_by_hand, _averaged, _copied, _part_copied, _pickled, _clamped)


def read(rank: int, size: int) -> torch.Tensor:
    """Read weights right after steps, when the other rank has not sent its own."""
    model, kept = mlp(), mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    if size:
        attached = attach(model, optimizer)
    found = []
    for number, (x, y) in enumerate(batches(7, rank, max(1, size))):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        if size and number == 1:  # the first step has planned
            updates: Any = attached._updates
            run = updates.run

            def late(*args: Any, run: Any = run) -> None:
                time.sleep(0.1 * rank)
                run(*args)

            updates.run = late
        optimizer.step()
        if number:
            READERS[number - 1](kept, model)
            found.append(weights(kept))
    return torch.stack([*found, weights(model)])


def test_who_reads_weights_after_a_step_has_those_of_all_ranks() -> None:
    expected = read(0, 0)
    for found in run_ranks(read, 2):
        assert_same(found, expected)


def test_copies_are_plain_and_so_is_the_model_again() -> None:
    model = mlp()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    attached = attach(model, OPTIMIZERS["adam"](model[:3].parameters()))
    other = attach(model, OPTIMIZERS["adam"](model[3:].parameters()))
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert {name: set(vars(module)) for name, module in each.named_modules()} == before
        assert len(list(each.parameters())) == len(list(model.parameters()))
    other.close()
    attached.close()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


class Asking(nn.Module):
    """Asks for the type of its parameters when it runs, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x.to(next(self.parameters()).dtype))


def test_forgetting_gradients_and_asking_for_types_wait_for_nothing() -> None:
    model = Asking()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    attached = attach(model, optimizer, buckets=512)
    train(model, optimizer, batches(1))
    flow: Any = attached._flow
    wait, waited = flow.wait, []

    def noted(buckets: Any) -> None:
        waited.append(buckets)
        wait(buckets)

    flow.wait = noted
    model.zero_grad()
    assert not waited
    model(next(batches(1))[0])
    assert waited
    assert not any(each is flow.buckets for each in waited)
    list(model.parameters())
    assert waited[-1] is flow.buckets


@pytest.mark.parametrize("change", ["reverse", "move", "remove"])
def test_groups_that_were_changed_are_refused(change: str) -> None:
    model = mlp()
    parts = [list(model[:3].parameters()), list(model[3:].parameters())]
    optimizer = torch.optim.Adam([{"params": part, "lr": 0.1**i} for i, part in enumerate(parts)])
    attached = attach(model, optimizer)
    train(model, optimizer, batches(2))
    groups = optimizer.param_groups
    if change == "reverse":
        groups.reverse()
    elif change == "move":
        groups[0]["params"].append(groups[1]["params"].pop())
    else:
        del groups[1]
    with pytest.raises(StateError, match="moved between groups of the optimizer, or taken out"):
        train(model, optimizer, batches(1))
    attached.close()
    model.zero_grad()
    model[3:].requires_grad_(change != "remove")
    with attach(model, optimizer):
        train(model, optimizer, batches(1))


def test_states_of_frozen_parameters_stay_and_copies_of_an_optimizer_are_refused() -> None:
    models = [mlp(), mlp()]
    saved = []
    for model in models:
        optimizer = OPTIMIZERS["adam"](model.parameters())
        train(model, optimizer, batches(2))
        model[0].requires_grad_(False)
        if model is models[0]:
            attached = attach(model, optimizer)
        train(model, optimizer, batches(2))
        saved.append(optimizer.state_dict()["state"])
        if model is models[0]:
            with pytest.raises(StateError, match=r"take optimizer.state_dict\(\)"):
                copy.deepcopy(optimizer)
            attached.close()
            assert len(copy.deepcopy(optimizer).state) == len(saved[0])
    assert saved[0].keys() == saved[1].keys()
    for number, state in saved[1].items():
        for name, value in state.items():
            assert_same(saved[0][number][name], value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_of_narrow_weights_is_torchs(dtype: torch.dtype, momentum: float) -> None:
    models = [mlp(dtype), mlp(dtype)]
    for model in models:
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=momentum, nesterov=momentum > 0
        )
        if model is models[0]:
            attach(model, optimizer)
        train(model, optimizer, batches(4, dtype=dtype))
    assert_same(weights(models[0]), weights(models[1]), 1e-2)
