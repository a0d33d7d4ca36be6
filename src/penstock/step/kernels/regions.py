"""Kernels: some nodes of a program as one function of tensors.

    kernel = kernel_of(program, names, outputs=("w.update",))
    kernel([g, w, m, v], {"lr": 1e-3, "t": 1}, out=[w])

Backends, all with the same meaning:

    eager     torch's own operations on whole tensors; any shapes, any device
    tiled     the same in pieces that fit in the cache: no compiler needed, the same bits
    native    our own C for flat kernels on the CPU: one pass over memory, compiled in a second
    compile   `torch.compile`: one pass over memory, after many seconds of compiling
    triton    our own kernel text for CUDA, which can also reduce over W ranks and write to all
    auto      on CUDA triton; on the CPU native, or tiled without such a form or a compiler

Compiled code is kept on disk. Ranks never switch backends on the way: if they all hold the same
state, the last bit of a sum must not depend on whose compiler was done first.

Narrow floats are computed with 32 bits and results are rounded. A result may have exactly the
memory of an input, as states do: each backend reads an element before it writes it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from penstock.errors import OptionError, ProgramError
from penstock.step.kernels.body import KernelBody, body_of
from penstock.step.kernels.call import Given, KernelCall, Out, call_of, numbers_of, several
from penstock.step.kernels.compiled import Compiled, can_compile
from penstock.step.kernels.draws import ElementSpan
from penstock.step.kernels.eager import function_of
from penstock.step.kernels.native import Native, c_compiler
from penstock.step.kernels.native_text import can_write
from penstock.step.kernels.tiled import Tiled
from penstock.step.program.nodes import Program

__all__ = ["BACKENDS", "Kernel", "check_backend", "kernel_of"]

BACKENDS = ("auto", "eager", "tiled", "native", "compile", "triton")

_log = logging.getLogger("penstock.step")
_said: set[str] = set()


def kernel_of(
    program: Program,
    nodes: Sequence[str],
    *,
    outputs: Sequence[str] | None = None,
    backend: str = "auto",
) -> Kernel:
    """Return a function that computes some nodes of a program.

    Args:
        program: whose nodes they are.
        nodes: their names. Arithmetic on scalars that they need comes along by itself.
        outputs: the results; by default the values that other nodes need.
        backend: one of `BACKENDS`.
    """
    check_backend(backend)
    return Kernel(body_of(program, nodes, outputs), backend)


def check_backend(backend: str) -> None:
    """Refuse a backend that is not there."""
    if backend not in BACKENDS:
        raise OptionError(f"no backend {backend!r} for kernels; there are {', '.join(BACKENDS)}")


class Kernel:
    """A function of tensors, made by `kernel_of`."""

    def __init__(self, body: KernelBody, backend: str) -> None:
        self.body = body
        self.backend = backend
        self._known: tuple[tuple[float | None, ...], dict[str, float]] | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors that it reads, in the order in which they are passed."""
        return self.body.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the values that it returns."""
        return self.body.outputs

    def __repr__(self) -> str:
        return f"<kernel {', '.join(self.inputs)} -> {', '.join(self.outputs)} ({self.backend})>"

    def __call__(
        self,
        tensors: Sequence[Given],
        scalars: Mapping[str, float],
        *,
        out: Sequence[Out] | None = None,
        starts: tuple[int, ...] | None = None,
    ) -> list[Any]:
        """Return the results, written into `out` if that is given.

        Args:
            tensors: in the order of `inputs`; for a reduction one tensor of each rank.
            scalars: numbers by name; those with defaults may be left out.
            out: where results go, in the order of `outputs`; for None memory is allocated. For a
                gather, one tensor of each rank.
            starts: coordinates of the block's first element in the whole value. A tensor that has
                the whole value while others have the block is cut to match.
        """
        call = call_of(self.body, tensors, self._numbers(scalars), out, starts)
        return self._finished(call, self._way(call)(call), out)

    def _numbers(self, scalars: Mapping[str, float]) -> dict[str, float]:
        """Return the numbers of a call; they are cached, since chunks of a step share them."""
        key = tuple(scalars.get(name) for name in self.body.scalars)
        # One tuple, read and replaced whole: threads of lanes may call this kernel at once.
        known = self._known
        if known is None or known[0] != key:
            known = self._known = key, numbers_of(self.body, scalars)
        return known[1]

    def _finished(
        self, call: KernelCall, loose: list[Any] | None, out: Sequence[Out] | None
    ) -> list[Any]:
        call.finish()
        made = iter(loose or ())
        results: list[Any] = []
        for index, name in enumerate(self.outputs):
            given = out[index] if out is not None else None
            if name not in call.outs:
                found = next(made)
                for one in several(given):
                    one.copy_(found)
                results.append(found if given is None else given)
            elif given is not None:
                results.append(given)
            else:
                results.append(several(call.outs[name])[0])
        return results

    # -- backends ------------------------------------------------------------------------------

    def _way(self, call: KernelCall) -> Callable[[KernelCall], list[Any] | None]:
        kind, backend = self.body.kind, self.backend
        if self.body.strays:
            name = self.body.strays[0]
            raise ProgramError(
                f"dropout ({name}) of {self.body.types[name]} in a kernel over {self.body.full}; "
                "leave it out"
            )
        if backend == "eager":
            return self._eager
        if kind == "loose":
            compiles = backend == "compile" and not self.body.has_dropout and _has_compiler(call)
            return self._compiled if compiles else self._eager
        if not all(call.place.block):
            return self._eager  # Values that are not empty, beside an empty block.
        if backend == "tiled" or (backend != "auto" and self._is_scattered(call)):
            return self._tiled if call.device.type == "cpu" else self._eager
        if backend == "native":
            return self._native if can_write(self.body) else self._tiled
        if backend == "compile":
            return self._compiled if _has_compiler(call) else self._tiled
        if backend == "triton":
            return self._triton
        return self._chosen(call)

    def _is_scattered(self, call: KernelCall) -> bool:
        """Whether dropout needs positions of elements that no simple formula gives."""
        return self.body.has_dropout and not call.place.is_plain

    def _chosen(self, call: KernelCall) -> Callable[[KernelCall], list[Any] | None]:
        if call.device.type == "cuda":
            from penstock.step.kernels.triton import can_run

            can = can_run(self.body, call) and not self._is_scattered(call)
            return self._triton if can else self._eager
        if call.device.type != "cpu":
            return self._eager
        if self._is_scattered(call) or not can_write(self.body):
            return self._tiled
        if not c_compiler():
            _say_once("no C compiler was found: kernels run in tiles, about 4 times slower")
            return self._tiled
        return self._native

    def _eager(self, call: KernelCall) -> list[Any]:
        body = self.body
        host = [call.numbers[name] for name in body.numbers]
        numbers = ElementSpan(call.place, 0, math.prod(call.place.block), call.device)
        made = self._function([call.inputs[name] for name in body.inputs], host, numbers)
        left = []
        for name, value in zip(body.outputs, made, strict=True):
            if name not in call.outs:
                left.append(value)
                continue
            for one in several(call.outs[name]):
                if one.numel():
                    one.copy_(value.view(one.shape))
        return left

    @cached_property
    def _function(self) -> Callable[..., list[Any]]:
        return function_of(self.body)

    @cached_property
    def _tiled(self) -> Tiled:
        return Tiled(self.body)

    @cached_property
    def _compiled(self) -> Compiled:
        return Compiled(self.body)

    @cached_property
    def _native(self) -> Native:
        return Native(self.body)

    @cached_property
    def _triton(self) -> Callable[[KernelCall], None]:
        from penstock.step.kernels.triton import Launcher

        return Launcher(self.body)


def _has_compiler(call: KernelCall) -> bool:
    found = can_compile(call.device)
    if not found:
        _say_once("torch.compile finds no compiler here: kernels run without it")
    return found


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        _log.warning(message)
