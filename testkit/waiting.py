"""Waits in a test for a condition that another thread or process brings about."""

from __future__ import annotations

import time
from collections.abc import Callable

_PATIENCE_S = 30.0
"""The longest wait of a test, for what takes a quiet machine a moment."""


def wait_until(condition: Callable[[], object], within_s: float = _PATIENCE_S) -> None:
    """Return as soon as the condition holds; raise if it does not in time."""
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, f"it did not come true within {within_s:g} s"
        time.sleep(0.01)
