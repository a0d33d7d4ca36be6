"""Where weights in slices meet a model: modules that run, and modules that are saved or loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.step.attached.blocks import ParameterBlock
from penstock.step.attached.flow import FlowBucket
from penstock.step.attached.plan import Agreement
from penstock.step.attached.record import Record
from penstock.step.attached.released_params import stand_in
from penstock.step.attached.reshard import Rounds, ordinary
from penstock.step.attached.share import Share

__all__ = ["Saving", "begin_rounds", "blocks_of_modules"]


def begin_rounds(
    flow: Rounds,
    shares: Mapping[FlowBucket, Share],
    params: Sequence[torch.Tensor],
    agreement: Agreement,
    record: Record,
) -> None:
    """Make blocks of shares, and give their memory back."""
    first = {number: place for place, number in enumerate(agreement.by_use)}
    ready = {number: place for place, number in enumerate(agreement.by_readiness)}
    buckets: dict[Share, list[FlowBucket]] = {}
    for bucket, share in shares.items():
        buckets.setdefault(share, []).append(bucket)
    blocks = [
        flow.block(share, each, [params[number] for number in share.params])
        for share, each in buckets.items()
    ]
    for block in blocks:
        block.graded = {n for n in block.numbers if n in record.ready} or set(block.numbers)
    blocks.sort(key=lambda block: min(first[number] for number in block.numbers))
    back = sorted(blocks, key=lambda block: min(ready[number] for number in block.numbers))
    flow.begin(blocks, back)


def blocks_of_modules(
    flow: Rounds, model: nn.Module, numbers: Mapping[torch.Tensor, int], record: Record
) -> dict[nn.Module, list[ParameterBlock]]:
    """Return which blocks each module uses, and tell blocks how often they are used."""
    found: dict[nn.Module, list[ParameterBlock]] = {}
    for module in model.modules():
        wanted = {numbers[p] for p in module.parameters(recurse=False) if p in numbers}
        wanted |= {number for number, users in record.users.items() if module in users}
        blocks = {flow.block_of[number] for number in wanted if number in flow.block_of}
        if blocks or module is model:
            found[module] = sorted(blocks, key=lambda block: block.number)
        flow.wanted[module] = frozenset(wanted & flow.block_of.keys())
        for block in blocks:
            block.calls += record.calls_of(module)
    return found


Parts = Mapping[torch.Tensor, torch.Tensor]
"""What stands for parameters in a state: copies, or DTensors."""


class Saving:
    """A model's state while it is read or written: weights are whole, and what is read is copied.

    Or they stay in slices, and a state has what is given for them. Hooks are called for a module
    and all in it; the outermost one begins and ends it.
    """

    def __init__(self, flow: Rounds) -> None:
        self._flow = flow
        self._modules: list[nn.Module] = []
        self._whole = contextlib.ExitStack()
        self._parts: Parts = {}

    @property
    def is_whole(self) -> bool:
        """Whether someone has all weights already."""
        return self._flow.is_whole

    @property
    def is_going_on(self) -> bool:
        """Whether an outermost module has not been left."""
        return bool(self._modules)

    def enter(self, module: nn.Module, parts: Callable[[], Parts] | None = None) -> None:
        """Provide whole weights from now on, which all ranks ask for, or `parts` in their place."""
        if self._modules and self._modules[0] is not module:
            self._modules.append(module)
            return
        # The outermost one comes again where the last time ended in an error.
        self.end()
        if parts is None:
            self._whole.enter_context(self._flow.whole())
        else:
            self._parts = parts()
        self._modules = [module]
        for param, part in self._parts.items():
            stand_in(param, part)

    def end(self) -> None:
        """End what an error has left."""
        self._modules = []
        self._whole.close()
        for param in self._parts:
            stand_in(param, None)
        self._parts = {}

    def leave(
        self, module: nn.Module, state: MutableMapping[str, Any] | None = None, prefix: str = ""
    ) -> None:
        """Release them after the outermost module; a state has copies."""
        for name, param in module._parameters.items():
            if state is not None and param is not None and param in self._parts:
                state[prefix + name] = self._parts[param]
        while self._modules and self._modules.pop() is not module:
            pass
        if self._modules:
            return
        if not self._parts:
            with ordinary():
                self._copy(state)
        self.end()

    def _copy(self, state: MutableMapping[str, Any] | None) -> None:
        copies: dict[tuple[int, torch.Size], torch.Tensor] = {}
        for name, value in (state or {}).items():
            if isinstance(value, torch.Tensor) and self._flow.has(value):
                key = value.data_ptr(), value.shape  # weights that are tied stay so
                if key not in copies:
                    copies[key] = value.detach().clone(memory_format=torch.preserve_format)
                assert state is not None
                # With keep_vars=True the parameters themselves are asked for.
                if not isinstance(value, nn.Parameter):
                    state[name] = copies[key]
