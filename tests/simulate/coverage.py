"""What a placement of copies is worth, as the paper that proposed it counts."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.simulate.job import SimulatedJob
from penstock.simulate.policies.frequency import OwnCopies, PlacedCopies, known_holders


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What a placement is worth once all copies are loaded."""

    covered: float
    """Samples that somebody keeps, over all."""
    local: float
    """Uses that find the sample on their own worker, over all uses."""
    remote: float
    store: float
    reads: float
    """Bytes read from the store in the whole run, over those of the set; each copy is read once."""


def coverage_of(job: SimulatedJob, copies: PlacedCopies) -> Coverage:
    """Return what a placement is worth; sizes are taken as equal."""
    known, mine = known_holders(job, copies), OwnCopies(job, copies)
    own = other = uses = 0
    for epoch in range(job.scenario.job.epochs):
        accesses = job.accesses(epoch)
        is_own = mine.rows(accesses.workers, accesses.ids) >= 0
        own += int(is_own.sum())
        other += int((~is_own & (known[accesses.ids] >= 0)).sum())
        uses += len(accesses.ids)
    missed = uses - own - other
    return Coverage(
        covered=float((known >= 0).mean()),
        local=own / uses,
        remote=other / uses,
        store=missed / uses,
        reads=(missed + len(copies.ids)) / len(job.sizes),
    )
