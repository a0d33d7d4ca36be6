"""What can happen to a flow, and what it wants done.

A flow has no clock: each event carries the time when it happened. Its driver carries out the
actions and reports back with events.

A *fetch* is one range of bytes that some step waits for. It may be asked for twice at once (a
hedge), so answers name the fetch and the attempt.

A source may answer "not yet" (`Deferred`): a peer that is to have the bytes and is still fetching
them itself. Such a request stays open, and takes no place from those that can be answered now.
"""

from __future__ import annotations

import msgspec


class Fetch(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a step needs."""

    number: int
    """Its name in this flow; rising in the order of planning."""
    step: int
    """The step that needs it first, counted from 0 in this flow: the number of a job in the engine,
    of a batch in the simulator. It is not the step of the training."""
    size_bytes: int
    sources: tuple[str, ...]
    """Where it can come from, best first; the last one always works in the end."""
    staged: bool = True
    """Whether it waits in memory until its step; else it goes into a tier and takes no stage."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The planner wants these bytes."""

    fetches: tuple[Fetch, ...]
    at_s: float


class _AttemptEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one attempt at a fetch."""

    number: int
    attempt: int
    at_s: float


class Arrived(_AttemptEvent, frozen=True, kw_only=True):
    """Bytes are there."""

    moved: bool = True
    """Whether they came over the wire; else they were found on the node, which says nothing about
    the source's speed."""


class Deferred(_AttemptEvent, frozen=True, kw_only=True):
    """The source has put the request aside until it has the bytes itself; `Arrived` or `Failed`
    follows sooner or later."""


class Failed(_AttemptEvent, frozen=True, kw_only=True):
    """A source gave up, after asking again as often as is sensible."""


class Throttled(msgspec.Struct, frozen=True, kw_only=True):
    """A source asked us to slow down (503, 429), or cut an answer short."""

    source: str
    at_s: float


class Consumed(msgspec.Struct, frozen=True, kw_only=True):
    """The training loop has taken the batch of a step."""

    step: int
    at_s: float


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """The training loop waits for the batch of a step: every fetch of it is late."""

    step: int
    at_s: float


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """Time has passed; sent when a flow asked to be woken (`Flow.wake_s`)."""

    at_s: float


Event = Wanted | Arrived | Deferred | Failed | Throttled | Consumed | Waiting | Tick


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """Ask a source for the bytes of a fetch now."""

    number: int
    attempt: int
    """0 at first; higher for a hedge, or for the next source after a failure."""
    source: str
    """One of the fetch's sources. Not always the first of them, even at attempt 0: a fetch that
    waits for its turn at a slow source may go to the next without the first ever being asked."""


class GiveUp(msgspec.Struct, frozen=True, kw_only=True):
    """No source could deliver: the step that needs the fetch gets the last error."""

    number: int


Action = Begin | GiveUp
