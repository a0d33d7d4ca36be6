"""A kernel through `torch.compile`: one pass over memory, after seconds of compiling.

Compiled code is kept on disk, so a machine compiles once. Numbers of the host are passed as tensors
and sizes are dynamic, so a new learning rate, or a chunk with another place or length, does not
compile again.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from penstock.step.kernels.body import KernelBody
from penstock.step.kernels.call import KernelCall, write
from penstock.step.kernels.eager import function_of

__all__ = ["Compiled", "can_compile", "kernel_folder"]

_COMPILERS = ("g++", "clang++", "c++")
_HALVES = (" low", " high")
_GATE = threading.Lock()
"""One compile at a time: the compiler has global state."""


def kernel_folder() -> Path:
    """Return the folder in which compiled kernels are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "penstock" / "kernels"


def can_compile(device: torch.device) -> bool:
    """Whether there is a compiler for a device."""
    if device.type == "cpu":
        return bool(os.environ.get("CXX")) or any(map(shutil.which, _COMPILERS))
    return importlib.util.find_spec("triton") is not None


class Compiled:
    """A body as compiled functions, one for each way in which its outputs share inputs' memory."""

    def __init__(self, body: KernelBody) -> None:
        self._body = body
        self._plain = function_of(body)
        self._host = body.numbers
        self._is_flat = body.kind == "flat" and not body.has_dropout
        """Whether it can be seen as one run of elements."""
        self._functions: dict[Any, Callable[..., Any]] = {}

    def __call__(self, call: KernelCall) -> list[Tensor]:
        """Write results into their tensors; return those that have none."""
        key = self._key(call)
        function = self._functions.get(key)
        if function is None:
            # The first run is inside as well: that is when torch.compile compiles.
            with _GATE:
                function = self._functions.get(key) or self._compiled(call)
                found = self._run(function, call)
                self._functions[key] = function
                return found
        return self._run(function, call)

    def _key(self, call: KernelCall) -> Any:
        aliases = tuple(sorted(call.aliases.items()))
        return str(call.device), aliases, tuple(call.outs), tuple(sorted(call.widths.items()))

    def _compiled(self, call: KernelCall) -> Callable[..., Any]:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kernel_folder()))
        import torch._inductor.config as inductor

        if hasattr(inductor, "fx_graph_cache"):
            inductor.fx_graph_cache = True
        return torch.compile(self._written(call), fullgraph=True, dynamic=True)

    def _written(self, call: KernelCall) -> Callable[..., Any]:
        """Return a function that computes and writes, with everything that such calls share."""
        body, plain = self._body, self._plain
        index = {name: k for k, name in enumerate(body.inputs)}
        places = [index[call.aliases[n]] if n in call.aliases else -1 for n in call.outs]
        written = [name in call.outs for name in body.outputs]
        is_seed = [name.endswith(_HALVES) for name in self._host]
        whole_row = call.place.whole_row_length

        def step(inputs: Any, outs: Any, floats: Tensor, ints: Tensor) -> Any:
            reals, wholes = iter(floats.unbind()), iter(ints.unbind())
            scalars = [next(wholes) if seed else next(reals) for seed in is_seed]

            def numbers(x: Tensor) -> Tensor:
                return _numbers(x, ints[-2], ints[-1], whole_row)

            made = plain(inputs, scalars, numbers)
            found = [value for value, is_out in zip(made, written, strict=True) if is_out]
            for where, out, value in zip(places, outs, found, strict=True):
                write(inputs[where] if where >= 0 else out, value)
            return [value for value, is_out in zip(made, written, strict=True) if not is_out]

        # torch.compile caches by code object, a few entries for each: this function needs its own.
        return FunctionType(
            step.__code__.replace(), step.__globals__, "step", None, step.__closure__
        )

    def _run(self, function: Callable[..., Any], call: KernelCall) -> list[Tensor]:
        body, numbers = self._body, call.numbers
        inputs = [_seen(call.inputs[name], self._is_flat) for name in body.inputs]
        outs = [
            None if name in call.aliases else _seen(out, self._is_flat)
            for name, out in call.outs.items()
        ]
        reals = [float(numbers[name]) for name in self._host if not name.endswith(_HALVES)]
        ints = [int(numbers[name]) for name in self._host if name.endswith(_HALVES)]
        ints += [call.place.first_row, call.place.first_column]
        wide = torch.float64 if body.is_wide else torch.float32
        floats = torch.tensor(reals, dtype=wide).to(call.device)
        found: list[Tensor] = function(inputs, outs, floats, torch.tensor(ints).to(call.device))
        return found


def _seen(given: Any, flat: bool) -> Any:
    if not isinstance(given, Tensor):
        return [_seen(one, flat) for one in given]
    return given.view(-1) if flat and given.ndim > 1 else given


def _numbers(block: Tensor, row: Tensor, column: Tensor, whole_row: int) -> Tensor:
    length = block.shape[-1]
    columns = torch.arange(length, device=block.device) + column
    if block.ndim == 1:
        return columns
    rows = torch.arange(block.numel() // length, device=block.device) + row
    return rows[:, None] * whole_row + columns
