"""Running a function in a forked child, with a guard against hanging."""

from __future__ import annotations

import os
import pickle
import select
import signal
import traceback
from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")

HANG_S = 60.0
"""A child that takes longer hangs."""


def in_child(function: Callable[[], R]) -> R:
    """Return what a function returns in a forked child; raise what went wrong there."""
    return wait_for(start_child(function))


def start_child(function: Callable[[], R]) -> tuple[int, int, Callable[[], R]]:
    """Fork a child that runs a function; `wait_for` gets its result."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        # The child leaves by os._exit, whatever happens: it must not return into the tests.
        os.close(reading)
        try:
            answer = (True, function())
        except BaseException:
            answer = (False, traceback.format_exc())  # type: ignore[assignment]
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    # Else the pipe would stay open when the child dies, and `wait_for` would see no end of file.
    os.close(writing)
    return pid, reading, function


def wait_for(child: tuple[int, int, Callable[[], R]]) -> R:
    """Return a child's result."""
    pid, reading, _ = child
    with os.fdopen(reading, "rb") as pipe:
        if not select.select([pipe], [], [], HANG_S)[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"the forked child did not answer within {HANG_S:g} s")
        # Not to the end of file: a grandchild may still hold the pipe open.
        has_worked, value = pickle.load(pipe)
    os.waitpid(pid, 0)
    assert has_worked, f"in the forked child:\n{value}"
    result: R = value
    return result
