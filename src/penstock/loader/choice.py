"""Where batches are made: in this process, or in processes of their own.

`facts_of` looks up the facts here and now. `choose_workers` is a pure function of them, so that it
can be printed, tested and written down (docs/concepts/loader).
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
from dataclasses import dataclass

from penstock.dataset.mixture import datasets_of
from penstock.engine.opening import is_data_worker
from penstock.engine.options import LoaderOptions
from penstock.errors import OptionError
from penstock.loader.engine_client import payload_of

SMALL_BYTES = 64 << 20
"""A data set of this size is read whole in about the time that processes take to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """The facts that the choice depends on."""

    asked: str | int
    """The `workers=` of the user: "auto", "here", "processes", or a number of processes."""
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

    uses_engine_process: bool
    num_workers: int | None
    """The number that the user gave; None: as many as measuring shows to be of use."""
    why: str

    def __str__(self) -> str:
        where = (
            "by an engine and workers of their own"
            if self.uses_engine_process
            else "in this process"
        )
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
        return WorkerChoice(uses_engine_process=False, num_workers=None, why='workers="here"')
    if facts.asked != "auto":
        if obstacle:
            raise OptionError(f"workers={facts.asked!r} is not possible: {obstacle}")
        why = f"workers={facts.asked!r}"
        return WorkerChoice(uses_engine_process=True, num_workers=num_workers, why=why)
    reason = obstacle or _reason_to_stay(facts)
    if reason:
        return WorkerChoice(uses_engine_process=False, num_workers=None, why=reason)
    functions = "there is a transform or collate function"
    why = functions if facts.has_functions else "the data set is large"
    return WorkerChoice(uses_engine_process=True, num_workers=None, why=why)


def _obstacle(facts: WorkerFacts) -> str:
    """Return why another process cannot make the batches; empty if it can."""
    if not facts.is_linux:
        return "shared memory without a name is Linux only"
    if facts.is_in_memory:
        return "the data lies in the memory of this process"
    return facts.unpicklable


def _reason_to_stay(facts: WorkerFacts) -> str:
    """Return why this process makes the batches better than another; empty if it does not."""
    if facts.is_free_threaded:
        return "threads of this interpreter run side by side"
    if facts.is_watched:
        return "a debugger or coverage tool follows it"
    if facts.is_worker:
        return "it is a worker process already"
    if not facts.has_functions and facts.data_bytes <= SMALL_BYTES:
        return "the data set is small, and there is no transform"
    return ""


def facts_of(options: LoaderOptions) -> tuple[WorkerFacts, bytes]:
    """Return the facts, and the payload that engine and workers would be started with."""
    payload, unpicklable = b"", ""
    in_memory = any(bound.store.source == "memory" for bound in options.dataset.bound)
    if options.workers != "here" and not in_memory:
        try:
            num_workers = options.workers if isinstance(options.workers, int) else None
            payload = payload_of(options, num_workers)
        except Exception as error:
            unpicklable = f"something that the user gave cannot be sent to another process: {error}"
    facts = WorkerFacts(
        asked=options.workers,
        is_linux=sys.platform == "linux",
        is_free_threaded=not getattr(sys, "_is_gil_enabled", lambda: True)(),
        is_watched=sys.gettrace() is not None or threading.gettrace() is not None,
        is_worker=is_worker(),
        is_in_memory=in_memory,
        has_functions=options.transform is not None or options.collate is not None,
        data_bytes=sum(d.size_bytes for d in datasets_of(options.dataset)),
        unpicklable=unpicklable,
    )
    return facts, payload


def is_worker() -> bool:
    """Return whether this is a worker of torch's DataLoader or another daemon of its kind."""
    return is_data_worker() or bool(multiprocessing.current_process().daemon)
