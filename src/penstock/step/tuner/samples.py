"""What trials of the tuner load and store: one batch again and again, and nothing is kept.

Training goes on after tuning, so no batch may be used up and no checkpoint written. A batch is
taken from a source that can be iterated again: a Loader, a list, the source of a running step. Each
trial gets it after the time that it took here, so that loading ahead gains as much as it does in
training. Stored values are kept only while they are compared. Random numbers continue where they
were.
"""

from __future__ import annotations

import contextlib
import copy
import random
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch

from penstock.errors import ProgramError
from penstock.step.loads.sources import Source
from penstock.step.program.nodes import Program

__all__ = ["Again", "Stored", "sampled", "undisturbed"]

_LOOKS = 3
"""Batches that are timed, if there are so many; the first one takes longer to begin."""


class Again:
    """A source that yields one batch for ever, each time after a pause."""

    def __init__(self, batch: Any, pace_s: float) -> None:
        self._batch, self._pace_s = batch, pace_s

    def __iter__(self) -> Iterator[Any]:
        while True:
            time.sleep(self._pace_s)
            yield self._batch


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the random states of this process, from which functions and sources draw."""
    is_begun = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = [torch.cuda.current_device()] if is_begun else []
    python, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)


def sampled(sources: Mapping[str, Any]) -> dict[str, Again]:
    """Return sources that yield one batch of each given source for ever; those stay unchanged."""
    return {name: _sample(name, of) for name, of in sources.items()}


class Stored:
    """Receives the values that a program stores; keeps them only while `is_kept` is set."""

    def __init__(self) -> None:
        self.is_kept = False
        self.values: dict[str, torch.Tensor] = {}
        """The latest, by place."""

    def instead(self, calls: Mapping[str, Any], program: Program) -> dict[str, Any]:
        """Return functions by name, with this in the place of those that store."""
        places = {str(node.attr("place")) for node in program.nodes if node.op == "store"}
        return {**calls, **{place: self._taking(place) for place in places}}

    def _taking(self, place: str) -> Callable[[torch.Tensor], None]:
        def take(value: torch.Tensor) -> None:
            if self.is_kept:
                self.values[place] = value.detach().clone()

        return take


def _sample(name: str, of: Any) -> Again:
    if isinstance(of, Again):
        return of
    if isinstance(of, Source):
        return Again(*of.looked_at())
    if hasattr(of, "__next__"):
        raise ProgramError(
            f"source {name!r} is a {type(of).__name__}, which yields each batch once: those that "
            "tuning takes would be lost; give tune a source that can be iterated again, such as a "
            "Loader or a list of one batch"
        )
    with _left_there(of):
        return _first_of(name, of)


@contextlib.contextmanager
def _left_there(of: Any) -> Iterator[None]:
    """Restore the position of a source afterwards, if it can be set."""
    draws = getattr(of, "generator", None)
    drawn = draws.get_state() if isinstance(draws, torch.Generator) else torch.empty(0)
    # A source with stages counts batches as used only when a step takes them: nothing to restore.
    resumes = not hasattr(of, "stages") and all(
        hasattr(of, name) for name in ("state_dict", "load_state_dict")
    )
    state = copy.deepcopy(of.state_dict()) if resumes else None
    try:
        yield
    finally:
        if resumes:
            of.load_state_dict(state)
        if isinstance(draws, torch.Generator):
            draws.set_state(drawn)


def _first_of(name: str, of: Any) -> Again:
    stages = of.stages() if hasattr(of, "stages") else None
    batches = iter(of) if stages is None else _in_stages(stages)
    # The first batch is used: the last one of an epoch may be smaller.
    seen, taken_s = [], []
    try:
        start_s = time.perf_counter()
        for batch in islice(batches, _LOOKS):
            taken_s.append(time.perf_counter() - start_s)
            seen.append(batch)
            start_s = time.perf_counter()
    finally:
        if stages is not None:
            stages.close()
    if not seen:
        raise ProgramError(f"source {name!r} has no batch to tune with")
    return Again(seen[0], min(taken_s))


def _in_stages(stages: Any) -> Iterator[Any]:
    while True:
        try:
            fetched = stages.fetch()
        except StopIteration:
            return
        yield stages.decode(fetched)
