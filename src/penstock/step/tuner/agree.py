"""What ranks say and do together: an error of one of them is raised by all, in its words.

A rank that raises alone leaves the others waiting for it, for as long as their groups wait. So what
can fail on one rank only is done between two meetings, and what has to be the same is compared
before anything is begun.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from penstock.errors import ProgramError
from penstock.step.tuner.trial import Team

__all__ = ["RankError", "same", "together"]

T = TypeVar("T")


class RankError(ProgramError):
    """What failed on some rank, told to all."""


def together(team: Team, name: str, work: Callable[[], T]) -> T:
    """Return what some work makes, or raise, on all ranks, if it fails on one of them."""
    made: T | None = None
    error: Exception | None = None
    try:
        made = work()
    except Exception as raised:
        error = raised
    said = "" if error is None else f"{type(error).__name__}: {error}"
    everyones = team.gathered(said)
    failed = [rank for rank, each in enumerate(everyones) if each]
    if not failed:
        return made  # type: ignore[return-value]
    if (close := getattr(made, "close", None)) is not None:
        close()
    if len(everyones) == 1 and isinstance(error, ProgramError):
        raise error
    raise RankError(f"rank {failed[0]} cannot run {name}: {everyones[failed[0]]}") from error


def same(team: Team, name: str, said: Mapping[str, object]) -> None:
    """Refuse to go on where ranks have been told different things."""
    everyones = team.gathered({what: str(value) for what, value in said.items()})
    for rank, theirs in enumerate(everyones):
        for what, value in everyones[0].items():
            if theirs[what] != value:
                raise ProgramError(
                    f"ranks 0 and {rank} tune {name} with different {what}, {value or 'none'} and "
                    f"{theirs[what] or 'none'}; give all ranks the same"
                )
