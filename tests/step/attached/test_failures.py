"""What goes wrong around an attached model: errors in backward, changed gradients, lost ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch
from tests.step.attached.cases import (
    OPTIMIZERS,
    assert_same,
    attach,
    batches,
    mlp,
    plain,
    train,
    weights,
)
from tests.step.ranks import run_ranks
from torch import distributed, nn

from penstock.errors import OptionError, PeerError, StateError
from penstock.step.groups import Groups
from penstock.step.program.mesh import mesh


class Trap(torch.autograd.Function):
    """Raises in backward while it is set."""

    is_set = False

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        if Trap.is_set:
            raise ValueError("as if the memory were full")
        return grad


class Trapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner[3:](Trap.apply(self.inner[:3](x)))


def through_errors(rank: int, size: int, who: tuple[int, ...]) -> torch.Tensor:
    """Train while backward fails in each third step, on some ranks, and is done again."""
    model = Trapped()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    attach(model, optimizer, buckets=512)
    for number, (x, y) in enumerate(batches(7, rank, size)):
        if number % 3 == 1 and rank in who:
            Trap.is_set = True
            with pytest.raises(ValueError, match="memory"):
                (model(x + 1) - y).square().mean().backward()
            Trap.is_set = False
        train(model, optimizer, iter([(x, y)]))
    return weights(model)


@pytest.mark.parametrize("who", [(0, 1), (1,)])
def test_an_error_in_backward_leaves_all_as_it_was(who: tuple[int, ...]) -> None:
    expected = plain("adam", 7)
    for found in run_ranks(through_errors, 2, who):
        assert_same(found, expected)


def skipped(rank: int, size: int) -> torch.Tensor:
    """Throw gradients away in between, in all ways there are."""
    model = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    attach(model, optimizer, buckets=512)
    for number, (x, y) in enumerate(batches(6, rank, size)):
        (model(x * 2) - y).square().mean().backward()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        if number == 4:
            optimizer.zero_grad()
            optimizer.step()  # with nothing
        loss = (model(x) - y).square().mean()
        (loss / 2).backward(retain_graph=True)
        (loss / 2).backward()
        optimizer.step()
    return weights(model)


def test_gradients_may_be_thrown_away_and_added_twice() -> None:
    expected = plain("adam", 6)
    for found in run_ranks(skipped, 2):
        assert_same(found, expected)


def in_disorder(rank: int, size: int) -> torch.Tensor:
    """Train while ranks come late, each at other places."""
    generator = torch.Generator().manual_seed(rank)

    def late(*_: object) -> None:
        if float(torch.rand((), generator=generator)) < 0.2:
            time.sleep(0.01 * float(torch.rand((), generator=generator)))

    model = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    for module in model.modules():
        module.register_forward_hook(late)
        module.register_full_backward_hook(late)
    attach(model, optimizer, buckets=512)
    train(model, optimizer, batches(20, rank, size), late)
    return weights(model)


def test_ranks_may_be_early_or_late_anywhere() -> None:
    for found in run_ranks(in_disorder, 3):
        assert_same(found, plain("adam", 20))


def test_parameters_that_came_later_are_refused() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    attach(model, optimizer)
    train(model, optimizer, batches(1))
    model[0].requires_grad_(True)
    with pytest.raises(StateError, match="was not attached"):
        train(model, optimizer, batches(1))


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(OptionError, match="sparse gradient"):
        optimizer.step()


def test_options_that_make_no_sense_are_refused() -> None:
    model = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    with pytest.raises(OptionError, match="clip must be a norm above 0, got 0"):
        attach(model, optimizer, clip=0)
    with pytest.raises(OptionError, match="no wire 'int3'"):
        attach(model, optimizer, wire="int3")
    with pytest.raises(OptionError, match="dtype"):
        attach(model, optimizer, dtype=torch.float64)
    with pytest.raises(OptionError, match="which axis"):
        attach(model, optimizer, mesh(a=1, b=1))
    with pytest.raises(OptionError, match="2 ranks"):
        attach(model, optimizer, mesh(dp=2))
    for param in model.parameters():
        param.requires_grad_(False)
    with pytest.raises(OptionError, match="nothing to attach"):
        attach(model, optimizer)


def other_models(rank: int, size: int) -> str:
    model = nn.Linear(3, 4 + rank)
    with pytest.raises(OptionError) as caught:
        attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return str(caught.value)


def test_ranks_with_different_models_are_told_so() -> None:
    first, second = run_ranks(other_models, 2)
    assert "parameter 0: (4, 3) torch.float32 in group 0" in first
    assert "parameter 0: (5, 3) torch.float32 in group 0" in second


def left_alone(rank: int, size: int, over: str) -> str:
    model = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    attach(model, optimizer, buckets=512, over=over)
    train(model, optimizer, batches(3, rank, size))
    if rank == 1:
        model.state_dict()
        os._exit(3)
    with pytest.raises(PeerError) as caught:
        train(model, optimizer, batches(3, rank, size))
    return str(caught.value)


@pytest.mark.parametrize("over", ["sockets", "memory"])
def test_a_lost_rank_is_an_error_and_not_silence(over: str) -> None:
    said = run_ranks(left_alone, 2, over, dies={1}, group_timeout_s=5.0)[0]
    assert "rank 1" in said


def away(rank: int, size: int) -> list[str]:
    """Wait on several lanes at once for a rank that lives and does not come."""
    with (
        Groups(mesh(dp=2), backend="shm") as default,
        Groups(mesh(dp=2), backend="shm", timeout_s=3.0) as chosen,
    ):
        comms = [groups.comm("dp") for groups in (default, chosen)]
        model = mlp()
        optimizer = OPTIMIZERS["adam"](model.parameters())
        attached = attach(model, optimizer, over="memory")
        train(model, optimizer, batches(2, rank, size))
        attached.synchronize()
        store = distributed.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["told"])
            return []
        handles = [comm.all_reduce(torch.ones(3)) for comm in comms]
        told = [error_of(lambda: train(model, optimizer, batches(1, rank, size)))]
        told += [error_of(handle.wait) for handle in handles]
        store.set("told", "")
        return told


def error_of(wait: Callable[[], None]) -> str:
    with pytest.raises(PeerError) as caught:
        wait()
    assert caught.value.kind == "stuck"
    return str(caught.value)


def test_a_rank_that_is_away_is_waited_for_as_long_as_the_group_says() -> None:
    attached, default, chosen = run_ranks(away, 2, group_timeout_s=2.0)[0]
    assert "after 2 s, the time-out of the group" in default
    assert "after 3 s, the time-out of the group" in chosen
    for told in (attached, default, chosen):
        assert "rank 1" in told
        assert "init_process_group(timeout=...) or Groups(..., timeout_s=...)" in told
