"""Which machine this is: one that shares its clock with all processes that have the same boot."""

from __future__ import annotations

import socket
from pathlib import Path


def boot_id() -> str:
    """Return what tells this machine, since its last start, from all others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
