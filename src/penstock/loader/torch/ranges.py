"""Ranges of the loader in people's own profiles: torch.profiler, and NVTX for Nsight Systems.

Nothing is opened, and nothing but two checks is paid, while no profiler runs.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.autograd.profiler as _profiler

_NONE: AbstractContextManager[Any] = nullcontext()
_INJECTION = "NVTX_INJECTION64_PATH"
"""A tool that reads NVTX ranges, such as nsys, names its library to the process in this variable:
before the process begins, so it is read once."""
_wants_nvtx = bool(os.environ.get(_INJECTION))


def range_of(name: str) -> AbstractContextManager[Any]:
    """Return a range for `with`: one that is recorded if somebody records."""
    # Set by torch.profiler, and by emit_nvtx and emit_itt, which turn it into their own ranges.
    if _profiler._is_profiler_enabled:
        return _profiler.record_function(name)
    if _wants_nvtx and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.nvtx.range(name)
    return _NONE
