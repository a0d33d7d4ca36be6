"""torch.distributed.checkpoint and other packages save and load what is attached, as ever."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

KINDS = ("nesterov", "adamw")
FULL = StateDictOptions(full_state_dict=True)


def made(kind: str, how: str = "") -> tuple[nn.Module, Optimizer]:
    """Return a model and an optimizer, attached or not."""
    model = mlp()
    if how == "fully_shard":
        fully_shard(model[3])
        fully_shard(model)
    optimizer = OPTIMIZERS[kind](model.parameters())
    if how in ("attached", "resharded"):
        attach(model, optimizer, buckets=512, reshard=how == "resharded")
    return model, optimizer


def parts(state: Any) -> set[str]:
    """Return what has DTensors, by the first two names on the way there."""
    found = set()
    for name, each in state.items():
        if isinstance(each, DTensor):
            found.add(name)
        elif isinstance(each, dict):
            found |= {f"{name} {inner}" for inner in parts(each)}
    return found


def resume(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Load as torch's tutorials do."""
    theirs, others = get_state_dict(model, optimizer)
    dcp.load({"model": theirs, "optim": others}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=theirs, optim_state_dict=others)


def saving(rank: int, size: int, folder: Path) -> list[Any]:
    """Train, save in the middle with each kind, go on; return weights and what was saved."""
    ended = []
    for kind in KINDS:
        for how in ("attached", "resharded", "fully_shard"):
            model, optimizer = made(kind, how)
            train(model, optimizer, batches(3, rank, size))
            before = copy.deepcopy(optimizer.state_dict()) if how != "fully_shard" else None
            state, theirs = get_state_dict(model, optimizer)
            dcp.save(
                {"model": state, "optim": theirs},
                checkpoint_id=folder / f"{kind} {how}",
            )
            full = get_optimizer_state_dict(model, optimizer, options=FULL)
            train(model, optimizer, batches(2, rank, size, seed=2))
            assert how == "fully_shard" or len(optimizer.state) == 0
            ended.append((kind, how, whole(model), before, full, parts(state), parts(theirs)))
    return ended


def with_options(rank: int, size: int) -> list[torch.Tensor]:
    """Bring what one model has to another by way of each option that there is."""
    ended = []
    ways: list[tuple[dict[str, bool], dict[str, bool]]] = [
        ({"full_state_dict": True}, {"full_state_dict": True}),
        (
            {"full_state_dict": True, "cpu_offload": True},
            {"full_state_dict": True, "broadcast_from_rank0": True},
        ),
        ({"cpu_offload": True}, {}),
        ({"flatten_optimizer_state_dict": True}, {"flatten_optimizer_state_dict": True}),
    ]
    for how in ("attached", "resharded"):
        for saved, loaded in ways:
            first, second = made("adamw", how), made("adamw", how)
            train(*first, batches(3, rank, size))
            model, optimizer = get_state_dict(*first, options=StateDictOptions(**saved))
            assert bool(model) == (rank == 0 or len(saved) == 1)
            options = StateDictOptions(**loaded)
            set_model_state_dict(second[0], model, options=options)
            set_optimizer_state_dict(*second, optimizer, options=options)
            train(*second, batches(2, rank, size, seed=2))
            ended.append(whole(second[0]))
    rounded(rank, size)
    return ended


def rounded(rank: int, size: int) -> None:
    """Weights in slices that are sent rounded are saved as they are used, and as they are seen."""
    model = mlp(torch.float32)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    attached = attach(model, optimizer, buckets=512, reshard=True, wire="bf16")
    train(model, optimizer, batches(3, rank, size, dtype=torch.float32))
    found = get_model_state_dict(model, options=FULL)
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value), name
    with attached.whole(), torch.no_grad():
        model[0].weight.mul_(2)
        seen = get_model_state_dict(model, options=FULL)["0.weight"]
        assert torch.equal(seen, 2 * found["0.weight"])


def test_all_options_of_torch_bring_the_same_state() -> None:
    model, optimizer = made("adamw")
    train(model, optimizer, batches(3))
    train(model, optimizer, batches(2, seed=2))
    for found in run_ranks(with_options, 2):
        for ended in found:
            assert_same(ended, weights(model))


def whole(model: nn.Module) -> torch.Tensor:
    values = model.state_dict().values()
    flat = [v.full_tensor() if isinstance(v, DTensor) else v for v in values]
    return torch.cat([each.reshape(-1) for each in flat])


def loading(rank: int, size: int, folder: Path) -> list[torch.Tensor]:
    """Load each checkpoint into each kind of model, before its first step and after it."""
    ended = []
    for kind in KINDS:
        for saved in ("attached", "resharded", "fully_shard"):
            for how in ("attached", "resharded", "fully_shard"):
                if saved == how == "fully_shard":
                    continue
                model, optimizer = made(kind, how)
                if saved == "resharded":
                    train(model, optimizer, batches(2, rank, size, seed=7))
                resume(folder / f"{kind} {saved}", model, optimizer)
                train(model, optimizer, batches(2, rank, size, seed=2))
                ended.append(whole(model))
    return ended


def test_what_is_saved_on_two_ranks_is_loaded_on_three_and_on_one(tmp_path: Path) -> None:
    references = {}
    for kind in KINDS:
        model, optimizer = made(kind)
        train(model, optimizer, batches(3))
        state = copy.deepcopy(optimizer.state_dict()["state"])
        train(model, optimizer, batches(2, seed=2))
        references[kind] = (weights(model), state)
    for kind, how, ended, before, full, model_parts, optimizer_parts in run_ranks(
        saving, 2, tmp_path
    )[1]:
        expected, state = references[kind]
        assert_same(ended, expected)
        if how == "fully_shard":
            continue
        assert (how == "resharded") == bool(model_parts)
        values = [value for each in state.values() for value in each.values()]
        assert len(optimizer_parts) == sum(value.dim() > 0 for value in values)
        for number, mine in enumerate(full["state"].values()):
            for key, value in state[number].items():
                assert_same(mine[key], value)
                assert_same(before["state"][number][key], value)
    for kind in KINDS:
        for saved in ("attached", "resharded", "fully_shard"):
            model, optimizer = made(kind)
            resume(tmp_path / f"{kind} {saved}", model, optimizer)
            train(model, optimizer, batches(2, seed=2))
            assert_same(weights(model), references[kind][0])
    for found in run_ranks(loading, 3, tmp_path):
        for number, ended in enumerate(found):
            assert_same(ended, references[KINDS[number // 8]][0])


def tied() -> tuple[nn.Module, Optimizer]:
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11, False))
    model[3].weight = model[0].weight
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def stepped(model: nn.Module, optimizer: Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    model(torch.arange(11)).square().mean().backward()
    optimizer.step()
    return weights(model).clone()


@pytest.mark.parametrize("reshard", [False, True])
def test_safetensors_and_accelerate_save_and_load_what_is_attached(
    tmp_path: Path, reshard: bool
) -> None:
    accelerate = pytest.importorskip("accelerate")
    safetensors = pytest.importorskip("safetensors.torch")
    accelerator = accelerate.Accelerator(cpu=True)
    try:
        model, optimizer = accelerator.prepare(*tied())
        attached = attach(model, optimizer.optimizer, reshard=reshard)
        stepped(model, optimizer)
        safetensors.save_model(model, str(tmp_path / "attached"))
        accelerator.save_state(str(tmp_path / "state"))
        expected = stepped(model, optimizer)
        accelerator.load_state(str(tmp_path / "state"))
        assert_same(stepped(model, optimizer), expected)
        safetensors.load_model(model, str(tmp_path / "attached"))
        attached.close()
        safetensors.save_model(model, str(tmp_path / "closed"))
        accelerator.save_state(str(tmp_path / "closed state"))
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    for name in ("attached", "closed"):
        loaded, _ = tied()
        safetensors.load_model(loaded, str(tmp_path / name))
        assert_same(weights(loaded), weights(model))
        assert (tmp_path / name).stat().st_size < 2 * 4 * sum(
            p.numel() for p in loaded.parameters()
        )
