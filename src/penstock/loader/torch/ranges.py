"""Ranges of the loader in the user's profiles: torch.profiler, and NVTX for Nsight Systems.

While no profiler runs, this costs two checks.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.autograd.profiler as _profiler

_NONE: AbstractContextManager[Any] = nullcontext()
_INJECTION = "NVTX_INJECTION64_PATH"
"""Tools that read NVTX ranges, such as nsys, set this variable before the process starts, so it is
read once."""
_wants_nvtx = bool(os.environ.get(_INJECTION))


def range_of(name: str) -> AbstractContextManager[Any]:
    """Return a range for `with`, which is recorded while a profiler runs."""
    # Set by torch.profiler, and by emit_nvtx and emit_itt, which make their own ranges of it.
    if _profiler._is_profiler_enabled:
        return _profiler.record_function(name)
    if _wants_nvtx and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.nvtx.range(name)
    return _NONE
