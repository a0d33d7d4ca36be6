"""The data sets of a service: who has each open, what it was granted, and which tiers are kept.

    opened     the first process that opens a data set is granted a share of each place, perhaps at
               the cost of others; processes that join get the same
    kept       once the tiers are open, the service joins them as one more user
    released   after the last process and the last run: the service leaves disk tiers, whose files
               stay without it; it stays in memory tiers, which the last user would remove

Before a data set is opened again, the service leaves its tiers, so that the new job is alone there:
sizes are then decided again, and every unit is checked before its first use, as after any gap.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.engine.node.folders import (
    FolderOwner,
    FoundSet,
    clear_base,
    clear_tier,
    found_sets,
    make_base,
    tier_folders,
)
from penstock.engine.node.grants import (
    DatasetKey,
    GrantDecision,
    GrantLimits,
    GrantPlace,
    GrantRequest,
    TakenSpace,
    decide,
)
from penstock.engine.node.kept import KeptTier, join, remove_if_unused
from penstock.engine.node.places import TierPlace
from penstock.engine.peers.node_messages import GrantedTier, OpenTiers
from penstock.errors import OptionError, PeerError
from penstock.units import show_bytes

_SMALLEST_BYTES = 2**16
"""The smallest grant; a smaller one is not worth its files."""
_SLACK_BYTES_MAX = 64 * 2**20
DATASETS_OF_OWNER_MAX = 4096
"""Data sets that the service remembers, open or not; each costs a few kilobytes."""
_BYTES_A_UNIT = 9
"""Eight for the sum and one for the state."""

_log = logging.getLogger("penstock.engine.node")


@dataclass(slots=True, kw_only=True)
class _OpenedSet:
    """One data set that was opened since the service began."""

    granted_bytes: tuple[int, ...]
    num_units: int
    about: dict[str, str]
    clients: set[int] = field(default_factory=set)
    num_runs: int = 0
    used_at_s: float = 0.0
    kept: dict[str, tuple[int, KeptTier]] = field(default_factory=dict)
    """By path: the number of the place, and the tier."""

    @property
    def is_open(self) -> bool:
        return bool(self.clients) or self.num_runs > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSet:
    """The state of a data set, for reports and grants."""

    key: DatasetKey
    held_bytes: tuple[int, ...]
    """By place."""
    granted_bytes: tuple[int, ...]
    is_open: bool
    num_clients: int
    used_at_s: float
    about: dict[str, str]


class DatasetRegistry:
    """All data sets of a service; any thread may use it."""

    def __init__(self, places: Sequence[TierPlace], limits: GrantLimits) -> None:
        self.places = tuple(places)
        self.limits = limits
        self.num_dropped = 0
        self.dropped_bytes = 0
        # Held while a data set is opened, also while files are removed for it: two processes must
        # not be granted the same room. Reentrant, because opening looks at all data sets.
        self._mutex = threading.RLock()
        self._entries: dict[DatasetKey, _OpenedSet] = {}

    def sweep(self) -> None:
        """Remove memory tiers that no job uses: at the end, and those that a crash has left."""
        with self._mutex:
            for number, place in enumerate(self.places):
                for found in found_sets(place.root) if place.kind == "memory" else ():
                    if self._remove(found.key, number) and found.held_bytes:
                        _log.info(
                            "removed %s of %s from memory",
                            show_bytes(found.held_bytes),
                            _shown_name(found),
                        )

    # -- opening ---------------------------------------------------------------------------------

    def open(self, client: int, owner: FolderOwner, message: OpenTiers) -> tuple[GrantedTier, ...]:
        """Grant tiers to a process."""
        key = DatasetKey(owner.name, message.dataset)
        with self._mutex:
            entry = self._entries.get(key)
            if entry is None:
                self._check_room(owner)
            if entry is None or not entry.is_open:
                entry = self._opened(key, owner, message, entry)
                self._entries[key] = entry
            if entry.num_units != message.num_units:
                raise OptionError(
                    f"{message.dataset} is open here with {entry.num_units} units, and asked for "
                    f"with {message.num_units}; do the jobs run the same version of penstock?"
                )
            entry.clients.add(client)
            entry.used_at_s = time.time()
            return self._granted(key, owner, entry)

    def _check_room(self, owner: FolderOwner) -> None:
        known = sum(key.owner == owner.name for key in self._entries)
        if known >= DATASETS_OF_OWNER_MAX:
            raise PeerError(
                f"{owner.name} has opened {known} data sets here, and no more are remembered; "
                "restart the node service",
                kind="refused",
            )

    def _opened(
        self, key: DatasetKey, owner: FolderOwner, message: OpenTiers, old: _OpenedSet | None
    ) -> _OpenedSet:
        for _, tier in old.kept.values() if old is not None else ():
            tier.leave()  # so that the job is alone there, and begins a new generation
        if message.is_again:
            granted = tuple(self._former_grant(key, number) for number in range(len(self.places)))
        else:
            granted = self._decided(key, message).granted_bytes
        for number, size_bytes in enumerate(granted):
            if size_bytes:
                make_base(self.places[number].root, owner, key.dataset)
            else:  # files from an earlier grant would only take room
                self._remove(key, number)
        return _OpenedSet(
            granted_bytes=granted, num_units=message.num_units, about=dict(message.about)
        )

    def _former_grant(self, key: DatasetKey, number: int) -> int:
        """Return the bytes that the service before this one granted to a running job."""
        promised_bytes = 0
        with tier_folders(self.places[number].root, key) as found:
            for _, folder in found:
                with contextlib.suppress(OSError):
                    tier = join(folder, self.places[number].kind)
                    if tier is not None:
                        promised_bytes += tier.header.promised_bytes
                        tier.leave()
        return promised_bytes

    def _decided(self, key: DatasetKey, message: OpenTiers) -> GrantDecision:
        """Decide a grant, and make room for it."""
        wished: dict[str, int] | None = {} if message.wishes else None
        for wish in message.wishes:
            assert wished is not None
            wished[wish.kind] = wished.get(wish.kind, 0) + max(0, wish.size_bytes)
        request = GrantRequest(
            key=key,
            size_bytes=max(0, message.size_bytes),
            overhead_bytes=_BYTES_A_UNIT * max(0, message.num_units),
            slack_bytes=min(_SLACK_BYTES_MAX, max(0, message.size_bytes) // 8),
            wished_bytes=wished,
        )
        grant_places = [
            GrantPlace(kind=p.kind, capacity_bytes=p.capacity_bytes) for p in self.places
        ]
        stuck: set[DatasetKey] = set()
        while True:
            others = [one for one in self._taken(stuck) if one.key != key]
            decision = decide(grant_places, others, request, self.limits)
            failed = {
                dropped for dropped, place in decision.drops if not self._drop(dropped, place)
            }
            if not failed:
                return _without_tiny_grants(decision, request)
            stuck |= failed  # a job that this service does not know has it open: decide again

    def _taken(self, stuck: set[DatasetKey]) -> list[TakenSpace]:
        return [
            TakenSpace(
                key=known.key,
                size_bytes=tuple(map(max, known.held_bytes, known.granted_bytes))
                if known.is_open
                else known.held_bytes,
                is_open=known.is_open or known.key in stuck,
                used_at_s=known.used_at_s,
            )
            for known in self.known()
        ]

    def _granted(
        self, key: DatasetKey, owner: FolderOwner, entry: _OpenedSet
    ) -> tuple[GrantedTier, ...]:
        return tuple(
            GrantedTier(
                kind="memory" if place.kind == "memory" else "disk",
                path=f"{place.root.path}/{key.owner}/{key.dataset}",
                size_bytes=size_bytes,
                is_shared=owner.is_shared,
            )
            for place, size_bytes in zip(self.places, entry.granted_bytes, strict=True)
            if size_bytes
        )

    # -- keeping and releasing -------------------------------------------------------------------

    def keep(self, client: int, key: DatasetKey) -> tuple[KeptTier, ...]:
        """Join the tiers of a data set that a process has open."""
        with self._mutex:
            entry = self._entries.get(key)
            if entry is None or client not in entry.clients:
                raise PeerError(f"{key.dataset} was not opened on this connection", kind="refused")
            for number, place in enumerate(self.places):
                if entry.granted_bytes[number]:
                    self._join(key, entry, number, place)
            if not entry.kept and any(entry.granted_bytes):
                # The job could not open them and has logged why; it goes on without tiers.
                _log.warning("no process has tiers of %s open where they were granted", key.dataset)
            return tuple(tier for _, tier in entry.kept.values())

    def _join(self, key: DatasetKey, entry: _OpenedSet, number: int, place: TierPlace) -> None:
        with tier_folders(place.root, key) as found:
            for _, folder in found:
                if folder.path in entry.kept:
                    continue
                try:
                    tier = join(folder, place.kind)
                except OSError as error:
                    _log.warning("%s cannot be kept: %s", folder.path, error)
                    continue
                if tier is None:
                    continue
                if tier.header.num_units != entry.num_units:
                    tier.leave()
                    continue
                entry.kept[folder.path] = (number, tier)

    def uri_of(self, key: DatasetKey) -> str:
        """Return the URI of an open data set."""
        with self._mutex:
            return self._entries[key].about.get("uri", "")

    def begin_run(self, key: DatasetKey) -> None:
        """Note that a run is served from a data set."""
        with self._mutex:
            self._entries[key].num_runs += 1

    def end_run(self, key: DatasetKey) -> None:
        """Note that a run has ended."""
        with self._mutex:
            self._entries[key].num_runs -= 1
            self._release(key)

    def leave(self, client: int) -> None:
        """Forget a process."""
        with self._mutex:
            for key, entry in self._entries.items():
                if client in entry.clients:
                    entry.clients.remove(client)
                    entry.used_at_s = time.time()
                    self._release(key)

    def _release(self, key: DatasetKey) -> None:
        entry = self._entries[key]
        if entry.is_open:
            return
        for path, (_, tier) in list(entry.kept.items()):
            if tier.kind == "disk":
                tier.leave()
                del entry.kept[path]
        for place in self.places:
            clear_base(place.root, key)  # removes folders in which the job has left no files

    def close(self) -> None:
        """Leave all tiers, and remove memory tiers that no job uses."""
        with self._mutex:
            self.sweep()
            for entry in self._entries.values():
                for _, tier in entry.kept.values():
                    tier.leave()
            self._entries.clear()

    # -- removing --------------------------------------------------------------------------------

    def _drop(self, key: DatasetKey, number: int) -> bool:
        """Remove the files of a data set in a place; False if somebody uses them."""
        found = next((f for f in found_sets(self.places[number].root) if f.key == key), None)
        if not self._remove(key, number):
            return False
        held_bytes = found.held_bytes if found is not None else 0
        self.num_dropped += 1
        self.dropped_bytes += held_bytes
        _log.info(
            "dropped %s of %s from the %s to make room",
            show_bytes(held_bytes),
            _shown_name(found) if found is not None else key.dataset,
            self.places[number].kind,
        )
        return True

    def _remove(self, key: DatasetKey, number: int) -> bool:
        entry = self._entries.get(key)
        if entry is not None and not self._remove_kept(key, entry, number):
            return False
        kept = entry.kept if entry is not None else {}
        root = self.places[number].root
        with tier_folders(root, key) as found:
            unkept = [pair for pair in found if pair[1].path not in kept]
            # Closing any descriptor of a lock file drops all our locks on it. So the lock files of
            # kept tiers must not be opened again here.
            removed = [remove_if_unused(folder, above) for above, folder in unkept]
        clear_base(root, key)
        return all(removed)

    def _remove_kept(self, key: DatasetKey, entry: _OpenedSet, number: int) -> bool:
        """Remove tiers that only this service has open; False if a job has one open."""
        root = self.places[number].root
        with tier_folders(root, key) as found:
            for above, folder in found:
                place, tier = entry.kept.get(folder.path, (-1, None))
                if tier is None or place != number:
                    continue
                if not tier.try_alone():
                    tier.stay()
                    return False
                clear_tier(folder, above)
                tier.leave()
                del entry.kept[folder.path]
        return True

    # -- reports ---------------------------------------------------------------------------------

    def known(self) -> list[KnownSet]:
        """Return all data sets, also those that only have files here."""
        with self._mutex:
            found = [{f.key: f for f in found_sets(place.root)} for place in self.places]
            keys = dict.fromkeys([*self._entries, *(key for each in found for key in each)])
            return [self._known(key, [each.get(key) for each in found]) for key in keys]

    def _known(self, key: DatasetKey, found: Sequence[FoundSet | None]) -> KnownSet:
        entry = self._entries.get(key)
        seen = [one for one in found if one is not None]
        used = [one.used_at_s for one in seen] + ([entry.used_at_s] if entry else [])
        return KnownSet(
            key=key,
            held_bytes=tuple(0 if one is None else one.held_bytes for one in found),
            granted_bytes=entry.granted_bytes if entry else (0,) * len(found),
            is_open=entry is not None and entry.is_open,
            num_clients=len(entry.clients) if entry else 0,
            used_at_s=max(used, default=0.0),
            about=_about(entry, seen),
        )


def _about(entry: _OpenedSet | None, found: Iterable[FoundSet]) -> dict[str, str]:
    told = entry.about if entry is not None else {}
    return told or next((one.about for one in found if one.about), {})


def _shown_name(found: FoundSet) -> str:
    return found.about.get("uri") or found.key.dataset


def _without_tiny_grants(decision: GrantDecision, request: GrantRequest) -> GrantDecision:
    least = min(_SMALLEST_BYTES, request.size_bytes)
    granted = tuple(0 if size < least else size for size in decision.granted_bytes)
    return GrantDecision(granted_bytes=granted, drops=decision.drops, bound=decision.bound)
