"""Sockets do not go into forked children.

A child that kept them open would keep the connections of a dead parent alive, and its peers would
wait for a word from it. The threads are not in the child either, so all that it may do is close.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class ClosedAfterFork(Protocol):
    """Something that has sockets."""

    def close_after_fork(self) -> None:
        """Close them in the child, without a word to the other side."""
        ...


_open: weakref.WeakSet[ClosedAfterFork] = weakref.WeakSet()


def close_in_children(thing: ClosedAfterFork) -> None:
    """Have the sockets of something closed in every child forked from now on."""
    _open.add(thing)


def _after_fork_in_child() -> None:
    for thing in list(_open):
        thing.close_after_fork()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
