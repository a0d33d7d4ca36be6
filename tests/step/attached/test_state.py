"""What an attached optimizer saves is torch's, and is loaded anywhere, on any number of ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.step.attached.cases import OPTIMIZERS, assert_same, attach, batches, mlp, train, weights
from tests.step.ranks import run_ranks

from penstock.errors import StateError

KINDS = ("nesterov", "adamw", "lamb")
Saved = tuple[dict[str, Any], dict[str, Any]]


def trained_on(rank: int, size: int, loaded: dict[str, Saved] | None) -> dict[str, Saved]:
    """Make five steps with each optimizer, from the beginning or from what was saved."""
    made, loaded = {}, copy.deepcopy(loaded)  # torch goes on using what it has loaded
    for kind in KINDS:
        model = mlp()
        optimizer = OPTIMIZERS[kind](model.parameters())
        seed = 1
        if loaded is not None and kind != "lamb":
            optimizer.load_state_dict(loaded[kind][1])  # as one who resumes and then attaches
        if size:
            attach(model, optimizer, buckets=1024)
        if loaded is not None:
            seed = 2
            model.load_state_dict(loaded[kind][0])
            optimizer.load_state_dict(loaded[kind][1])
        train(model, optimizer, batches(5, rank, max(1, size), seed=seed))
        made[kind] = (dict(model.state_dict()), optimizer.state_dict())
    return made


def assert_alike(found: dict[str, Saved], expected: dict[str, Saved]) -> None:
    for kind in KINDS:
        (model, optimizer), (their_model, their_optimizer) = found[kind], expected[kind]
        for name in their_model:
            assert_same(model[name], their_model[name])
        assert sorted(optimizer["state"]) == sorted(their_optimizer["state"])
        assert optimizer["param_groups"] == their_optimizer["param_groups"]
        for number, state in their_optimizer["state"].items():
            assert sorted(optimizer["state"][number]) == sorted(state)
            for name, value in state.items():
                assert optimizer["state"][number][name].shape == value.shape
                assert optimizer["state"][number][name].dtype == value.dtype
                assert_same(optimizer["state"][number][name], value)


def test_states_are_torchs_and_move_between_any_numbers_of_ranks() -> None:
    begun = trained_on(0, 0, None)
    ended = trained_on(0, 0, begun)
    two = run_ranks(trained_on, 2, None)
    for rank in range(2):
        assert_alike(two[rank], begun)
    assert_alike(trained_on(0, 0, two[0]), ended)
    assert_alike(run_ranks(trained_on, 3, two[1])[2], ended)
    assert_alike(run_ranks(trained_on, 2, begun)[0], ended)


def test_what_is_saved_is_not_larger_than_what_it_is_about() -> None:
    model = mlp()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    attach(model, optimizer)
    train(model, optimizer, batches(2))
    for state in optimizer.state_dict()["state"].values():
        assert len(state["exp_avg"].untyped_storage()) == 8 * state["exp_avg"].numel()
    assert not len(optimizer.state), "whole states are kept beside the slices"


def test_a_state_is_loaded_in_the_middle_as_well() -> None:
    model, other = mlp(), mlp()
    optimizer, reference = (OPTIMIZERS["adamw"](each.parameters()) for each in (model, other))
    attach(model, optimizer, buckets=512)
    train(model, optimizer, batches(3))
    train(other, reference, batches(3))
    saved = reference.state_dict()
    train(model, optimizer, batches(4, seed=5))
    model.load_state_dict(other.state_dict())
    optimizer.load_state_dict(saved)
    for each, of in ((model, optimizer), (other, reference)):
        train(each, of, batches(3, seed=3))
    assert_same(weights(model), weights(other))


def test_a_state_that_does_not_fit_is_refused() -> None:
    model = mlp()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    attach(model, optimizer)
    train(model, optimizer, batches(1))
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(StateError, match=r"'exp_avg' of parameter 0 has shape \(3,\).*\(13, 7\)"):
        optimizer.load_state_dict(saved)
