"""What the first step shows of a model: which modules use a parameter, and when gradients come.

A gather has to be over before a parameter is used, so the one that is used first is gathered first.
A module uses its own parameters as a rule, but not always: torch's attention reads the weights of
its output projection without calling it. So while the first forward runs, every torch function is
looked at once, with the module that is running. Nothing of this is left in later steps.

What runs in a compiled module is not looked at: all of its parameters are taken for used by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from penstock.step.attached.compiled import (
    CompiledCallHook,
    breaks_graph,
    compiled_in,
    forget,
    is_compiled,
)
from penstock.step.attached.fit import changed
from penstock.step.attached.hooks import UncopiedHook
from penstock.step.attached.released_params import is_in_backward, tensors_in

__all__ = ["Record"]


class Record:
    """Uses and gradients of parameters, by their numbers, in the order in which they came."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self.used: dict[int, None] = {}
        self.ready: dict[int, None] = {}
        self.users: dict[int, dict[nn.Module, None]] = {}
        """Modules that were running when a parameter was used."""
        self.calls: dict[nn.Module, Counter[nn.Module]] = {}
        """By outermost module: how often one call of it calls each module, at the most."""
        self._called: Counter[nn.Module] = Counter()
        self._versions: dict[int, tuple[int, int]] = {}
        """Address and version of each gradient, by number."""
        self._numbers = {id(param): number for number, param in enumerate(params)}
        self._running: list[nn.Module] = []
        self._mode: Any = None
        self._handles: list[Any] = []

    def watch(self, model: nn.Module) -> None:
        """Look at every forward of a model and of its modules from now on."""
        forget()
        inside = compiled_in(model)
        enter, leave = breaks_graph(self._enter), breaks_graph(self._leave)
        for module in model.modules():
            if module in inside:
                continue
            if is_compiled(module):
                self._handles.append(
                    CompiledCallHook(module, self._enter_compiled, self._leave_compiled)
                )
                continue
            self._handles += [
                module.register_forward_pre_hook(UncopiedHook(enter)),
                module.register_forward_hook(UncopiedHook(leave), always_call=True),
            ]

    def end(self) -> None:
        """Look no more."""
        while self._running:
            self._leave(self._running[-1])
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def by_use(self, count: int) -> list[int]:
        """Return all parameters, the first one used first; those not seen come last."""
        return list(dict.fromkeys([*self.used, *range(count)]))

    def by_readiness(self, count: int) -> list[int]:
        """Return all parameters, the first one with a gradient first."""
        return list(dict.fromkeys([*self.ready, *reversed(self.by_use(count))]))

    def graded(self, number: int, param: torch.Tensor, *, is_accumulating: bool) -> None:
        """Take note of a gradient."""
        self.ready.setdefault(number)
        self._versions.pop(number, None)
        with torch._C.DisableTorchFunctionSubclass():
            if not is_accumulating and param.grad is not None and not param.grad.is_sparse:
                self._versions[number] = param.grad.data_ptr(), param.grad._version

    def check(self, params: Sequence[torch.Tensor]) -> None:
        """Raise if a gradient has changed after backward, as later steps do."""
        for number, (place, version) in self._versions.items():
            grad = params[number].grad
            with torch._C.DisableTorchFunctionSubclass():
                is_same = grad is None or grad.data_ptr() != place or grad._version == version
            if not is_same:
                raise changed(number, params[number])

    def _enter(self, module: nn.Module, *_: Any) -> None:
        if not self._running and torch.is_grad_enabled():
            self._mode = _Mode(self._seen, self._numbers)
            self._mode.__enter__()
        if not self._running:
            self._called = Counter()
        self._called[module] += 1
        self._running.append(module)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if module in self._running:
            del self._running[self._running.index(module) :]
        if not self._running and self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None
            if not is_in_backward():  # where a checkpoint computes once more
                self.calls[module] = self.calls.get(module, Counter()) | self._called

    def calls_of(self, module: nn.Module) -> int:
        """Return how often a step calls a module, unless it calls the model several times."""
        return sum(called[module] for called in self.calls.values())

    def _enter_compiled(self, module: nn.Module) -> None:
        if torch.is_grad_enabled():
            for param in module.parameters():
                number = self._numbers.get(id(param))
                if number is not None:
                    self.used.setdefault(number)
                    self.users.setdefault(number, {}).setdefault(module)
        if self._mode is not None:  # or it would be compiled as well
            self._mode.__exit__(None, None, None)

    def _leave_compiled(self, module: nn.Module) -> None:
        if self._mode is not None:
            self._mode.__enter__()

    def _seen(self, number: int) -> None:
        self.used.setdefault(number)
        if self._running:
            self.users.setdefault(number, {}).setdefault(self._running[-1])


class _Mode(TorchFunctionMode):
    def __init__(self, seen: Callable[[int], None], numbers: Mapping[int, int]) -> None:
        super().__init__()
        self._seen = seen
        self._numbers = numbers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if torch.compiler.is_compiling():  # by somebody else: this must not be part of the code
            return func(*args, **named)
        for tensor in tensors_in([*args, *named.values()]):
            if id(tensor) in self._numbers:
                self._seen(self._numbers[id(tensor)])
        return func(*args, **named)
