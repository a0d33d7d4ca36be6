"""An attached loop trains as one process does on the whole batch, whatever the number of ranks."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

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
    trained,
    weights,
)
from tests.step.ranks import run_ranks
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from penstock.step.attached.step_exchange import HEAD_LENGTH
from penstock.step.comms.comm import payload_bytes

STEPS = 100


def all_kinds(rank: int, size: int, over: str) -> dict[str, torch.Tensor]:
    return {kind: trained(rank, size, kind, STEPS, buckets=2048, over=over) for kind in OPTIMIZERS}


@pytest.mark.parametrize(
    ("size", "over"), [(1, "memory"), (2, "memory"), (2, "sockets"), (3, "sockets")]
)
def test_a_hundred_steps_of_every_optimizer_are_those_of_one_process(size: int, over: str) -> None:
    found = run_ranks(all_kinds, size, over)
    for kind in OPTIMIZERS:
        for rank in range(size):
            assert torch.equal(found[rank][kind], found[0][kind]), "ranks differ"
        assert_same(found[0][kind], plain(kind, STEPS))


def clipped(rank: int, size: int) -> tuple[list[torch.Tensor], list[float]]:
    made = [trained(rank, size, kind, 20, clip=0.3, buckets=512) for kind in ("adam", "lamb")]
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = attach(model, optimizer, clip=0.3)
    norms = []
    for batch in batches(3, rank, size):
        train(model, optimizer, iter([batch]))
        assert attached.grad_norm is not None
        norms.append(float(attached.grad_norm))
    return made, norms


def test_clipping_is_that_of_torch() -> None:
    made, norms = run_ranks(clipped, 2)[1]
    for kind, found in zip(("adam", "lamb"), made, strict=True):
        assert_same(found, plain(kind, 20, clip=0.3))
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected: list[float] = []
    for batch in batches(3):
        train(
            model,
            optimizer,
            iter([batch]),
            lambda: expected.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3))),
        )
    assert norms == pytest.approx(expected)
    assert max(norms) > 0.3


def accumulated(rank: int, size: int, is_said: bool) -> tuple[torch.Tensor, int]:
    """Train with gradients of three backwards a step."""
    model = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    attached = attach(model, optimizer, buckets=512)
    data = list(batches(12, rank, size))
    for step in range(4):
        optimizer.zero_grad()
        for part in range(3):
            x, y = data[3 * step + part]
            if is_said and part < 2:
                with attached.accumulate():
                    (model(x) - y).square().mean().backward()
            else:
                (model(x) - y).square().mean().backward()
        optimizer.step()
    made = weights(model)
    return made, attached.sent_bytes


def test_gradients_add_up_over_backwards_whether_it_is_said_or_not() -> None:
    model = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    data = list(batches(12))
    for step in range(4):
        optimizer.zero_grad()
        for x, y in data[3 * step : 3 * step + 3]:
            (model(x) - y).square().mean().backward()
        optimizer.step()
    said, unsaid = run_ranks(accumulated, 2, True), run_ranks(accumulated, 2, False)
    assert_same(said[0][0], weights(model))
    assert_same(unsaid[1][0], weights(model))
    assert said[0][1] < unsaid[0][1], "saying so saves nothing"


def scheduled(rank: int, size: int, is_before: bool) -> torch.Tensor:
    model = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    schedulers: list[Any] = []

    def schedule() -> None:
        schedulers.append(OneCycleLR(optimizer, max_lr=0.1, total_steps=20))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if is_before:
            schedule()
        if size:
            attach(model, optimizer, buckets=512)
        if not is_before:
            schedule()
        for batch in batches(20, rank, max(1, size)):
            train(model, optimizer, iter([batch]))
            schedulers[0].step()
    return weights(model)


@pytest.mark.parametrize("is_before", [True, False])
def test_schedulers_of_torch_work(is_before: bool) -> None:
    # Momentum is cycled as well: options are read anew in each step.
    assert_same(run_ranks(scheduled, 2, is_before)[0], scheduled(0, 0, is_before))


def with_closure_and_hooks(rank: int, size: int) -> list[Any]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    scheduler = StepLR(optimizer, 1)
    x, y = next(batches(1, rank, size))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure)) for _ in range(2)]
    scheduler.step()
    return [*seen, losses[1] < losses[0], optimizer.param_groups[0]["lr"]]


def test_closures_and_step_hooks_work() -> None:
    expected = ["before", "after"] * 2 + [True, pytest.approx(0.01)]
    assert run_ranks(with_closure_and_hooks, 2) == [expected] * 2


def counted(rank: int, size: int, wire: str | None) -> tuple[list[int], list[int], torch.Tensor]:
    model = mlp(torch.float32)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    attached = attach(model, optimizer, buckets=512, wire=wire)
    sent = []
    for batch in batches(30, rank, size, dtype=torch.float32):
        train(model, optimizer, iter([batch]))
        attached.synchronize()
        sent.append(attached.sent_bytes)
    assert attached._flow is not None
    lengths = [len(bucket.whole) for bucket in attached._flow.buckets]
    return [b - a for a, b in pairwise(sent)], lengths, weights(model)


def test_each_rank_sends_what_the_formula_says() -> None:
    for rank, (sent, lengths, _) in enumerate(run_ranks(counted, 3, None)):
        kinds = ("reduce_scatter", "all_gather")
        bulk = sum(payload_bytes(k, n, 4, size=3, rank=rank) for k in kinds for n in lengths)
        flags = payload_bytes("all_reduce", HEAD_LENGTH + 2 * 8, 8, size=3, rank=rank)
        assert set(sent) == {bulk + flags}


def test_a_narrow_wire_sends_half_and_trains_nearly_the_same() -> None:
    exact, narrow = run_ranks(counted, 2, None), run_ranks(counted, 2, "bf16")
    assert narrow[0][0][-1] < 0.6 * exact[0][0][-1]
    assert torch.equal(narrow[0][2], narrow[1][2]), "ranks have different weights"
    torch.testing.assert_close(narrow[0][2], exact[0][2], rtol=0.02, atol=0.02)
    assert not torch.equal(narrow[0][2], exact[0][2])
