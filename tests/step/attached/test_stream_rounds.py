"""Weights in slices on streams: memory comes and goes while a device is at work, and in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from tests.step.attached.cases import OPTIMIZERS, assert_same, attach, batches, weights
from tests.step.attached.fake_streams import Stream, Watch, current_stream, on
from tests.step.attached.test_reshard import LAYERS, WIDTH, deep, sizes_of
from tests.step.attached.test_streams import expected, on_streams, trained
from tests.step.ranks import run_ranks
from torch import nn

from penstock.step.attached.blocks import ParameterBlock
from penstock.step.attached.reshard import AHEAD
from penstock.step.attached.stream_rounds import StreamBlock, StreamPool, StreamRounds
from penstock.step.attached.streams import StreamFlow

KINDS: dict[str, tuple[bool, dict[str, Any]]] = {
    "nesterov": (True, {}),
    "lamb": (False, {}),
    "adamw": (True, {"clip": 0.3}),
    "adam": (True, {"dtype": torch.bfloat16}),
}
"""By optimizer: whether gradients are on other streams, and options."""

# -- order and values --------------------------------------------------------------------------


def all_trained(rank: int, size: int) -> dict[str, tuple[torch.Tensor, list[str]]]:
    made = {}
    for kind, (side, options) in KINDS.items():
        made[kind] = trained(rank, size, kind, side, reshard=True, **options)
    watch = Watch()
    with on_streams(watch):
        made["uneven"] = uneven(rank, size), watch.races
    watch = Watch()
    with on_streams(watch):
        made["around"] = around(rank, size), watch.races
    return made


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.again, self.out = nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 5)
        self.more = nn.Sequential(*(nn.Linear(9, 9) for _ in range(5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.again(torch.tanh(self.into(x))))
        return self.out(self.again(self.more(x)))


def uneven(rank: int, size: int, is_attached: bool = True) -> torch.Tensor:
    """Use a layer twice, have gradients come after some were sent, and a rank look more often."""
    model = Twice().double()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    attached = attach(model, optimizer, buckets=256, reshard=True) if is_attached else None
    for number, (x, y) in enumerate(batches(3, rank, size)):
        optimizer.zero_grad()
        for _ in range(1 + number % 2):
            (model(x) - y).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for _ in range(rank):
                model(x)
    if attached is not None:
        attached.synchronize()  # who looked less joins in
    return weights(model)


def around(rank: int, size: int) -> torch.Tensor:
    """Save, load, change weights by hand and close, on streams."""
    model = deep()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    attached = attach(model, optimizer, buckets=4 * WIDTH * WIDTH, reshard=True)
    stepped(model, optimizer, 3)
    kept = model.state_dict(), optimizer.state_dict()
    stepped(model, optimizer, 1)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    model(torch.ones(3, WIDTH))  # a round that no backward follows
    with torch.no_grad():
        with attached.whole():
            model[0].weight.mul_(0.5)
            model[-1].weight.data.mul_(0.5)
        model(torch.ones(3, WIDTH))
    stepped(model, optimizer, 2)
    attached.close()
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def stepped(model: nn.Module, optimizer: Any, count: int) -> None:
    for number in range(count):
        optimizer.zero_grad()
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
        optimizer.step()


def test_all_is_in_order_and_has_the_values_of_one_process() -> None:
    model = deep()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    stepped(model, optimizer, 3)
    with torch.no_grad():
        model[0].weight.mul_(0.5)
        model[-1].weight.mul_(0.5)
    stepped(model, optimizer, 2)
    by_hand = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    wanted = {"uneven": uneven(0, 1, False), "around": by_hand}
    wanted |= {kind: expected(kind, options.get("clip")) for kind, (_, options) in KINDS.items()}
    for found in run_ranks(all_trained, 2):
        for name, (made, races) in found.items():
            assert races == [], name
            assert_same(made, wanted[name], 0.1 if name == "adam" else 1e-6)


# -- each wait is needed -----------------------------------------------------------------------


def nothing(*_: Any) -> None:
    pass


def released_at_once(self: StreamBlock) -> None:
    self._users.clear()
    with mock.patch.object(StreamPool, "empty", lambda pool, storage: storage.resize_(0)):
        ParameterBlock.release(self)


def not_waited(self: StreamBlock) -> None:
    self._users.add(current_stream())
    self._come_back()


def given_at_once(self: StreamBlock) -> None:
    self.grads.resize_(0)
    self._memory = None


def taken_at_once(self: StreamBlock) -> None:
    self._flow.grads.fill(self.grads, self._grads_bytes)


@contextmanager
def unread(self: StreamRounds) -> Iterator[None]:
    with StreamFlow.updating(self):
        yield


@contextmanager
def sloppy(owner: Any, name: str, instead: Callable[..., Any]) -> Iterator[None]:
    with mock.patch.object(owner, name, instead):
        yield


WAITS: dict[str, tuple[Callable[..., Any], str]] = {
    "release": (partial(sloppy, StreamBlock, "release", released_at_once), "weights"),
    "arrive": (partial(sloppy, StreamBlock, "arrive", not_waited), "weights"),
    "after_updates": (partial(sloppy, StreamRounds, "after_updates", nothing), "masters"),
    "updating": (partial(sloppy, StreamRounds, "updating", unread), "masters"),
    "give_room_back": (partial(sloppy, StreamBlock, "give_room_back", given_at_once), "grads"),
    "take_room": (partial(sloppy, StreamBlock, "_take_room", taken_at_once), "grads"),
    "follow": (partial(sloppy, StreamFlow, "follow", nothing), "exp_avg"),
}


@pytest.mark.parametrize("name", WAITS)
def test_each_wait_is_needed(name: str) -> None:
    """Without it the fakes see that something is not in order."""
    watch = Watch()
    make, what = WAITS[name]
    with on_streams(watch), make():
        model = deep()
        optimizer = OPTIMIZERS["adam"](model.parameters())
        attached = attach(model, optimizer, buckets=4 * WIDTH * WIDTH, reshard=True)
        stepped(model, optimizer, 3)
        attached.state_dict()
        model(torch.ones(3, WIDTH))  # what is gathered and not used is read all the same
        stepped(model, optimizer, 1)
    assert any(race.startswith(what) for race in watch.races)


# -- memory ------------------------------------------------------------------------------------


def test_memory_is_that_of_a_few_blocks_however_far_the_host_is_ahead() -> None:
    """What the host has asked for is never known to be over here, as on a device far behind."""
    watch = Watch()
    here, rooms = [], []

    def look(*_: Any) -> None:
        flow: Any = attached._flow
        here.append(sum(size > 0 for size in sizes_of(model)))
        rooms.append(sum(block.has_room for block in flow.blocks))

    with on_streams(watch):
        model = deep()
        optimizer = OPTIMIZERS["adam"](model.parameters())
        attached = attach(model, optimizer, buckets=4 * WIDTH * WIDTH, reshard=True)
        stepped(model, optimizer, 1)
        for layer in model:
            layer.register_forward_pre_hook(look)
            layer.weight.register_post_accumulate_grad_hook(look)
        stepped(model, optimizer, 3)
    assert max(here) <= AHEAD + 2 < LAYERS
    assert max(rooms) <= AHEAD + 2 < LAYERS
    assert watch.races == []


class Pace:
    """A lane on which another rank says how many gathers it has begun, at some time."""

    def __init__(self) -> None:
        self.is_there, self.theirs = False, 0
        self._said: list[torch.Tensor] = []

    def all_reduce(self, most: torch.Tensor, *, op: str) -> Pace:
        assert op == "max"
        self._said.append(most)
        return self

    def is_done(self) -> bool:
        for most in self._said:
            most.clamp_(min=self.theirs)
        return self.is_there


def test_gradients_keep_their_memory_while_another_rank_is_rounds_ahead() -> None:
    """It may be waiting for this rank, in a round that this one comes to after backward."""
    watch, pace, rooms = Watch(), Pace(), []

    def look(*_: Any) -> None:
        flow: Any = attached._flow
        rooms.append(sum(block.has_room for block in flow.blocks))

    with on_streams(watch):
        model = deep()
        optimizer = OPTIMIZERS["adam"](model.parameters())
        attached = attach(model, optimizer, buckets=4 * WIDTH * WIDTH, reshard=True)
        stepped(model, optimizer, 1)
        flow: Any = attached._flow
        flow._pace = pace
        for layer in model:
            layer.weight.register_post_accumulate_grad_hook(look)
        for pace.is_there, pace.theirs in ((False, 0), (True, 10_000), (True, 0)):
            rooms.clear()
            stepped(model, optimizer, 1)
            assert (max(rooms) == LAYERS) is (pace.theirs > 0 or not pace.is_there)
            assert not any(block.has_room for block in flow.blocks), "a step that is over"


def test_streams_of_a_module_all_wait_and_are_all_waited_for() -> None:
    """A layer that is called on two streams is whole on both, and goes after both."""

    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.last = deep(), nn.Linear(WIDTH, WIDTH)
            self.streams = [Stream(), Stream()]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                parts = []
                for stream in self.streams:
                    stream.wait_stream(current_stream())
                    with on(stream):
                        parts.append(layer(x))
                for stream in self.streams:
                    current_stream().wait_stream(stream)
                x = parts[0] + parts[1]
            return self.last(x)

    watch = Watch()
    with on_streams(watch):
        model = Forked()
        optimizer = OPTIMIZERS["adam"](model.parameters())
        attach(model, optimizer, buckets=4 * WIDTH * WIDTH, reshard=True)
        stepped(model, optimizer, 3)
    assert watch.races == []
