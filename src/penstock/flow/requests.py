"""What a flow remembers: a fetch while it is tracked, and each request made for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.flow.events import Fetch

if TYPE_CHECKING:
    from penstock.flow.source import FlowSource


class TrackedFetch(msgspec.Struct):
    """A fetch, from being wanted until nothing of it is left."""

    fetch: Fetch
    num_tried: int = 0
    """Sources asked so far, from the front of `fetch.sources`."""
    num_attempts: int = 0
    """Requests made so far."""
    open_attempts: int = 0
    """Of these, those not answered yet, deferred ones included: a bit for each attempt."""
    is_queued: bool = False
    """Whether it waits for its turn at the last source tried."""
    is_admitted: bool = False
    """Whether its bytes count, against the stage or against the fills under way."""
    is_released: bool = False
    """Whether its bytes no longer count."""
    is_there: bool = False
    """Whether its bytes arrived."""
    is_unwanted: bool = False
    """Whether its step has gone by: nothing is kept once it has arrived."""
    num_hedges: int = 0
    """Copies asked of the last source beside the first one there, made or waiting for a place."""


class SourceRequest(msgspec.Struct):
    """One attempt at a fetch: a request to one source."""

    @property
    def is_counted_on(self) -> bool:
        """Whether no later attempt is under way, so that this is the one to repeat."""
        return self.tracked.open_attempts >> self.attempt == 1

    tracked: TrackedFetch
    source: FlowSource
    attempt: int
    place: int
    """The source's place among the fetch's sources."""
    began_s: float
    num_ahead: int
    """Requests in flight at the source when this one began."""
    num_done_before: int
    """Answers that the source had given by then."""
    is_beaten: bool = False
    """Whether another attempt came first, and its place at the source was given to others."""
    is_deferred: bool = False
    """Whether the source has put it aside, and its place was given to others."""
