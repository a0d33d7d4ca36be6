"""Tiers that lie about: what there is, what is in use, and giving up what is not.

After `kill -9` a memory tier stays. The next run of the same user reuses it if it wants the same
data set and removes it otherwise. Disk tiers stay on purpose; when room is lacking, those that
nobody uses are given up, the one unused for longest first. A tier in use is never touched, and
nothing is removed from a folder without our mark.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.storage.tier_folders import (
    LOCK,
    PARTS,
    Folder,
    has_only_lock,
    open_folder,
    remove_lock,
    remove_payload,
    root_of,
)
from penstock.storage.tier_header import header_in, is_marked, meta_in
from penstock.storage.tier_identity import read_identity
from penstock.storage.tier_locks import OPENING, USERS, RecordLocks
from penstock.storage.tier_registry import in_turn, is_open_here
from penstock.storage.tier_sizes import Wish
from penstock.units import show_bytes

_log = logging.getLogger("penstock.storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTier:
    """A tier of this user, seen from outside."""

    kind: str
    path: str
    name: str
    is_used: bool
    size_bytes: int
    """What its files take."""
    promised_bytes: int
    """What its users may fill."""
    used_at_s: float
    """When it was last opened or closed, in seconds since 1970."""
    about: dict[str, str] = field(default_factory=dict)
    made: str = ""
    node: str = ""
    """The name under which other nodes know who keeps it; empty where none was made."""


def found_tiers(wish: Wish) -> list[FoundTier]:
    """Return the tiers of this user in the place of a wish, longest unused first."""
    try:
        with root_of(wish, make=False) as root:
            return tiers_in(root, wish.kind)
    except FileNotFoundError:
        return []


def remove_found(wish: Wish, tier: FoundTier) -> bool:
    """Remove a tier that was found, if it is ours and nobody uses it by now."""
    try:
        with root_of(wish, make=False) as root:
            return remove_unused(root, tier.name)
    except FileNotFoundError:
        return False


def tiers_in(root: Folder, kind: str) -> list[FoundTier]:
    """Return the tiers in a root folder, longest unused first."""
    found = []
    for name in root.names():
        with _looked_at(root, name) as (folder, is_used):
            if folder is not None and is_marked(folder):
                node = read_identity(folder if kind == "memory" else root) or ""
                found.append(replace(_found(folder, kind, name, is_used=is_used), node=node))
    return sorted(found, key=lambda tier: tier.used_at_s)


def _found(folder: Folder, kind: str, name: str, *, is_used: bool) -> FoundTier:
    header, meta = header_in(folder), meta_in(folder)
    about = meta.get("about")
    return FoundTier(
        kind=kind,
        path=folder.path,
        name=name,
        is_used=is_used,
        size_bytes=_taken_bytes(folder),
        promised_bytes=header.promised_bytes if header else 0,
        used_at_s=_status(folder, LOCK).st_mtime if LOCK in folder.names() else 0.0,
        about={str(k): str(v) for k, v in about.items()} if isinstance(about, dict) else {},
        made=str(meta.get("made", "")),
    )


def _taken_bytes(folder: Folder) -> int:
    names = [name for name in PARTS if name in folder.names()]
    return sum(_status(folder, name).st_blocks for name in names) * 512


def _status(folder: Folder, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False)


@contextlib.contextmanager
def _looked_at(root: Folder, name: str) -> Iterator[tuple[Folder | None, bool]]:
    """Give a folder and whether anybody uses it; nobody can begin to until the block ends."""
    with in_turn(), contextlib.ExitStack() as stack:
        try:
            folder = open_folder(root, name, make=False)
            stack.callback(folder.close)
            if is_open_here(folder):  # opening its lock file again would drop our locks
                yield folder, True
                return
            locks = RecordLocks(folder.open_file(LOCK))
            stack.callback(os.close, locks.descriptor)
            is_used = not (locks.try_alone(OPENING) and locks.try_alone(USERS))
        except (OSError, ValueError):  # not ours: a file, a link, somebody's folder, no lock
            yield None, False
            return
        yield folder, is_used


def remove_unused(root: Folder, name: str) -> bool:
    """Remove a tier of ours that nobody uses; return whether it is gone."""
    with _looked_at(root, name) as (folder, is_used):
        if folder is None or is_used or not (is_marked(folder) or has_only_lock(folder)):
            return False
        remove_payload(folder)
        remove_lock(folder, root)
        return True


def sweep(root: Folder, keep: str) -> None:
    """Remove what is left of memory tiers that nobody uses, but for the one that is wanted."""
    for name in root.names():
        if not is_named(name, keep) and remove_unused(root, name):
            _log.info("removed %s/%s, a memory tier that nobody uses", root.path, name)


def is_named(name: str, wanted: str) -> bool:
    """Return whether a folder's name is a tier's, or that of a sibling made beside it."""
    stem, _, number = name.rpartition("-")
    return name == wanted or (stem == wanted and number.isdigit())


def give_up(root: Folder, keep: str, needed_bytes: int) -> int:
    """Remove unused tiers, longest unused first, until so much is free; return how much it is."""
    freed_bytes = 0
    for tier in tiers_in(root, "disk"):
        if freed_bytes >= needed_bytes:
            break
        if tier.is_used or is_named(tier.name, keep) or not remove_unused(root, tier.name):
            continue
        freed_bytes += tier.size_bytes
        _log.warning(
            "gave up the disk tier %s of %s (%s, unused for %.1f h) to make room",
            tier.path,
            tier.about.get("uri", "a data set"),
            show_bytes(tier.size_bytes),
            max(0.0, time.time() - tier.used_at_s) / 3600,
        )
    return freed_bytes


def promised_elsewhere_bytes(root: Folder, keep: str) -> int:
    """Return what users of other tiers here may still fill."""
    return sum(
        max(0, tier.promised_bytes - tier.size_bytes)
        for tier in tiers_in(root, "")
        if tier.is_used and not is_named(tier.name, keep)
    )


def as_json(tier: FoundTier) -> dict[str, Any]:
    """Return a found tier as a plain value."""
    return {name: getattr(tier, name) for name in FoundTier.__dataclass_fields__}
