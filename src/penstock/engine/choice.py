"""Where batches are made: in this process, or in processes of their own.

A pure function of facts, so that it can be printed, tested and written down (docs/concepts/loader).
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import OptionError

SMALL_BYTES = 64 << 20
"""Data sets up to here are read whole in about the time that processes take to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What the choice depends on."""

    asked: str | int
    """What the user said: "auto", "here", "processes", or a number of worker processes."""
    is_linux: bool = True
    is_free_threaded: bool = False
    """Whether this interpreter runs threads side by side."""
    is_watched: bool = False
    """Whether a debugger or a coverage tool follows this process."""
    is_worker: bool = False
    """Whether this is a worker process already, such as torch's DataLoader has."""
    is_in_memory: bool = False
    """Whether the data lies in this process alone."""
    has_functions: bool = False
    """Whether the user gave a transform or collate function."""
    data_bytes: int = 0
    unpicklable: str = ""
    """Why the user's functions cannot be sent to another process; empty if they can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerChoice:
    """Where batches are made."""

    apart: bool
    num_workers: int | None
    """As the user said; None: as measured."""
    why: str

    def __str__(self) -> str:
        where = "by an engine and workers of their own" if self.apart else "in this process"
        return f"{where} ({self.why})"


def choose_workers(facts: WorkerFacts) -> WorkerChoice:
    """Return where batches are made.

    >>> print(choose_workers(WorkerFacts(asked="auto", has_functions=True)))
    by an engine and workers of their own (there is a transform or collate function)
    >>> print(choose_workers(WorkerFacts(asked="auto", is_watched=True)))
    in this process (a debugger or coverage tool follows it)
    """
    num_workers = facts.asked if isinstance(facts.asked, int) else None
    obstacle = _obstacle(facts)
    if facts.asked == "here":
        return WorkerChoice(apart=False, num_workers=None, why='workers="here"')
    if facts.asked != "auto":
        if obstacle:
            raise OptionError(f"workers={facts.asked!r} is not possible: {obstacle}")
        why = f"workers={facts.asked!r}"
        return WorkerChoice(apart=True, num_workers=num_workers, why=why)
    reason = obstacle or _reason_to_stay(facts)
    if reason:
        return WorkerChoice(apart=False, num_workers=None, why=reason)
    functions = "there is a transform or collate function"
    why = functions if facts.has_functions else "the data set is large"
    return WorkerChoice(apart=True, num_workers=None, why=why)


def _obstacle(facts: WorkerFacts) -> str:
    """Return why another process cannot make the batches."""
    if not facts.is_linux:
        return "shared memory without a name is Linux only"
    if facts.is_in_memory:
        return "the data lies in the memory of this process"
    return facts.unpicklable


def _reason_to_stay(facts: WorkerFacts) -> str:
    """Return why this process had better make the batches, though another could."""
    if facts.is_free_threaded:
        return "threads of this interpreter run side by side"
    if facts.is_watched:
        return "a debugger or coverage tool follows it"
    if facts.is_worker:
        return "it is a worker process already"
    if not facts.has_functions and facts.data_bytes <= SMALL_BYTES:
        return "the data set is small, and there is no transform"
    return ""
