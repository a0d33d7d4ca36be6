"""On a GPU everything is ordered by events; here streams are fakes that know what is in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from tests.step.attached.cases import (
    BATCH,
    OPTIMIZERS,
    assert_same,
    attach,
    batches,
    mlp,
    plain,
    train,
    weights,
)
from tests.step.attached.fake_streams import Stream, StreamComm, Watch, current_stream, faked, on
from tests.step.ranks import run_ranks

from penstock.step.attached.attach import Attached
from penstock.step.attached.flow import FlowPlan, Lanes
from penstock.step.attached.stream_rounds import StreamRounds
from penstock.step.attached.stream_updates import StreamUpdates
from penstock.step.attached.streams import StreamFlow


class States(dict[str, torch.Tensor]):
    """States of a share, which are watched from when the first step makes them."""

    def __init__(self, before: dict[str, torch.Tensor], watch: Watch, number: int) -> None:
        super().__init__(before)
        self._watch, self._number = watch, number

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        super().__setitem__(name, tensor)
        self._watch.add(f"{name} {self._number}", tensor)


@contextmanager
def on_streams(watch: Watch, *, side: bool = False) -> Iterator[None]:
    """Attach as on a GPU; with `side`, gradients of every other parameter are on other streams."""

    def flow_of(plan: FlowPlan, shares: Any, *, clip: Any, joint: Any, pace: Any) -> Any:
        lanes = plan.lanes
        made = Lanes(
            scatter=StreamComm(lanes.scatter, watch),
            gather=StreamComm(lanes.gather, watch),
            control=lanes.control,
        )
        faked_plan = replace(plan, lanes=made)
        flow: Any = StreamFlow(faked_plan) if pace is None else StreamRounds(faked_plan, pace())
        for number, share in enumerate(dict.fromkeys(shares.values())):
            kept = {"weights": share.arena.data, "grads": share.arena.grads, "sums": share.reduced}
            kept |= {} if share.masters is None else {"masters": share.masters}
            share.states = States(share.states, watch, number)
            for name, tensor in kept.items():
                watch.add(f"{name} {number}", tensor)
        updates = StreamUpdates(
            flow, shares, made.scatter, clip=clip, num_params=plan.num_params, joint=joint
        )
        return flow, updates

    streams = [Stream(), Stream()]
    after, step = Attached._after_grad, Attached._step

    def after_grad(self: Attached, number: int, param: torch.Tensor) -> None:
        stream = streams[number % 2] if side else current_stream()
        stream.wait_stream(current_stream())
        with on(stream):
            after(self, number, param)

    def stepped(self: Attached, *args: Any) -> Any:
        for each in streams:
            current_stream().wait_stream(each)
        return step(self, *args)

    with (
        faked(),
        mock.patch("penstock.step.attached.attach.flow_of", flow_of),
        watch.on_memory(),
        mock.patch.object(Attached, "_after_grad", after_grad),
        mock.patch.object(Attached, "_step", stepped),
        watch,
    ):
        yield


def trained(
    rank: int, size: int, kind: str, side: bool, **options: Any
) -> tuple[torch.Tensor, list[str]]:
    """Train with everything a loop may do."""
    watch = Watch()
    with on_streams(watch, side=side):
        model = mlp()
        optimizer = OPTIMIZERS[kind](model.parameters())
        attached = attach(model, optimizer, buckets=512, **options)
        train(model, optimizer, batches(4, rank, size))
        if options.get("clip"):
            assert attached.grad_norm is not None
            attached.grad_norm + 0
        with torch.no_grad():
            model(torch.ones(BATCH, 7, dtype=torch.float64))
        optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, batches(2, rank, size, seed=2))
        made = weights(model)
    assert watch.num_seen > 100
    return made, watch.races


def expected(kind: str, clip: float | None = None) -> torch.Tensor:
    model = mlp()
    optimizer = OPTIMIZERS[kind](model.parameters())

    def clipped() -> None:
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)

    train(model, optimizer, batches(4), clipped)
    train(model, optimizer, batches(2, seed=2), clipped)
    return weights(model)


def all_trained(rank: int, size: int) -> list[tuple[torch.Tensor, list[str]]]:
    made = [trained(rank, size, "nesterov", side=True), trained(rank, size, "lamb", side=False)]
    made.append(trained(rank, size, "adamw", side=True, clip=0.3))
    made.append(accumulated(rank, size))
    made.append(read(rank, size))
    return [*made, trained(rank, size, "adam", True, dtype=torch.bfloat16)]


def read(rank: int, size: int) -> tuple[torch.Tensor, list[str]]:
    """Read and clip gradients between backward and step, and come back to some of them."""
    watch = Watch()
    with on_streams(watch):
        model = mlp()
        optimizer = OPTIMIZERS["adam"](model.parameters())
        attach(model, optimizer, buckets=512)
        read_and_clipped(model, optimizer, batches(4, rank, size))
        made = weights(model)
    return made, watch.races


def read_and_clipped(model: torch.nn.Module, optimizer: Any, data: Any) -> None:
    for x, y in data:
        optimizer.zero_grad()
        for _ in range(2):
            (model(x) - y).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()


def expected_of_reads() -> torch.Tensor:
    model = mlp()
    read_and_clipped(model, OPTIMIZERS["adam"](model.parameters()), batches(4))
    return weights(model)


def accumulated(rank: int, size: int) -> tuple[torch.Tensor, list[str]]:
    """Have gradients change that are on their way, or were thrown away."""
    watch = Watch()
    with on_streams(watch):
        model = mlp()
        optimizer = OPTIMIZERS["adam"](model.parameters())
        attach(model, optimizer, buckets=512)
        for number, (x, y) in enumerate(batches(4, rank, size)):
            (model(x * 2) - y).square().mean().backward()
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            (loss / 2).backward(retain_graph=True)
            if number % 2 or rank:
                (loss / 4).backward(retain_graph=True)
                (loss / 4).backward()
            else:
                (loss / 2).backward()
            optimizer.step()
        made = weights(model)
    return made, watch.races


def test_all_is_in_order_and_has_the_values_of_one_process() -> None:
    wanted = [expected("nesterov"), expected("lamb"), expected("adamw", 0.3), plain("adam", 4)]
    wanted.append(expected_of_reads())
    for found in run_ranks(all_trained, 2):
        for (made, races), value in zip(found, wanted, strict=False):
            assert races == []
            assert_same(made, value)
        assert found[-1][1] == []
        torch.testing.assert_close(found[-1][0], expected("adam"), rtol=0.1, atol=0.1)


def nothing(*_: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("what", "name"),
    [("hold", "grads"), ("wait", "weights"), ("updating", "weights"), ("_updated", "sums")],
)
def test_each_wait_is_needed(what: str, name: str) -> None:
    """Without it the fakes see that something is not in order."""
    watch = Watch()
    patches: dict[str, Callable[..., Any]] = {
        "hold": partial(mock.patch.object, StreamFlow, "hold", nothing),
        "wait": partial(mock.patch.object, StreamFlow, "wait", nothing),
        "updating": partial(mock.patch.object, StreamFlow, "updating", _unordered),
        "_updated": partial(mock.patch.object, StreamFlow, "_send", _sent_at_once),
    }
    with on_streams(watch), patches[what]():
        model = mlp()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        attach(model, optimizer, buckets=512)
        for x, y in batches(4):
            for _ in range(2 if what == "hold" else 1):  # the second changes what is on its way
                (model(x) - y).square().mean().backward()
            model[5].weight.detach().norm()  # as who writes a log does
            optimizer.step()
    assert any(race.startswith(name) for race in watch.races)


@contextmanager
def _unordered(self: StreamFlow) -> Iterator[None]:
    with on(self._updating):
        yield


def _sent_at_once(self: StreamFlow, bucket: Any) -> None:
    self._updated.pop(bucket, None)
    bucket.is_issued = True
    with on(Stream()):
        bucket.scattered = self._lanes.scatter.reduce_scatter(
            bucket.reduced, bucket.grads, op="mean", wire=None
        )
