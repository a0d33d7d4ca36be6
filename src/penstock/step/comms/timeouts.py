"""Timeouts: how long an operation waits for a rank that lives but does not come.

It is the timeout of the process group. Gloo and NCCL apply it themselves; ranks that meet in shared
memory take it from here.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.constants import default_pg_timeout

__all__ = ["ADVICE", "default_timeout", "default_timeout_s"]

ADVICE = "init_process_group(timeout=...) or Groups(..., timeout_s=...)"
"""Where a user sets it."""


def default_timeout() -> timedelta:
    """Return the timeout of the default group, or torch's own default without one."""
    group: Any = distributed.group.WORLD if distributed.is_initialized() else None
    for device in ("cpu", "cuda"):
        try:
            timeout = group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):  # no group, or none for this device, or no options
            continue
        if isinstance(timeout, timedelta):
            return timeout
    return default_pg_timeout


def default_timeout_s() -> float:
    """Return the same in seconds."""
    return default_timeout().total_seconds()
