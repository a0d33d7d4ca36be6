"""Crews carry out the same piece of work for many shards: threads here, or processes elsewhere.

A crew decides nothing about the work. It is given a function, a job (what all items share) and the
items; it yields what the function returns, as it comes. Indexing and packing are written against
this, so that one machine and a cluster run the same code for each shard. `ray_crew` is the other
crew.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Protocol, TypeVar

from penstock.errors import OptionError
from penstock.storage.base import Store
from penstock.storage.pool import ReadPool

J = TypeVar("J")
T = TypeVar("T")
R = TypeVar("R")


class Crew(Protocol):
    """Something that does the same for many items."""

    is_elsewhere: bool
    """Whether work is done in other processes, perhaps on other machines. Then jobs, items and
    results are pickled, and what must outlive the work is put into a store that all of them reach.
    """

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

        One process works on `at_once` items at a time. Where handing out an item is expensive, up
        to `together_max` items are handed out together. `names` returns the name of an item for the
        error if its worker dies. Close the generator when you leave it early: this stops the work.
        """
        ...


class ThreadCrew:
    """Threads of this process."""

    is_elsewhere = False

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


def refuse_memory(crew: Crew, *stores: Store) -> None:
    """Raise where workers elsewhere would need a store that only this process has."""
    for store in stores:
        if crew.is_elsewhere and store.source == "memory":
            raise OptionError(
                f"{store.uri} lies in the memory of this process, which workers elsewhere cannot "
                "reach; use a folder that all nodes share, or an object store"
            )
