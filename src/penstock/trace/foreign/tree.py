"""The processes of a job: the one that was started, and all that descend from it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def process_tree(root: int) -> list[int]:
    """Return a process and all that descend from it; those whose parent has gone are missing."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, ValueError, IndexError):
                # The name of a program is in brackets and may hold anything.
                words = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(words[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found
