"""Hooks on parameters and modules, and the methods of an optimizer that are replaced.

Copies of a model, by `copy.deepcopy` or pickle, have none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FrameType, MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.errors import StateError
from penstock.step.attached.compiled import (
    MOVES,
    UPDATES,
    CompiledCallHook,
    breaks_graph,
    compiled_in,
    is_compiled,
)
from penstock.step.attached.pending_weights import PendingWeights
from penstock.step.attached.scaling import Scaling, Unscale

__all__ = ["Hooks", "UncopiedHook", "nothing"]

Unread = Callable[[], AbstractContextManager[None]]
"""A block in which nobody reads weights."""
_REPLACED = ("step", "state_dict", "load_state_dict", "zero_grad")


class UncopiedHook:
    """A hook that copies of a model do not have."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is hooked."""
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, ()


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _made_again() -> Callable[..., None]:
    return nothing


class Hooks:
    """All that was put on a model and an optimizer, to be taken off again."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._optimizer: Optimizer | None = None

    def remove(self) -> None:
        """Take everything off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._optimizer is not None:
            for name in (*_REPLACED, "__getstate__"):
                vars(self._optimizer).pop(name, None)
            self._optimizer = None

    def on_grads(
        self,
        params: Sequence[torch.Tensor],
        before: Callable[[int], None],
        after: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Call `before` when a gradient is about to change, and `after` when it has."""
        before, after = breaks_graph(before), breaks_graph(after)
        tensor: Any  # torch has no types for its hooks
        for number, tensor in enumerate(params):
            # torch takes what a hook returns for a new gradient; these return None.
            self._handles += [
                tensor.register_hook(lambda _, number=number: before(number)),
                tensor.register_post_accumulate_grad_hook(partial(after, number)),
            ]

    def on_state_dicts(self, model: nn.Module, to: Any) -> None:
        """Call `to` before and after a module's state is read or written."""
        module: Any  # torch has no types for its hooks
        for module in model.modules():
            self._handles += [
                module.register_state_dict_pre_hook(UncopiedHook(to.before_save)),
                module._register_load_state_dict_pre_hook(
                    UncopiedHook(to.before_load), with_module=True
                ),
                module.register_state_dict_post_hook(UncopiedHook(to.after_save)),
                module.register_load_state_dict_post_hook(UncopiedHook(to.after_load)),
            ]

    def on_reads(self, model: nn.Module, settle: Callable[[], None], unread: Unread) -> None:
        """Call `settle` before parameters are asked for, or a module is copied or pickled.

        Gradients are forgotten within `unread`.
        """
        self._handles += [_Reads(module, settle, unread) for module in model.modules()]

    def on_forward(
        self, model: nn.Module, weights: PendingWeights, needs: Mapping[nn.Module, set[int]]
    ) -> None:
        """Let modules wait for the weights they need; without gradients, for all there are.

        What is not trained may take other ways through a model than the ones that were recorded.
        """
        inside = compiled_in(model)
        for module in model.modules():
            if module not in inside and is_compiled(module):
                wanted = {number for each in module.modules() for number in needs.get(each, ())}
                before = partial(_wait, weights, weights.waiter(wanted))
                self._handles.append(CompiledCallHook(module, before))
            elif needs.get(module):
                way = _wait_alone if module in inside else _wait
                wait = UncopiedHook(partial(way, weights, weights.waiter(needs[module])))
                self._handles.append(module.register_forward_pre_hook(wait, prepend=True))

    def on_modules(self, needs: Mapping[nn.Module, Sequence[Any]], enter: Any, leave: Any) -> None:
        """Call `enter` with what a module needs before it runs, and `leave` after that."""
        for module, needed in needs.items():
            before = UncopiedHook(breaks_graph(partial(enter, needed), MOVES))
            after = UncopiedHook(breaks_graph(partial(leave, needed), MOVES))
            self._handles += [
                module.register_forward_pre_hook(before, prepend=True),
                module.register_forward_hook(after, always_call=True),
            ]

    def on_inputs(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Cast the floats that a model is called with."""

        def cast(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            return _cast(args, dtype), _cast(kwargs, dtype)

        handle = model.register_forward_pre_hook(UncopiedHook(cast), with_kwargs=True)
        self._handles.append(handle)

    def on_optimizer(
        self, optimizer: Optimizer, methods: Mapping[str, Callable[..., Any]], unscale: Unscale
    ) -> None:
        """Replace methods of one optimizer. Schedulers see a step that is their own."""
        self._optimizer = optimizer
        self._handles.append(Scaling(optimizer, unscale))
        vars(optimizer)["__getstate__"] = _refuse_copies
        assert set(methods) == set(_REPLACED)
        for name, method in methods.items():

            def replaced(
                self: Optimizer, *args: Any, method: Callable[..., Any] = method, **kwargs: Any
            ) -> Any:
                return method(*args, **kwargs)

            function: Any = self._only_step(optimizer, replaced) if name == "step" else replaced
            setattr(optimizer, name, MethodType(function, optimizer))

    def _only_step(self, optimizer: Optimizer, replaced: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step with the optimizer's hooks; the one that it had before is refused."""
        hooked, is_ours = Optimizer.profile_hook_step(replaced), False

        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_ours
            is_ours = True
            try:
                return hooked(*args, **kwargs)
            finally:
                is_ours = False

        def check(*_: Any) -> None:
            # It would change all weights by the gradients of one rank, and ranks come apart.
            if not is_ours:
                raise StateError(
                    "this step was taken from the optimizer before that was attached (kept as "
                    "`step = optimizer.step`, or compiled); call optimizer.step(), or take it, or "
                    "compile it, after attach"
                )

        self._handles.append(optimizer.register_step_pre_hook(breaks_graph(check, UPDATES)))
        function = breaks_graph(step, UPDATES)
        # A scheduler made before would warn of a step it has not wrapped itself.
        vars(function)["_wrapped_by_lr_sched"] = True
        return function


class _Reads:
    """Methods of one module, replaced so that `model.parameters()` waits for weights.

    Parameters wait when Python reads them; code outside of Python, such as a collective of
    torch.distributed, does not. So weights are there already where somebody asks for parameters, or
    copies or pickles a module. Copies have the plain methods.
    """

    def __init__(self, module: nn.Module, settle: Callable[[], None], unread: Unread) -> None:
        self._module, self._settle, self._unread = module, settle, unread
        self._ours = {
            "named_parameters": self._named_parameters,
            "zero_grad": self._zero_grad,
            "__getstate__": self._state,
        }
        self._before = {name: vars(module)[name] for name in self._ours if name in vars(module)}
        vars(module).update(self._ours)
        self._is_waiting = True

    def remove(self) -> None:
        """Put back what was there; under others who came later, do nothing from now on."""
        self._settle, self._unread = nothing, nullcontext
        there = vars(self._module)
        if all(there.get(name) == ours for name, ours in self._ours.items()):
            for name in self._ours:
                del there[name]
            there.update(self._before)

    def _plain(self, name: str) -> Any:
        return self._before.get(name) or getattr(type(self._module), name).__get__(self._module)

    def _named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_waiting and not torch.compiler.is_compiling() and not _is_in_forward():
            self._settle()
        return self._plain("named_parameters")(*args, **kwargs)

    def _zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forget gradients without waiting for weights: the next forward waits when it has to."""
        self._is_waiting = False
        try:
            with self._unread():
                self._plain("zero_grad")(*args, **kwargs)
        finally:
            self._is_waiting = True

    def _state(self) -> Any:
        self._settle()
        state = self._plain("__getstate__")()
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name not in self._ours}
            if "__getstate__" not in self._before:  # or those are of one that was attached before
                state |= self._before
        return state


def _is_in_forward() -> bool:
    """Whether a module runs that asks for parameters, as for their type: it has what it uses."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            return True
        frame = frame.f_back
    return False


def _refuse_copies() -> None:
    raise StateError(
        "a copy or a pickle of an attached optimizer would have no state, which is in slices on "
        "all ranks; take optimizer.state_dict()"
    )


@breaks_graph
def _wait(weights: PendingWeights, wait: Callable[[], None], *_: Any) -> None:
    if torch.is_grad_enabled():
        wait()
    else:
        weights.wait()


def _wait_alone(weights: PendingWeights, wait: Callable[[], None], *_: Any) -> None:
    """Wait, unless the compiled module around this one has waited."""
    if not torch.compiler.is_compiling():
        _wait(weights, wait)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype == torch.float32 else value
    if isinstance(value, dict):
        return {name: _cast(each, dtype) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_cast(each, dtype) for each in value)
    return value
