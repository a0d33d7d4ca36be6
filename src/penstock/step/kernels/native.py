"""Carrying out a kernel as C, compiled in a second and kept on disk.

A call leaves the interpreter lock, so lanes go on meanwhile; large blocks are shared out among as
many threads as torch may use.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ProgramError
from penstock.step.dtypes import torch_dtype
from penstock.step.kernels.body import KernelBody
from penstock.step.kernels.call import Given, KernelCall
from penstock.step.kernels.compiled import kernel_folder
from penstock.step.kernels.native_text import NativeText, native_text
from penstock.step.kernels.stages import Stage, stages_of
from penstock.step.kernels.tiled import ones_of
from penstock.step.program.nodes import Node

__all__ = ["Native", "c_compiler"]

FLAGS: tuple[str, ...] = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno")
FLAGS += ("-fno-trapping-math",)
FLAGS += ("-fopenmp-simd", "-fPIC", "-shared", "-std=gnu11")
PART_ELEMENTS_MIN = 128 * 1024
"""Of a block, for each thread: fewer are done before another thread has begun."""

_COMPILERS = ("gcc", "cc", "clang")
_TOTALS: dict[str, Callable[[Sequence[float]], float]] = {"sum": math.fsum, "max": max, "min": min}


@cache
def c_compiler() -> str | None:
    """Return the C compiler of this machine: what CC names, or a usual one."""
    named = os.environ.get("CC")
    return next(filter(None, map(shutil.which, (named,) if named else _COMPILERS)), None)


class Native:
    """A flat or row-wise body as functions of C."""

    def __init__(self, body: KernelBody) -> None:
        self._body = body
        self._stages = stages_of(body)
        self._ones = ones_of(body, self._stages)
        self._passes: dict[Any, list[tuple[Stage, NativeText, Any]]] = {}

    def __call__(self, call: KernelCall) -> None:
        """Write what leaves into its tensors."""
        key = _widths(call)
        if key not in self._passes:
            self._passes[key] = self._made(dict(key))
        values: dict[str, Given] = dict(call.inputs)
        ones: dict[str, Tensor] = {}
        for stage, text, function in self._passes[key]:
            for node in stage.ones:
                ones[node.name] = self._one(node, call, values, ones)
            if text.stores or text.totals:
                self._run(text, function, call, values, ones)
            for name, value in stage.stores:
                out = call.outs[name]
                if self._body.reach[value] == "one":
                    assert isinstance(out, Tensor)
                    out.copy_(ones[value] if value in ones else values[value])  # type: ignore[arg-type]
                values[name] = out

    def _made(self, widths: dict[str, int]) -> list[tuple[Stage, NativeText, Any]]:
        texts = [(stage, native_text(self._body, stage, widths)) for stage in self._stages]
        return [(stage, text, _function(text)) for stage, text in texts]

    def _one(
        self, node: Node, call: KernelCall, values: dict[str, Given], ones: dict[str, Tensor]
    ) -> Tensor:
        known: dict[str, Any] = call.numbers | values | ones
        made = self._ones[node.name](*(known[name] for name in node.inputs))
        return made.to(torch_dtype(self._body.dtype(node.name)))

    def _run(
        self,
        text: NativeText,
        function: Any,
        call: KernelCall,
        values: dict[str, Given],
        ones: dict[str, Tensor],
    ) -> None:
        body = self._body
        kept = {n: n.removeprefix("kept ") for n in text.stores if n.startswith("kept ")}
        room = {
            name: torch.empty(call.place.block, dtype=torch_dtype(body.dtype(value)))
            for name, value in kept.items()
        }
        tensors = [values[name] for name in text.loads]
        tensors += [room[n] if n in room else call.outs[n] for n in text.stores]
        numbers = [float(call.numbers[name]) for name in text.numbers]
        numbers += [float(ones[name]) for name in text.ones]
        place = call.place
        where = [place.first_row, place.first_column, place.row_length, place.whole_row_length]
        pointers = [one.data_ptr() for given in tensors for one in _several(given)]
        args = (
            (ctypes.c_void_p * len(pointers))(*pointers),
            (ctypes.c_double * len(numbers))(*numbers),
            (ctypes.c_int64 * 5)(*where, place.is_run),
        )
        elements = math.prod(place.block)
        row = place.row_length if body.kind == "rows" else 1
        found = _shared_out(function, args, (elements // max(1, row), row), len(text.totals))
        for name, totals in zip(text.totals, zip(*found, strict=True), strict=True):
            total = _TOTALS[body.by_name[name].op](totals)
            ones[name] = torch.tensor(total, dtype=torch_dtype(body.dtype(name)))
        values |= {value: room[name] for name, value in kept.items()}


def _shared_out(
    function: Any, args: tuple[Any, ...], lengths: tuple[int, int], num_totals: int
) -> list[list[float]]:
    """Run a function over a block, in one piece for each thread; return the sums of each.

    Args:
        function: of one piece.
        args: what it is given, but for the sums and the piece.
        lengths: how many rows, and of how many elements; of a flat block, elements and 1.
        num_totals: how many sums it makes.
    """
    length, row = lengths
    pieces = max(1, min(torch.get_num_threads(), length * row // PART_ELEMENTS_MIN))
    # Pieces begin at lines of the cache, so no two threads write to one.
    size = -(-length // pieces) if row > 1 else -(-length // pieces) + 63 & ~63

    def run(index: int) -> list[float]:
        totals = (ctypes.c_double * max(1, num_totals))()
        begin = min(index * size, length)
        function(*args, totals, begin, min(begin + size, length))
        return list(totals)[:num_totals]

    if pieces == 1:
        return [run(0)]
    others = [_threads().submit(run, index) for index in range(1, pieces)]
    return [run(0), *(other.result() for other in others)]


@cache
def _threads() -> ThreadPoolExecutor:
    most = max(1, (os.cpu_count() or 2) - 1)
    return ThreadPoolExecutor(max_workers=most, thread_name_prefix="penstock kernel")


def _widths(call: KernelCall) -> tuple[tuple[str, int], ...]:
    out = {n: len(t) for n, t in call.inputs.items() if not isinstance(t, Tensor)}
    out |= {f"out {n}": len(t) for n, t in call.outs.items() if not isinstance(t, Tensor)}
    return tuple(sorted(out.items()))


def _several(given: Given) -> Sequence[Tensor]:
    return [given] if isinstance(given, Tensor) else given


# -- compiling ---------------------------------------------------------------------------------


def _function(text: NativeText) -> Any:
    function = getattr(ctypes.CDLL(str(_library(text.text))), text.name)
    function.restype = None
    function.argtypes = [*[ctypes.c_void_p] * 4, ctypes.c_int64, ctypes.c_int64]
    return function


def _library(text: str) -> Path:
    """Return the compiled library of a text, which is compiled now if it never was."""
    compiler = c_compiler()
    if compiler is None:
        raise ProgramError("a native kernel needs a C compiler (gcc, clang), and there is none")
    said = "\0".join([text, compiler, *FLAGS, _processor()])
    digest = hashlib.blake2b(said.encode(), digest_size=16).hexdigest()
    path = kernel_folder() / "native" / f"{digest}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        source, made = Path(folder) / "kernel.c", Path(folder) / "kernel.so"
        source.write_text(text)
        command = [compiler, *FLAGS, str(source), "-o", str(made), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            first = (done.stderr.strip().splitlines() or ["no message"])[0]
            raise ProgramError(f"{compiler} did not compile a kernel ({first})")
        # Several ranks may compile the same; whoever comes last replaces what is the same anyway.
        made.replace(path)
    return path


@cache
def _processor() -> str:
    """Return what this machine's processor can do: code for one may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    import platform

    found = [x for x in lines if x.startswith(("flags", "Features", "model name"))]
    return "\n".join([platform.machine(), *dict.fromkeys(found)])
