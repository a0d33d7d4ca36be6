"""Hooks for checkpoints: torch.save and torch.distributed.checkpoint."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

from penstock.trace.foreign.process import recorder, safely
from penstock.trace.schema import Kind


def hook_save(module: Any) -> None:
    """Record torch.save."""
    _hook(module, "save", place=1, keyword="f")


def hook_distributed_save(module: Any) -> None:
    """Record torch.distributed.checkpoint.save; of an asynchronous one, what the loop waits for."""
    for name in ("save", "async_save"):
        if hasattr(module, name):
            _hook(module, name, place=-1, keyword="checkpoint_id")


def _hook(module: Any, name: str, *, place: int, keyword: str) -> None:
    original = getattr(module, name)

    @functools.wraps(original)
    def save(*arguments: Any, **options: Any) -> Any:
        start_ns = time.perf_counter_ns()
        try:
            return original(*arguments, **options)
        finally:
            to = arguments[place] if 0 <= place < len(arguments) else options.get(keyword)
            _record(start_ns, to)

    setattr(module, name, save)


@safely
def _record(start_ns: int, to: Any) -> None:
    end_ns = time.perf_counter_ns()
    if not isinstance(to, str | os.PathLike):
        # A buffer in memory: workers and loggers send tensors that way, it is no checkpoint.
        named = getattr(to, "name", None)
        if not isinstance(named, str):
            return
        to = named
    path = Path(os.fspath(to))
    size_bytes = path.stat().st_size if path.is_file() else 0
    found = recorder()
    found.span(
        Kind.CHECKPOINT, start_ns, end_ns, object_id=found.name(str(path)), size_bytes=size_bytes
    )
