"""A request of a client that has no answer yet."""

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
    """A request for ranges or for a status; it is finished exactly once."""

    ask: Ask | None
    """None: a request for the status of the node."""
    into: memoryview
    parked: Callable[[], None]
    done: Callable[[Any], None]
    asked_s: float
    lengths: list[int] = field(default_factory=list)
    parked_s: float | None = None
    """When the peer reported that it has parked the request."""
    is_finished: bool = False
    """Whether `done` has been called; the payload of a later answer is discarded."""

    @property
    def cost(self) -> int:
        """Return its share of the connection's bound, in ranges."""
        return 1 + len(self.lengths)

    def park(self, now_s: float) -> None:
        """Note that the peer does not have all ranges yet."""
        if self.parked_s is None and not self.is_finished:
            self.parked_s = now_s
            guarded(None, self.parked)

    def finish(self, result: Result) -> None:
        """Call `done` with the result, unless that has been done."""
        if not self.is_finished:
            self.is_finished = True  # before the call, in which the caller may stop the client
            guarded(None, self.done, result)
