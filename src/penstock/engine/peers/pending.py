"""Something that a client was asked for and that has not come yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.peers.base import Answer, Ask
from penstock.engine.peers.guard import guarded
from penstock.errors import PeerError

Result = Answer | dict[str, Any] | PeerError


@dataclass(slots=True, eq=False, kw_only=True)
class PendingAsk:
    """An ask, or a question about a node; it is finished exactly once."""

    ask: Ask | None
    """None: a question about the node."""
    into: memoryview
    parked: Callable[[], None]
    done: Callable[[Any], None]
    asked_s: float
    lengths: list[int] = field(default_factory=list)
    parked_s: float | None = None
    """When the peer said that it has to wait."""
    is_finished: bool = False
    """What comes now goes to waste."""

    @property
    def cost(self) -> int:
        """Return what it counts against the bounds: its ranges."""
        return 1 + len(self.lengths)

    def park(self, now_s: float) -> None:
        """Note that the peer does not have it yet."""
        if self.parked_s is None and not self.is_finished:
            self.parked_s = now_s
            guarded(None, self.parked)

    def finish(self, result: Result) -> None:
        """Hand over what became of it, unless that has been done."""
        if not self.is_finished:
            self.is_finished = True
            guarded(None, self.done, result)
