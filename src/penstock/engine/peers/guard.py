"""Calls callbacks from shared peer threads; an error is logged and does not end the thread.

Other hosts can cause some warnings as often as they like, so the log of these is rate-limited.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

SELDOM_S = 10.0
"""The shortest time between two warnings of one kind."""
_KINDS_MAX = 64


class RateLimitedLog:
    """A log for warnings that other hosts can cause, and so must not be able to cause often.

    The next warning of a kind tells how many were left out.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        # Without a lock: if two threads warn at once, only a count may be wrong.
        self._said: dict[str, tuple[float, int]] = {}

    def warning(self, text: str, *values: object, error: Exception | None = None) -> None:
        """Warn, unless it was just done; a kind is a text before its values are put in."""
        now_s = time.monotonic()
        said_s, left_out = self._said.get(text, (-SELDOM_S, 0))
        if now_s - said_s < SELDOM_S:
            self._said[text] = (said_s, left_out + 1)
            return
        if len(self._said) >= _KINDS_MAX:
            self._said.clear()
        self._said[text] = (now_s, 0)
        more = f" ({left_out} more like it were not mentioned)" if left_out else ""
        self._log.warning(text + more, *values, exc_info=error)


_limited_log = RateLimitedLog(logging.getLogger("penstock.engine.peers"))


def guarded(otherwise: T, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what a function returns; if it raises, log the error and return `otherwise`.

    A callback runs in a thread that serves all peers: its failure must not end that thread.
    """
    try:
        return function(*args, **kwargs)
    except Exception as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        _limited_log.warning(
            f"{name} failed; the peers' thread that called it goes on", error=error
        )
        return otherwise
