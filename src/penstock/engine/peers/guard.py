"""Calling what belongs to somebody else from a thread that belongs to all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from penstock.engine.peers.rate_limited_log import RateLimitedLog

P = ParamSpec("P")
T = TypeVar("T")

_limited_log = RateLimitedLog(logging.getLogger("penstock.engine.peers"))


def guarded(otherwise: T, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what a function returns; where it fails, log that and return something else."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        _limited_log.warning(
            f"{name} failed; the peers' thread that called it goes on", error=error
        )
        return otherwise
