"""Carrying out a kernel as C, compiled in a second and kept on disk.

A call releases the interpreter lock, so lanes continue meanwhile; large blocks are divided among as
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
from penstock.step.kernels.call import KernelCall, several
from penstock.step.kernels.compiled import kernel_folder
from penstock.step.kernels.native_text import NativeText, native_text
from penstock.step.kernels.staged import StagedKernel
from penstock.step.kernels.stages import Stage

__all__ = ["Native", "c_compiler"]

FLAGS: tuple[str, ...] = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno")
FLAGS += ("-fno-trapping-math",)
FLAGS += ("-fopenmp-simd", "-fPIC", "-shared", "-std=gnu11")
PART_ELEMENTS_MIN = 128 * 1024
"""Elements of a block for each thread: fewer are done before another thread has begun."""

_COMPILERS = ("gcc", "cc", "clang")
_TOTALS: dict[str, Callable[[Sequence[float]], float]] = {"sum": math.fsum, "max": max, "min": min}


@cache
def c_compiler() -> str | None:
    """Return the C compiler of this machine: what CC names, or a usual one."""
    named = os.environ.get("CC")
    return next(filter(None, map(shutil.which, (named,) if named else _COMPILERS)), None)


class Native(StagedKernel):
    """A flat or row-wise body as functions of C."""

    def __init__(self, body: KernelBody) -> None:
        super().__init__(body)
        self._functions: dict[Any, tuple[NativeText, Any]] = {}

    def _prepare(self, stage: Stage, call: KernelCall) -> None:
        self._function_of(stage, call)

    def _run(
        self, stage: Stage, call: KernelCall, values: dict[str, Any], ones: dict[str, Tensor]
    ) -> None:
        text, function = self._function_of(stage, call)
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
        pointers = [one.data_ptr() for given in tensors for one in several(given)]
        args = (
            (ctypes.c_void_p * len(pointers))(*pointers),
            (ctypes.c_double * len(numbers))(*numbers),
            (ctypes.c_int64 * 5)(*where, place.is_run),
        )
        elements = math.prod(place.block)
        row = place.row_length if body.kind == "rows" else 1
        found = _divided(function, args, (elements // max(1, row), row), len(text.totals))
        for name, totals in zip(text.totals, zip(*found, strict=True), strict=True):
            total = _TOTALS[body.by_name[name].op](totals)
            ones[name] = torch.tensor(total, dtype=torch_dtype(body.dtype(name)))
        values |= {value: room[name] for name, value in kept.items()}

    def _function_of(self, stage: Stage, call: KernelCall) -> tuple[NativeText, Any]:
        widths = call.widths
        key = stage.index, *widths.items()
        if key not in self._functions:
            text = native_text(self._body, stage, widths)
            self._functions[key] = text, _function(text)
        return self._functions[key]


def _divided(
    function: Any, args: tuple[Any, ...], lengths: tuple[int, int], num_totals: int
) -> list[list[float]]:
    """Run a function over a block, in one piece for each thread; return the sums of each.

    Args:
        function: of one piece.
        args: its arguments before the sums and the piece.
        lengths: the number of rows and their length; of a flat block, its elements and 1.
        num_totals: how many sums it makes.
    """
    length, row = lengths
    pieces = max(1, min(torch.get_num_threads(), length * row // PART_ELEMENTS_MIN))
    # Pieces begin at cache lines: threads that wrote to one line would slow each other down.
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


# -- compiling ---------------------------------------------------------------------------------


def _function(text: NativeText) -> Any:
    function = getattr(ctypes.CDLL(str(_library(text.text))), text.name)
    function.restype = None
    function.argtypes = [*[ctypes.c_void_p] * 4, ctypes.c_int64, ctypes.c_int64]
    return function


def _library(text: str) -> Path:
    """Return the compiled library of a text; compile it if that was never done."""
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
        # Several ranks may compile the same text; the last one replaces an equal file.
        made.replace(path)
    return path


@cache
def _processor() -> str:
    """Return the features of this machine's processor: code for one may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    import platform

    found = [x for x in lines if x.startswith(("flags", "Features", "model name"))]
    return "\n".join([platform.machine(), *dict.fromkeys(found)])
