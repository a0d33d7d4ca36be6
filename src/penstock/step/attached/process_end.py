"""The end of a process: what others still need of this rank is given to them before it goes."""

from __future__ import annotations

import atexit
import contextlib
import sys
import weakref
from collections.abc import Callable
from multiprocessing import util

__all__ = ["at_exit", "is_failing"]

_EXIT_PRIORITY = 100
"""Before multiprocessing's own finalizers, which have 10 and less."""


def at_exit(finish: Callable[[], None]) -> None:
    """Call a method once when this process ends, if its object is still there."""
    # Processes of multiprocessing end by its finalizers, and forked ones without atexit. All others
    # come to atexit first, when connections are still open.
    args = (weakref.WeakMethod(finish),)
    atexit.register(util.Finalize(None, _call, args=args, exitpriority=_EXIT_PRIORITY))


def is_failing() -> bool:
    """Whether this process ends by an error: an uncaught one, or one on its way out."""
    error = sys.exc_info()[1]
    is_exit = error is None or (isinstance(error, SystemExit) and not error.code)
    return hasattr(sys, "last_value") or not is_exit


def _call(finish: weakref.WeakMethod[Callable[[], None]]) -> None:
    here = finish()
    if here is not None:
        with contextlib.suppress(Exception):
            here()
