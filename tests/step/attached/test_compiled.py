"""Models that torch.compile runs, before or after they are attached, train as plain ones do."""

from __future__ import annotations

from collections.abc import Callable
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
    weights,
)
from tests.step.ranks import run_ranks
from torch import nn

from penstock.errors import StateError

HOW = ("module", "its own", "parts", "later", "function", "before")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.LayerNorm(13))
        self.second = nn.Sequential(nn.Linear(13, 9), nn.Tanh())
        self.last = nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x)))


def compiled(what: Any, **options: Any) -> Any:
    return torch.compile(what, backend="eager", **options)


def trained(how: str, *, is_attached: bool = True) -> tuple[torch.Tensor, list[int]]:
    """Return weights, and for how many buckets each forward has not waited."""
    torch._dynamo.reset()
    net = Net().double()
    params = list(net.parameters())
    optimizer = OPTIMIZERS["adam"](params)
    model: Any = net
    if how == "module":
        model = compiled(net, fullgraph=True)
    elif how == "its own":
        net.compile(backend="eager", fullgraph=True)
    elif how == "parts":
        net.first = compiled(net.first, fullgraph=True)
        net.second.compile(backend="eager")
    call: Callable[[torch.Tensor], torch.Tensor] = model
    if how == "before":
        call = compiled(net)
        call(torch.zeros(12, 7, dtype=torch.float64)).sum().backward()
        optimizer.zero_grad()
    attached = attach(model, optimizer, buckets=512) if is_attached else None
    if how == "later":
        call = compiled(net)
    elif how == "function":
        call = compiled(lambda x: net(x))
    waited: list[int] = []
    for x, y in batches(3):
        optimizer.zero_grad()
        seen: set[Any] = set()
        flow = None if attached is None else attached._flow
        if flow is not None:
            wait = type(flow).wait
            flow.wait = lambda buckets, flow=flow, wait=wait, seen=seen: (  # type: ignore
                seen.update(buckets),
                wait(flow, buckets),
            )
        made = call(x)
        if flow is not None:
            waited.append(len(flow.buckets) - len(seen))
            del flow.wait
        (made - y).square().mean().backward()
        optimizer.step()
    if attached is not None:
        attached.close()
    return torch.cat([param.detach().reshape(-1) for param in params]), waited


@pytest.mark.parametrize("how", HOW)
def test_a_compiled_model_waits_for_all_weights_and_trains_as_a_plain_one(how: str) -> None:
    made, missing = trained(how)
    assert_same(made, trained("", is_attached=False)[0])
    assert missing == [0, 0]


@pytest.mark.parametrize("how", ["model", "its own", "function", "step"])
def test_one_graph_of_what_is_attached_is_refused_with_the_way_out(how: str) -> None:
    torch._dynamo.reset()
    net = Net().double()
    optimizer = OPTIMIZERS["adam"](net.parameters())
    call: Any = net
    with attach(net, optimizer):
        if how == "model":
            call = compiled(net, fullgraph=True)
        elif how == "its own":
            net.compile(backend="eager", fullgraph=True)
        elif how == "function":
            call = compiled(lambda x: net(x), fullgraph=True)
        else:
            call = compiled(lambda _: optimizer.step(), fullgraph=True)
        words = (
            "call optimizer.step" if how == "step" else "compile the model first and attach what"
        )
        with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
            call(torch.zeros(12, 7, dtype=torch.float64))


@pytest.mark.parametrize("how", ["step", "function", "loop"])
def test_a_compiled_step_updates_as_a_plain_one(how: str) -> None:
    torch._dynamo.reset()
    net = Net().double()
    optimizer = OPTIMIZERS["adam"](net.parameters())

    def once(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        step()

    with attach(net, optimizer):
        step = compiled(optimizer.step) if how == "step" else optimizer.step
        step = compiled(lambda: optimizer.step()) if how == "function" else step
        train_once = compiled(once) if how == "loop" else once
        for x, y in batches(3):
            train_once(x, y)
    made = torch.cat([param.detach().reshape(-1) for param in net.parameters()])
    assert_same(made, trained("", is_attached=False)[0])


def compiled_in_slices(rank: int, size: int) -> torch.Tensor:
    """Train with weights in slices, compile the model between two steps, and train on."""
    model = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    call: Any = model
    with attach(model, optimizer, reshard=True):
        for number, batch in enumerate(batches(3, rank, size)):
            call = compiled(model) if number == 2 else call
            train(call, optimizer, iter([batch]))
        torch._dynamo.reset()  # what is traced already would be used again
        with pytest.raises(torch._dynamo.exc.Unsupported, match="attach without reshard"):
            compiled(model, fullgraph=True)(batch[0])
    return weights(model)


def test_a_model_in_slices_may_be_compiled_between_steps() -> None:
    for made in run_ranks(compiled_in_slices, 2):
        assert_same(made, plain("adam", 3))


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_step_from_before_is_refused(kind: str, is_compiled: bool) -> None:
    torch._dynamo.reset()
    net = Net().double()
    optimizer = OPTIMIZERS[kind](net.parameters())
    step = compiled(optimizer.step) if is_compiled else optimizer.step
    before = weights(net)
    with attach(net, optimizer):
        net(torch.ones(12, 7, dtype=torch.float64)).sum().backward()
        with pytest.raises(StateError, match="taken from the optimizer before"):
            step()
        assert_same(weights(net), before, 0.0)
        optimizer.step()
    assert not torch.equal(weights(net), before)
    step()  # closed, it is the optimizer's own again
