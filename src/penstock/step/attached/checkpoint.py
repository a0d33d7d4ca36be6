"""Saving and loading an attached model and its optimizer, and the hooks that do it.

The model's `state_dict` and `load_state_dict` are torch's, with hooks around them; those of the
optimizer are replaced. Between steps the optimizer itself has no state: each rank has its slices.
Its `state` says that it is not empty: torch.distributed.checkpoint would make a step to fill it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.errors import StateError
from penstock.step.attached import fit
from penstock.step.attached.elementwise import Rule
from penstock.step.attached.flow import BucketFlow
from penstock.step.attached.module_weights import Saving
from penstock.step.attached.peer_slices import PeerSlices
from penstock.step.attached.reshard import Rounds, ordinary
from penstock.step.attached.sharded import Sharding, is_asked_for, whole_of
from penstock.step.attached.share import Share
from penstock.step.attached.state import State, collected, spread, unpacked
from penstock.step.attached.step_exchange import LOAD, SAVE, meeting_of
from penstock.step.comms.comm import Comm

__all__ = ["Checkpoint"]


class Checkpoint:
    """The state of one attached model and its optimizer.

    Args:
        optimizer: whose state it is.
        rule: the optimizer's.
        params: those that are attached, by number.
        settle: returns when no update and no gather is under way.
        meet: does so when all ranks have come to the same call.
        sharding: how DTensors are cut.
        is_wide: whether states are wider than the parameters may be.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rule: Rule,
        params: Sequence[torch.Tensor],
        *,
        settle: Callable[[], None],
        meet: Callable[[str], None],
        sharding: Sharding,
        is_wide: bool,
    ) -> None:
        self._optimizer, self._rule, self._params = optimizer, rule, params
        self._settle, self._meet, self._sharding = settle, meet, sharding
        self._is_wide = is_wide
        self._numbers = {param: number for number, param in enumerate(params)}
        groups = enumerate(optimizer.param_groups)
        self._group_of = {param: place for place, group in groups for param in group["params"]}
        self.masters: dict[int, torch.Tensor] = {}
        """Weights in full precision until there are shares, by number."""
        self._versions: dict[int, int] = {}
        """Versions of parameters before they are loaded, by number."""
        self._shares: Sequence[Share] = ()
        self._lane: Comm | None = None
        self._others: PeerSlices | None = None
        self._flow: BucketFlow | None = None
        self._saving: Saving | None = None

    def cut(self, shares: Sequence[Share], lane: Comm) -> None:
        """Keep state in slices from now on; DTensors are gathered over this lane."""
        self.masters = {}
        self._shares, self._lane = shares, lane
        self._take_states()

    def follow(self, flow: BucketFlow, control: Comm, *, timeout_s: float) -> None:
        """Take weights from a flow from now on, and give others slices; all ranks call it."""
        self._flow = flow
        if isinstance(flow, Rounds):
            self._saving = Saving(flow)
        self._others = PeerSlices(self._shares, flow, control, timeout_s=timeout_s)
        self._others.open(meeting_of(control))

    def count_change(self) -> None:
        """Say that slices have changed, on all ranks alike."""
        if self._others is not None:
            self._others.count_change()

    def go_on(self) -> None:
        """Say that this rank goes on to what needs the others."""
        if self._others is not None:
            self._others.go_on()

    def leave(self) -> None:
        """Stay as long as others may save."""
        if self._others is not None:
            self._others.leave()

    def close(self) -> None:
        """Give others nothing any more."""
        if self._others is not None:
            self._others.close()

    # -- the optimizer -----------------------------------------------------------------------

    def stand_in(self) -> None:
        """Give the optimizer a `state` that says that it is elsewhere."""
        self._optimizer.state = SlicedState(self._optimizer.state, self._names_of)

    def _names_of(self, param: torch.Tensor) -> Iterable[str]:
        if param not in self._numbers:
            return ()
        return self._rule.names[self._group_of[param]]

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state as torch would, or in DTensors, which all ranks ask for."""
        plain = partial(type(self._optimizer).state_dict, self._optimizer)
        before = dict(self._optimizer.state)
        with ordinary():
            made = self._in_parts() if is_asked_for() else self._in_whole()
        there = fit.group_numbers(self._optimizer.param_groups, self._numbers)
        for number, state in made.items():
            if number in there:
                self._optimizer.state[self._params[number]] = state
        try:
            return plain()
        finally:
            self._optimizer.state.clear()
            self._optimizer.state.update(before)

    def _in_whole(self) -> dict[int, State]:
        """Return what torch has: the state of those that have made a step."""
        if self._others is None:
            return {
                number: {name: whole_of(value) for name, value in state.items()}
                for number, state in self._there().items()
            }
        assert self._flow is not None
        self._flow.wait(self._flow.buckets)  # for its updates, which make states
        with self._others.gathering() as gather:
            return collected(self._shares, gather)

    def _in_parts(self) -> dict[int, State]:
        """Return the state of all parameters in DTensors; a load asks for it, and fills it in."""
        if self._lane is None:
            return {number: self._begun(number) for number in range(len(self._params))}
        self._meet(SAVE)
        made: dict[int, State] = {}
        for share in self._shares:
            names = self._rule.names[share.group]
            for number in share.params:
                _, there = share.state_of(number)
                numbers = [name for name in names if name in self._rule.numbers]
                made[number] = {n: there.get(n, self._rule.zero_of(n)) for n in numbers}
            elements = [name for name in names if name not in self._rule.numbers]
            for name in sorted({*elements, *share.states}):
                slices = share.states.get(name, share.zeros_of(name))
                parts = self._sharding.collect(share, slices, self._lane)
                for number, value in zip(share.params, parts, strict=True):
                    made[number][name] = value
        return made

    def _begun(self, number: int) -> State:
        """Return the state of a parameter before there are shares, zeros where there is none."""
        param, there = self._params[number], self._there().get(number, {})
        dtype = param.dtype
        if self._is_wide:
            dtype = torch.promote_types(torch.float32, dtype)
        made: State = {}
        for name in self._names_of(param):
            value = there.get(name)
            if name in self._rule.numbers:
                made[name] = self._rule.zero_of(name) if value is None else value
            elif value is None:
                wide = self._rule.elements[name] or dtype
                made[name] = self._sharding.cut(torch.zeros_like(param, dtype=wide))
            else:
                made[name] = self._sharding.cut(whole_of(value))
        return made

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of torch's optimizer, or of an attached one with any number of ranks.

        It may have DTensors, of whatever mesh.
        """
        # Who still saves asks the others for slices, which must not change before it has them.
        self._meet(LOAD)
        plain = partial(type(self._optimizer).load_state_dict, self._optimizer)
        states = unpacked(self._optimizer, state_dict, plain)
        self._optimizer.state.update(states)
        self.stand_in()
        if self._lane is not None:
            self._take_states()

    def _there(self) -> dict[int, State]:
        """Return whole states that the optimizer has, by number."""
        state = self._optimizer.state
        return {self._numbers[param]: state[param] for param in state if param in self._numbers}

    def _take_states(self) -> None:
        """Take whole states out of the optimizer, each rank its slices."""
        spread(self._shares, self._there(), self._params)
        self.count_change()
        for param in self._params:  # those of frozen ones stay
            self._optimizer.state.pop(param, None)

    # -- the model ---------------------------------------------------------------------------

    def before_save(self, module: nn.Module, *_: Any) -> None:
        """Provide whole weights before a module's state is read, or DTensors of those in slices."""
        if self._saving is None:
            self._settle()
        elif self._sharding.size > 1 and is_asked_for():
            self._saving.enter(module, self._weights_in_parts)
        else:
            # Where someone has them all already, they may have been changed.
            is_whole = self._saving.is_whole
            self._saving.enter(module, None if is_whole else self._weights_in_whole)

    def _weights_in_whole(self) -> dict[torch.Tensor, torch.Tensor]:
        assert self._others is not None
        made = {}
        with ordinary(), self._others.gathering() as gather:
            for share in self._shares:
                flat = gather(share, None)
                for index, number in enumerate(share.params):
                    view = share.arena.view(flat, index)
                    copy = view.clone(memory_format=torch.preserve_format)
                    made[self._params[number]] = copy
        return made

    def _weights_in_parts(self) -> dict[torch.Tensor, torch.Tensor]:
        assert isinstance(self._flow, Rounds)
        assert self._lane is not None
        cut = self._sharding
        with ordinary():
            if self._flow.is_whole:  # and may have changed since they were in slices
                return {param: cut.cut(param.detach()) for param in self._params}
            self._meet(SAVE)
            made: dict[torch.Tensor, torch.Tensor] = {}
            for share in self._shares:
                parts = cut.collect(share, share.slices_of(None), self._lane)
                made.update(zip((self._params[n] for n in share.params), parts, strict=True))
        return made

    def after_save(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Copy weights into the state that was read: their own memory is given back."""
        if self._saving is not None:
            self._saving.leave(module, state, prefix)

    def before_load(
        self, module: nn.Module, state: MutableMapping[str, Any], prefix: str, *_: Any
    ) -> None:
        """Provide whole weights before a module's state is written, and whole values for them."""
        self._settle()
        for name in (*module._parameters, *module._buffers):
            if prefix + name in state:
                state[prefix + name] = whole_of(state[prefix + name])
        for param in module.parameters(recurse=False):
            if param in self._numbers:
                self._versions[self._numbers[param]] = param._version
        if self._saving is not None:
            self._saving.enter(module)

    def after_load(self, module: nn.Module, *_: Any) -> None:
        """Follow weights that were loaded into the model."""
        if self._saving is not None:
            self._saving.leave(module)
            if not self._saving.is_going_on:
                self.count_change()
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


class SlicedState(defaultdict[Any, Any]):
    """The `state` of an optimizer whose state is in slices: it is there, and not here.

    It is true in a condition, and a parameter's entry has the names of its states.
    """

    def __init__(
        self, rest: Mapping[Any, Any], names_of: Callable[[torch.Tensor], Iterable[str]]
    ) -> None:
        super().__init__(dict, rest)
        self._names_of = names_of

    def __bool__(self) -> bool:
        return True

    def __missing__(self, param: torch.Tensor) -> Mapping[str, Any]:
        return StateNames(self._names_of(param))


class StateNames(Mapping[str, Any]):
    """The names of a parameter's states, without the states."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> NoReturn:
        if name not in self._names:
            raise KeyError(name)
        raise StateError(
            f"the state {name!r} of an attached parameter is in slices, on all ranks; read it in "
            "optimizer.state_dict()"
        )
