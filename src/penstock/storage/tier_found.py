"""Finds existing tiers, tells which are in use, and evicts unused ones.

After `kill -9` a memory tier stays. The next run of the same user reuses it if it has the same data
set, and removes it otherwise. Disk tiers stay on purpose; if room is short, unused ones are
evicted, the least recently used first. A tier in use is never touched, and no file is removed from
a folder without our mark.
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
from penstock.storage.tier_registry import is_open_here, registry_locked
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
    """The room that its files take."""
    promised_bytes: int
    """The bytes that its users may fill."""
    used_at_s: float
    """When it was last opened or closed, in seconds since 1970."""
    about: dict[str, str] = field(default_factory=dict)
    made: str = ""
    node: str = ""
    """The name of the node that keeps it (`tier_identity`); empty if it has none."""


def found_tiers(wish: Wish) -> list[FoundTier]:
    """Return the tiers of this user in the place of a wish, the least recently used first."""
    try:
        with root_of(wish, make=False) as root:
            return tiers_in(root, wish.kind)
    except FileNotFoundError:
        return []


def remove_found(wish: Wish, tier: FoundTier) -> bool:
    """Remove a tier that was found, if it is ours and still unused."""
    try:
        with root_of(wish, make=False) as root:
            return remove_unused(root, tier.name)
    except FileNotFoundError:
        return False


def tiers_in(root: Folder, kind: str) -> list[FoundTier]:
    """Return the tiers in a root folder, the least recently used first."""
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
        used_at_s=folder.status(LOCK).st_mtime if LOCK in folder.names() else 0.0,
        about={str(k): str(v) for k, v in about.items()} if isinstance(about, dict) else {},
        made=str(meta.get("made", "")),
    )


def _taken_bytes(folder: Folder) -> int:
    names = [name for name in PARTS if name in folder.names()]
    return sum(folder.status(name).st_blocks for name in names) * 512


@contextlib.contextmanager
def _looked_at(root: Folder, name: str) -> Iterator[tuple[Folder | None, bool]]:
    """Yield a folder and whether it is in use; nobody can begin to use it before the block ends."""
    with registry_locked(), contextlib.ExitStack() as stack:
        try:
            folder = open_folder(root, name, make=False)
            stack.callback(folder.close)
            if is_open_here(folder):  # closing a second descriptor would drop our locks on it
                yield folder, True
                return
            locks = RecordLocks(folder.open_file(LOCK))
            stack.callback(os.close, locks.descriptor)
            is_used = not (locks.try_alone(OPENING) and locks.try_alone(USERS))
        except (OSError, ValueError):  # not ours: a file, a link, another user's folder, no lock
            yield None, False
            return
        yield folder, is_used


def remove_unused(root: Folder, name: str) -> bool:
    """Remove a tier of ours if it is unused; return whether it was removed."""
    with _looked_at(root, name) as (folder, is_used):
        if folder is None or is_used or not (is_marked(folder) or has_only_lock(folder)):
            return False
        remove_payload(folder)
        remove_lock(folder, root)
        return True


def sweep(root: Folder, keep: str) -> None:
    """Remove unused memory tiers, except the one to keep."""
    for name in root.names():
        if not is_named(name, keep) and remove_unused(root, name):
            _log.info("removed %s/%s, an unused memory tier", root.path, name)


def is_named(name: str, wanted: str) -> bool:
    """Return whether a folder has the name of a tier, or of a numbered sibling of it."""
    stem, _, number = name.rpartition("-")
    return name == wanted or (stem == wanted and number.isdigit())


def evict_unused(root: Folder, keep: str, needed_bytes: int) -> int:
    """Remove unused tiers, the least recently used first; return how many bytes this freed."""
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
    """Return the bytes that users of other tiers here may still fill."""
    return sum(
        max(0, tier.promised_bytes - tier.size_bytes)
        for tier in tiers_in(root, "")
        if tier.is_used and not is_named(tier.name, keep)
    )


def as_json(tier: FoundTier) -> dict[str, Any]:
    """Return a found tier as a plain value."""
    return {name: getattr(tier, name) for name in FoundTier.__dataclass_fields__}
