"""Warnings that others can cause, and therefore must not be able to cause often."""

from __future__ import annotations

import logging
import time

SELDOM_S = 10.0
"""Between two warnings of one kind."""
_KINDS_MAX = 64


class RateLimitedLog:
    """A log that says how many of a kind it has left out."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
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
