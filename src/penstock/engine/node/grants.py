"""Decides how many bytes a data set is granted in each place, and what is evicted for it.

Pure. A *place* is a memory or a disk of this node, with the bytes that the service may use there. A
data set in use keeps its grant, whether it has filled it or not. A data set that nobody has open
counts with the bytes it holds, and is evicted when room is needed, the least recently used first.
Places are decided one by one: a data set that needs memory evicts nothing from a disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class DatasetKey(NamedTuple):
    """A data set, by its owner and name."""

    owner: str
    """The name of the owner's folder: of a user, a group, or all."""
    dataset: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantPlace:
    """The kind and capacity of a place."""

    kind: str
    capacity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenSpace:
    """The bytes that one data set takes in each place."""

    key: DatasetKey
    size_bytes: tuple[int, ...]
    is_open: bool
    used_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantLimits:
    """The most bytes that are granted over all places."""

    dataset_bytes: int | None = None
    owner_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantRequest:
    """A data set that a job wants to open."""

    key: DatasetKey
    size_bytes: int
    overhead_bytes: int = 0
    """Bytes of its tables, in every place where it has a tier."""
    slack_bytes: int = 0
    """Units are not split between places, so some room is lost where one place ends."""
    wished_bytes: Mapping[str, int] | None = None
    """The most bytes wanted, by kind of place; None: as many as possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantDecision:
    """The bytes granted in each place, and the evictions that make room for them."""

    granted_bytes: tuple[int, ...]
    drops: tuple[tuple[DatasetKey, int], ...] = ()
    """Data sets to evict, each with the number of the place."""
    bound: str = ""
    """Why it was not more, in words; empty if everything fits."""


@dataclass(slots=True)
class _SpaceLedger:
    """The bytes taken, updated while a decision is made."""

    grant_places: Sequence[GrantPlace]
    taken: dict[DatasetKey, list[int]]
    idle: list[DatasetKey]
    """Data sets that may be evicted, the least recently used first."""
    drops: list[tuple[DatasetKey, int]] = field(default_factory=list)

    def in_place(self, place: int) -> int:
        return sum(sizes[place] for sizes in self.taken.values())

    def of_owner(self, owner: str) -> int:
        return sum(sum(sizes) for key, sizes in self.taken.items() if key.owner == owner)

    def drop(self, key: DatasetKey, place: int) -> None:
        self.taken[key][place] = 0
        self.drops.append((key, place))


def decide(
    grant_places: Sequence[GrantPlace],
    others: Sequence[TakenSpace],
    request: GrantRequest,
    limits: GrantLimits,
) -> GrantDecision:
    """Return the grant of a data set; `others` must not have its own former share."""
    assert all(other.key != request.key for other in others)
    idle = sorted((other for other in others if not other.is_open), key=lambda one: one.used_at_s)
    ledger = _SpaceLedger(
        grant_places=grant_places,
        taken={other.key: list(other.size_bytes) for other in others},
        idle=[other.key for other in idle],
    )
    wanted_bytes, bound = _allowed(ledger, request, limits)
    granted: list[int] = []
    for place, grant_place in enumerate(grant_places):
        slack_bytes = request.slack_bytes if sum(granted) else 0
        most = min(wanted_bytes, request.size_bytes + slack_bytes) - sum(granted)
        if request.wished_bytes is not None:
            same = sum(granted[p] for p in range(place) if grant_places[p].kind == grant_place.kind)
            most = min(most, request.wished_bytes.get(grant_place.kind, 0) - same)
        granted.append(_granted(ledger, place, most, request.overhead_bytes))
    if sum(granted) >= request.size_bytes:
        bound = ""
    elif sum(granted) < wanted_bytes:
        bound = (
            "what the job wished for"
            if _is_as_wished(grant_places, granted, request)
            else "the room"
        )
    return GrantDecision(granted_bytes=tuple(granted), drops=tuple(ledger.drops), bound=bound)


def _allowed(ledger: _SpaceLedger, request: GrantRequest, limits: GrantLimits) -> tuple[int, str]:
    """Return how many of the wanted bytes the limits allow, and the limit that reduced them.

    First evicts idle data sets of the same owner, as far as the owner's limit requires.
    """
    wanted_bytes, bound = request.size_bytes + request.slack_bytes, ""
    if limits.dataset_bytes is not None and limits.dataset_bytes < wanted_bytes:
        wanted_bytes, bound = limits.dataset_bytes, "the limit of a data set"
    if limits.owner_bytes is None:
        return wanted_bytes, bound
    own = [key for key in ledger.idle if key.owner == request.key.owner]
    for key, place in [(key, place) for key in own for place in range(len(ledger.grant_places))]:
        if ledger.of_owner(request.key.owner) + wanted_bytes <= limits.owner_bytes:
            break
        if ledger.taken[key][place]:
            ledger.drop(key, place)
    left_bytes = max(0, limits.owner_bytes - ledger.of_owner(request.key.owner))
    return (
        (left_bytes, "the limit of a user") if left_bytes < wanted_bytes else (wanted_bytes, bound)
    )


def _granted(ledger: _SpaceLedger, place: int, most_bytes: int, overhead_bytes: int) -> int:
    if most_bytes <= 0:
        return 0
    room_bytes = ledger.grant_places[place].capacity_bytes - overhead_bytes
    for key in ledger.idle:
        if room_bytes - ledger.in_place(place) >= most_bytes:
            break
        if ledger.taken[key][place]:
            ledger.drop(key, place)
    return max(0, min(most_bytes, room_bytes - ledger.in_place(place)))


def _is_as_wished(
    grant_places: Sequence[GrantPlace], granted: Sequence[int], request: GrantRequest
) -> bool:
    if request.wished_bytes is None:
        return False
    kinds = {grant_place.kind for grant_place in grant_places}
    had = {
        k: sum(g for r, g in zip(grant_places, granted, strict=True) if r.kind == k) for k in kinds
    }
    return all(had[kind] >= request.wished_bytes.get(kind, 0) for kind in kinds)
