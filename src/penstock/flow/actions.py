"""What a flow wants done. Its driver carries it out and reports back with events."""

from __future__ import annotations

import msgspec


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
