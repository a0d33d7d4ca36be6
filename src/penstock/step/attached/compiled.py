"""Modules that torch.compile runs: what can be hooked there, and what must not be seen by it.

A compiled module is one thing: no hook is called in it, and those that are there when it is traced
become part of its code. So it waits as a whole for all weights in it, before its code is entered,
and hooks of modules inside say nothing while they are traced. Called alone, they do as always.

Who compiles later, or compiles a function around modules, has hooks in the traced code. They stop
the trace (`breaks_graph`) and are called between two pieces of it: right, and slower. Code that was
compiled before there were hooks would not ask whether there are any: it is thrown away (`forget`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._compile import _disable_dynamo

__all__ = [
    "MOVES",
    "UPDATES",
    "CompiledCallHook",
    "compiled_in",
    "forget",
    "is_compiled",
    "breaks_graph",
]

P = ParamSpec("P")
T = TypeVar("T")

WAITS = (
    "an attached model waits for its weights here, which is not part of compiled code; with "
    "fullgraph=True, compile the model first and attach what torch.compile returns, or use "
    "model.compile(); or compile without fullgraph"
)
UPDATES = (
    "the step of an attached optimizer communicates, which is not part of compiled code; call "
    "optimizer.step() as it is, or compile without fullgraph"
)
MOVES = (
    "weights in slices come and go between modules, which is not part of compiled code; compile "
    "without fullgraph, or attach without reshard"
)
"""Reasons that torch prints where a graph has to break and fullgraph=True forbids it."""


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of a module runs compiled code: by torch.compile(module), or its compile()."""
    if module._compiled_call_impl is not None:
        return True
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and isinstance(module, dynamo.eval_frame.OptimizedModule)


def compiled_in(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the modules inside compiled ones, each with the outermost one that it is in."""
    made: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if module not in made and is_compiled(module):
            for inner in module.modules():
                if inner is not module:
                    made.setdefault(inner, module)
    return made


def forget() -> None:
    """Have torch compile everything anew: code from before has no hooks in it."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


def breaks_graph(call: Callable[P, T], why: str = WAITS) -> Callable[P, T]:
    """Return a function that is called by compiled code and never part of it.

    With fullgraph=True there is no code around it, and torch says why.
    """

    @_disable_dynamo
    def outside(*args: P.args, **kwargs: P.kwargs) -> T:
        return call(*args, **kwargs)

    # As torch.compiler.disable(reason=...) does, which would import the compiler for nothing.
    vars(outside).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=why)

    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        # The way around costs some microseconds, so only compiled code takes it.
        if torch.compiler.is_compiling():
            return outside(*args, **kwargs)
        return call(*args, **kwargs)

    return called


class CompiledCallHook:
    """Something that is done before each call of a compiled module, and something after it."""

    def __init__(
        self,
        module: nn.Module,
        before: Callable[[nn.Module], None] | None = None,
        after: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self._module: Any = module
        self._handles: list[Any] = []
        self._call = module._compiled_call_impl
        if self._call is not None:  # by its compile(): its own hooks would be part of the code
            self._module._compiled_call_impl = partial(self._around, before, after)
            return
        if before is not None:
            hook = partial(_first, before)
            self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
        if after is not None:
            hook = partial(_first, after)
            self._handles.append(module.register_forward_hook(hook, always_call=True))

    def _around(
        self,
        before: Callable[[nn.Module], None] | None,
        after: Callable[[nn.Module], None] | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        assert self._call is not None
        if before is not None:
            before(self._module)
        try:
            return self._call(*args, **kwargs)
        finally:
            if after is not None:
                after(self._module)

    def remove(self) -> None:
        """Take it off again."""
        for handle in self._handles:
            handle.remove()
        if self._call is not None:
            self._module._compiled_call_impl = self._call


def _first(call: Callable[[nn.Module], None], module: nn.Module, *_: Any) -> None:
    call(module)
