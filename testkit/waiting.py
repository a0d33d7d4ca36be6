"""Waiting in a test for something that another thread or process brings."""

from __future__ import annotations

import time
from collections.abc import Callable

_PATIENCE_S = 30.0
"""How long a test waits for what a quiet machine does at once."""


def wait_until(condition: Callable[[], object], within_s: float = _PATIENCE_S) -> None:
    """Return as soon as the condition holds; raise if it does not in time."""
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, f"it did not come true within {within_s:g} s"
        time.sleep(0.01)
