"""This process of a traced job: its recorder, its rank and its role."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.trace.recorder import TRACE_VARIABLE, Recorder, recorder_of

RANK_VARIABLE = "PENSTOCK_RANK"
"""The rank of a training process, for the processes that it starts."""
WITH_VARIABLE = "PENSTOCK_TRACE_WITH"
"""How reads are seen: `preload`, `strace`, or `python`, where hooks have to count their bytes."""
PROBLEMS = "problems.txt"
_COMPLAINED: set[str] = set()
_recorder: Recorder | None = None


def trace_folder() -> Path:
    """Return the folder of the run."""
    return Path(os.environ[TRACE_VARIABLE])


def recorder(role: str = "") -> Recorder:
    """Return the recorder of this process. Whoever says a role first decides it.

    After a fork the recorder goes on with a file of the child's own; the child is a worker unless
    it says otherwise before it records.
    """
    global _recorder
    if _recorder is not None:
        if role:
            _recorder.become(role)
        return _recorder
    rank = _rank()
    found = recorder_of(trace_folder(), role=role or "train", rank=rank)
    if RANK_VARIABLE not in os.environ:
        os.environ[RANK_VARIABLE] = str(rank)
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).penstock_set_rank(rank)
    _recorder = found
    return found


def recorder_if_any() -> Recorder | None:
    """Return the recorder of this process, if it has one yet."""
    return _recorder


def sees_reads() -> bool:
    """Return whether reads are seen below Python: by strace, or by a library in this process."""
    if os.environ.get(WITH_VARIABLE) == "strace":
        return True
    try:
        return hasattr(ctypes.CDLL(None), "penstock_lock_wait_ns")
    except OSError:
        return False


def _rank() -> int:
    """Return the rank as torch knows it, else as the environment says."""
    distributed: Any = sys.modules.get("torch.distributed")
    with suppress(AttributeError, RuntimeError, ValueError):
        if distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank())
    for variable in (RANK_VARIABLE, "RANK"):
        with suppress(KeyError, ValueError):
            return max(0, int(os.environ[variable]))
    return 0


def complain(text: str) -> None:
    """Write down, once, that a hook failed; the launcher shows it when the job has ended."""
    if text in _COMPLAINED:
        return
    _COMPLAINED.add(text)
    with suppress(OSError), (trace_folder() / PROBLEMS).open("a") as out:
        out.write(f"{text}\n")


def safely(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap what records: its failure is written down and does not reach the job."""

    @functools.wraps(function)
    def recorded(*arguments: Any, **options: Any) -> None:
        try:
            function(*arguments, **options)
        except Exception as error:
            if str(error).startswith("DataLoader worker"):
                # torch's signal handler raises this wherever the main thread stands when a worker
                # dies: it only happens to arrive here, and is the job's.
                raise
            complain(f"{function.__qualname__}: {type(error).__name__}: {error}")

    return recorded
