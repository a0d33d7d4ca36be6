"""Who carries out the same piece of work for many shards: threads here, or processes elsewhere.

A crew decides nothing about the work. It is given a function, a job (what all items share) and the
items; it yields what the function returns, as it comes. Indexing and packing are written against
this, so that one machine and a cluster run the same code for each shard. `ray_crew` is the other
crew.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Protocol, TypeVar

from penstock.storage.pool import ReadPool

J = TypeVar("J")
T = TypeVar("T")
R = TypeVar("R")


class Crew(Protocol):
    """Something that does the same for many items."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether work is done in other processes, perhaps on other machines.

        Then jobs, items and results are pickled, and what must outlive the work is put into a
        store that all of them reach.
        """
        ...

    def map_unordered(
        self,
        function: Callable[[J, T], R],
        job: J,
        items: Sequence[T],
        *,
        at_once: int,
        together_max: int = 1,
        names: Callable[[T], str] = str,
    ) -> Generator[R, None, None]:
        """Yield `function(job, item)` of all items as they come; the first error ends it.

        `at_once` items are worked on in one process. Where handing out an item has its price, up to
        `together_max` of them are handed out as one. `names` is what an item is called should
        whoever works on it die. Close it when it is left early: nothing goes on after that.
        """
        ...


class ThreadCrew:
    """Threads of this process."""

    @property
    def is_elsewhere(self) -> bool:
        """Return False."""
        return False

    def map_unordered(
        self,
        function: Callable[[J, T], R],
        job: J,
        items: Sequence[T],
        *,
        at_once: int,
        together_max: int = 1,
        names: Callable[[T], str] = str,
    ) -> Generator[R, None, None]:
        """Yield results as they come; a thread takes one item at a time."""
        del together_max, names
        with ReadPool(at_once) as pool:
            yield from pool.map_unordered(partial(function, job), items)
