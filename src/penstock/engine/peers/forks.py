"""Forked children close the sockets of their parent.

A child that kept them open would keep the connections of a dead parent alive, and its peers would
wait for it. The child has none of the threads that served them, so it can only close them.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class ClosedAfterFork(Protocol):
    """Something that has sockets."""

    def close_after_fork(self) -> None:
        """Close the sockets in the child, and send nothing to the other side."""


_open: weakref.WeakSet[ClosedAfterFork] = weakref.WeakSet()


def close_in_children(thing: ClosedAfterFork) -> None:
    """Close the sockets of `thing` in every child that is forked from now on."""
    _open.add(thing)


def _after_fork_in_child() -> None:
    for thing in list(_open):
        thing.close_after_fork()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
