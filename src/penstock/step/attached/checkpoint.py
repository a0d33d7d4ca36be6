"""What of an attached model and optimizer is saved and loaded, and the hooks that do it.

The model's `state_dict` and `load_state_dict` are torch's, with hooks around them; those of the
optimizer are replaced. Between steps the optimizer itself has no state: each rank has its slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.step.attached import fit
from penstock.step.attached.flow import Flow
from penstock.step.attached.reshard import Rounds, ordinary
from penstock.step.attached.share import Share
from penstock.step.attached.state import collected, spread, unpacked
from penstock.step.attached.whole import Saving
from penstock.step.comms.comm import Comm

__all__ = ["Checkpoint"]


class Checkpoint:
    """The state of one attached model and its optimizer.

    Args:
        optimizer: whose state it is.
        params: those that are attached, by number.
        settle: returns when no update and no gather is under way.
    """

    def __init__(
        self, optimizer: Optimizer, params: Sequence[torch.Tensor], settle: Callable[[], None]
    ) -> None:
        self._optimizer, self._params, self._settle = optimizer, params, settle
        self._numbers = {param: number for number, param in enumerate(params)}
        self.steps = dict.fromkeys(range(len(params)), 0)
        """That parameters have made, by number."""
        self.masters: dict[int, torch.Tensor] = {}
        """Weights in full precision until there are shares, by number."""
        self._versions: dict[int, int] = {}
        """Of parameters that are being loaded."""
        self._shares: Sequence[Share] = ()
        self._lane: Comm | None = None
        self._flow: Flow | None = None
        self._saving: Saving | None = None

    def cut(self, shares: Sequence[Share], lane: Comm) -> None:
        """Have state in slices from now on; they meet on this lane."""
        self.masters = {}
        self._shares, self._lane = shares, lane
        self._take_states()

    def follow(self, flow: Flow) -> None:
        """Take weights from a flow from now on."""
        self._flow = flow
        if isinstance(flow, Rounds):
            self._saving = Saving(flow)

    # -- the optimizer -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state as torch would; all ranks call it."""
        plain = partial(type(self._optimizer).state_dict, self._optimizer)
        if self._lane is None:
            return plain()
        self._settle()
        if isinstance(self._flow, Rounds):
            self._flow.meet("state")
        with ordinary():
            made = collected(self._shares, self.steps, self._lane)
        there = fit.group_numbers(self._optimizer.param_groups, self._numbers)
        for number, state in made.items():
            if number in there:
                self._optimizer.state[self._params[number]] = state
        try:
            return plain()
        finally:
            self._give_up_states()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of torch's optimizer, or of an attached one with any number of ranks."""
        self._settle()
        plain = partial(type(self._optimizer).load_state_dict, self._optimizer)
        states = unpacked(self._optimizer, state_dict, plain)
        self._optimizer.state.update(states)
        if self._lane is not None:
            self._take_states()

    def _take_states(self) -> None:
        """Take whole states out of the optimizer, each rank its slices."""
        state = self._optimizer.state
        saved = {self._numbers[param]: state[param] for param in state if param in self._numbers}
        self.steps = spread(self._shares, saved, self._params)
        self._give_up_states()

    def _give_up_states(self) -> None:
        for param in self._params:  # those of frozen ones stay
            self._optimizer.state.pop(param, None)

    # -- the model ---------------------------------------------------------------------------

    def before_state(self, module: nn.Module, *_: Any) -> None:
        """Have whole weights before a module's state is read or written."""
        self._settle()
        for param in module.parameters(recurse=False):
            if param in self._numbers:
                self._versions[self._numbers[param]] = param._version
        if self._saving is not None:
            self._saving.enter(module)

    def after_save(self, module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        """Have a state that stays when weights go."""
        if self._saving is not None:
            self._saving.leave(module, state)

    def after_load(self, module: nn.Module, *_: Any) -> None:
        """Follow weights that were loaded into the model."""
        if self._saving is not None:
            self._saving.leave(module)
            return
        params = {self._numbers[p]: p for p in module.parameters(False) if p in self._numbers}
        loaded = {n for n, param in params.items() if param._version != self._versions.get(n)}
        for share in self._shares:
            share.take_over(loaded)
        for number in loaded:
            self.masters.pop(number, None)

    def end(self) -> None:
        """End what an error has left."""
        if self._saving is not None:
            self._saving.end()
