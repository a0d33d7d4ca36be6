"""Jobs, models and optimizers that do not fit together are refused, and those that do are not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.step.attached.cases import OPTIMIZERS, assert_same, attach, batches, mlp, train, weights
from tests.step.ranks import run_ranks
from torch import nn

from penstock.errors import OptionError, StateError
from penstock.step.program.mesh import mesh


def test_a_job_without_a_process_group_is_refused_unless_one_rank_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    with pytest.raises(OptionError, match=r"init_process_group\(\) before attach, or pass mesh="):
        attach(model, optimizer)
    with attach(model, optimizer, mesh(dp=1)):
        train(model, optimizer, batches(1))
    monkeypatch.setenv("WORLD_SIZE", "1")
    attach(model, optimizer).close()


def wrapped(rank: int, size: int) -> list[str]:
    """Return what is said of models that others have wrapped or cut."""
    from torch.distributed import fsdp, init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    def sharded() -> nn.Module:
        model = mlp()
        fsdp.fully_shard(model)
        return model

    along = init_device_mesh("cpu", (size,))
    made: list[nn.Module] = [
        nn.parallel.DistributedDataParallel(mlp()),
        nn.Sequential(nn.Linear(7, 7), nn.parallel.DistributedDataParallel(mlp())),
        fsdp.FullyShardedDataParallel(mlp(), device_id=torch.device("cpu")),
        sharded(),
        parallelize_module(mlp(), along, {"0": ColwiseParallel()}),
    ]
    said = []
    for model in made:
        with pytest.raises(OptionError) as caught:
            attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        said.append(str(caught.value))
    return said


def test_models_that_others_have_wrapped_or_cut_are_refused() -> None:
    for said in run_ranks(wrapped, 2):
        assert said[0].startswith("the model is a DistributedDataParallel")
        assert said[1].startswith("module '1' is a DistributedDataParallel")
        assert said[2].startswith("the model is a FullyShardedDataParallel")
        for text in said[3:]:
            assert text.startswith("parameter '0.weight' is a DTensor")
            assert "reshard=True" in text


def test_an_optimizer_of_another_model_and_a_second_attach_are_refused() -> None:
    model = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    with pytest.raises(OptionError, match=r"no parameter of the Adam is one of the model's"):
        attach(mlp(), optimizer)
    attached = attach(model, optimizer)
    with pytest.raises(StateError, match=r"attached already; close\(\)"):
        attach(model, optimizer)
    other = OPTIMIZERS["sgd"](model.parameters())
    with pytest.raises(StateError, match=r"attached already; close\(\)"):
        attach(model, other)
    attached.close()
    attach(model, other).close()


def in_parts(rank: int, size: int, kind: str) -> tuple[torch.Tensor, list[str]]:
    """Train a model in parts, plainly (`size` 0) or attached; return weights and warnings."""
    model, scale = mlp(), nn.Parameter(torch.ones(5, dtype=torch.float64))
    first, rest = list(model[0].parameters()), [p for m in model[1:] for p in m.parameters()]
    if kind == "frozen":
        model[0].requires_grad_(False)
    optimizers = [OPTIMIZERS["adam"]([*rest, scale])]
    if kind == "two":
        optimizers.append(OPTIMIZERS["nesterov"](first))
    made = [attach(model, each) for each in optimizers] if size else []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in batches(4, rank, max(1, size)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (model(x) * scale - y).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    for attached in made:
        attached.synchronize()
    found = torch.cat([weights(model), scale.detach()])
    return found, [str(each.message) for each in caught if each.category is UserWarning]


def all_parts(rank: int, size: int) -> dict[str, Any]:
    return {kind: in_parts(rank, size, kind) for kind in ("frozen", "two", "left")}


def test_parts_of_a_model_may_be_trained_and_what_nobody_reduces_is_warned_of() -> None:
    for found in run_ranks(all_parts, 2):
        for kind, (values, said) in found.items():
            assert_same(values, in_parts(0, 0, kind)[0])
            assert len(said) == (kind == "left"), said
        assert "'0.weight', '0.bias' have gradients" in found["left"][1][0]
