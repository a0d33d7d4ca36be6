"""What ranks say and do together: an error of one of them is raised by all, in its words.

A rank that raises alone leaves the others waiting for it, for as long as their groups wait. So work
that can fail on one rank only is done between two meetings, and options that have to be the same
are compared before anything begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import distributed

from penstock.errors import ProgramError
from penstock.step.comms.timeouts import default_timeout
from penstock.step.groups import Groups

__all__ = ["RankError", "Team", "same", "together"]

T = TypeVar("T")


class RankError(ProgramError):
    """What failed on some rank, told to all."""


class Team:
    """The ranks of some groups, which tell each other things; None: one process speaks for all.

    Args:
        groups: of this rank.
        is_apart: whether they talk in a group of their own, which `close` ends. Else they use
            torch's default group, and no other thread may use it meanwhile.
    """

    def __init__(self, groups: Groups | None, *, is_apart: bool = False) -> None:
        self._is_alone = groups is None or groups.mesh.num_ranks == 1
        self.rank = 0 if self._is_alone else distributed.get_rank()
        self._group: Any = None
        if is_apart and not self._is_alone:
            self._group = distributed.new_group(backend="gloo", timeout=default_timeout())

    def from_first(self, mine: T) -> T:
        """Return the value of the first rank."""
        said = [mine]
        if not self._is_alone:
            distributed.broadcast_object_list(said, src=0, group=self._group)
        return said[0]

    def gathered(self, mine: T) -> list[T]:
        """Return the values of all ranks."""
        said = [mine]
        if not self._is_alone:
            said *= distributed.get_world_size(self._group)
            distributed.all_gather_object(said, mine, group=self._group)
        return said

    def close(self) -> None:
        """End the group, if they have one of their own."""
        if self._group is not None:
            distributed.destroy_process_group(self._group)


def together(team: Team, name: str, work: Callable[[], T]) -> T:
    """Return the result of some work, or raise, on all ranks, if it fails on one of them."""
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
    # Another rank has failed, so nobody uses the result of this one.
    if (close := getattr(made, "close", None)) is not None:
        close()
    if len(everyones) == 1 and isinstance(error, ProgramError):
        raise error
    raise RankError(f"rank {failed[0]} cannot run {name}: {everyones[failed[0]]}") from error


def same(team: Team, name: str, options: Mapping[str, object]) -> None:
    """Refuse to go on where ranks have different options."""
    everyones = team.gathered({what: str(value) for what, value in options.items()})
    for rank, theirs in enumerate(everyones):
        for what, value in everyones[0].items():
            if theirs[what] != value:
                raise ProgramError(
                    f"ranks 0 and {rank} tune {name} with different {what}, {value or 'none'} and "
                    f"{theirs[what] or 'none'}; give all ranks the same"
                )
