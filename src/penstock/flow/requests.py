"""What a flow remembers: a fetch while it is cared for, and each request made for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.flow.events import Fetch

if TYPE_CHECKING:
    from penstock.flow.source import Source


class Care(msgspec.Struct):
    """A fetch, from being wanted until nothing of it is left."""

    fetch: Fetch
    num_tried: int = 0
    """Sources asked so far, from the front of `fetch.sources`."""
    num_copies: int = 0
    """Requests made so far."""
    open_copies: int = 0
    """Of these, those not answered yet, deferred ones included: a bit for each copy."""
    is_queued: bool = False
    """Whether it waits for its turn at the last source tried."""
    is_admitted: bool = False
    """Whether its bytes count, against the stage or against the fills under way."""
    is_released: bool = False
    """Whether its bytes count no more."""
    is_there: bool = False
    """Whether its bytes arrived."""
    is_unwanted: bool = False
    """Whether its step has gone by: nothing is kept once it has arrived."""
    num_hedges: int = 0
    """Copies asked of the last source beside the first one there, made or waiting for a place."""


class Request(msgspec.Struct):
    """One copy of a fetch, asked of one source."""

    @property
    def is_counted_on(self) -> bool:
        """Whether no later copy is under way: this is the one to ask again for."""
        return self.care.open_copies >> self.copy == 1

    care: Care
    source: Source
    copy: int
    place: int
    """The source's place among the fetch's sources."""
    began_s: float
    num_ahead: int
    """Requests in flight at the source when this one began."""
    num_done_before: int
    """Answers that the source had given by then."""
    is_beaten: bool = False
    """Whether another copy came first, and its place at the source was given to others."""
    is_deferred: bool = False
    """Whether the source has put it aside, and its place was given to others."""
