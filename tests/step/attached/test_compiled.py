"""Models that torch.compile runs, before or after they are attached, train as plain ones do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.step.attached.cases import OPTIMIZERS, assert_same, attach, batches, mlp, train
from torch import nn

from penstock.errors import OptionError

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
    """Return weights, and for how many parcels each forward has not waited."""
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
            flow.wait = lambda parcels, flow=flow, wait=wait, seen=seen: (  # type: ignore
                seen.update(parcels),
                wait(flow, parcels),
            )
        made = call(x)
        if flow is not None:
            waited.append(len(flow.parcels) - len(seen))
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


@pytest.mark.parametrize("is_unscaled", [False, True])
def test_a_scaler_of_gradients_is_refused(is_unscaled: bool) -> None:
    model = mlp(torch.float32)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    attached = attach(model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    for x, y in batches(1, dtype=torch.float32):
        scaler.scale((model(x) - y).square().mean()).backward()
        if is_unscaled:
            scaler.unscale_(optimizer)
        with pytest.raises(OptionError, match="GradScaler"):
            scaler.step(optimizer)
    train(model, optimizer, batches(1, dtype=torch.float32))
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.step(optimizer)
    attached.close()
    assert not optimizer._step_supports_amp_scaling
