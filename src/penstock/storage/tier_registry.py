"""The tiers that this process has open; opens, shares, closes and removes them.

A process opens a tier's files only once, however many loaders use it, because closing a second
descriptor of the lock file would drop every lock that the process holds on it. A forked child
inherits these entries. It uses the same descriptors, and takes locks of its own on first use.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from penstock.storage.tier_files import TierFiles
from penstock.storage.tier_folders import (
    PAYLOAD,
    Folder,
    NoTierError,
    open_folder,
    open_lock,
    remove_lock,
    remove_payload,
)
from penstock.storage.tier_header import fits, is_marked, make_files
from penstock.storage.tier_locks import OPENING, USERS, RecordLocks
from penstock.storage.tier_shape import Bools, TierShape

_TRIES_MAX = 100
"""Tries to open a folder that another process may remove meanwhile."""
_SIBLINGS_MAX = 10
"""Names to try if a folder with the tier's name holds files that are not ours."""

_open: dict[tuple[int, int], TierFiles] = {}
_mutex = threading.RLock()
"""Guards `_open`, and lets one thread at a time open or close tiers: record locks belong to the
process, so they do not keep its threads apart."""


@contextlib.contextmanager
def registry_locked() -> Iterator[None]:
    """Let one thread at a time open, close or look at tiers."""
    with _mutex:
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOpening:
    """A tier while its opening lock is held: nobody else opens, closes or removes it."""

    files: TierFiles
    is_alone: bool
    """Whether nobody else uses it, in this process or another one."""
    is_new: bool


@contextlib.contextmanager
def opening(root: Folder, shape: TierShape, kind: str) -> Iterator[TierOpening]:
    """Yield a tier's files under the opening lock; afterwards the tier has one more user."""
    with _mutex:
        opened = _opened(root, shape, kind)
        files = opened.files
        # Entered before anything else: from now on, no thread of this process may open the lock
        # file again, because closing that descriptor would drop our locks.
        _open[files.identity] = files
        try:
            yield opened
            has_joined = files.locks.try_shared(USERS)
            assert has_joined, f"{files.folder.path}: byte {USERS} is taken without {OPENING}"
            files.num_users += 1
            files.locks.drop(OPENING)
        except BaseException:
            _abandon(opened)
            raise


def _abandon(opened: TierOpening) -> None:
    files = opened.files
    if files.num_users:
        files.locks.drop(OPENING)
        return
    del _open[files.identity]
    if opened.is_alone and opened.is_new:
        _remove(files)
    files.close()


def _opened(root: Folder, shape: TierShape, kind: str) -> TierOpening:
    for number in range(_SIBLINGS_MAX):
        name = f"{shape.name}-{number}" if number else shape.name
        opened = _opened_as(root, name, shape, kind)
        if opened is not None:
            return opened
    raise NoTierError(
        f"{root.path} has {_SIBLINGS_MAX} folders named {shape.name} with files that are not "
        "ours; move them away or give another folder"
    )


def _opened_as(root: Folder, name: str, shape: TierShape, kind: str) -> TierOpening | None:
    for _ in range(_TRIES_MAX):
        folder = open_folder(root, name)
        here = _open.get(folder.identity)
        if here is not None:
            folder.close()
            enter_after_fork(here)
            _wait_for_opening(here.locks, here.folder)
            here.header = here.read_header()  # another process may have changed it
            return TierOpening(files=here, is_alone=False, is_new=False)
        try:
            locks = _lock_file(folder)
        except FileNotFoundError:
            folder.close()  # its last user has just removed the folder
            continue
        except BaseException:
            folder.close()
            raise
        if locks is None:
            folder.close()
            return None
        if os.fstat(locks.descriptor).st_nlink == 0:  # removed while we waited for the lock
            os.close(locks.descriptor)
            folder.close()
            continue
        return _with_files(TierFiles(folder, locks, kind), shape)
    raise NoTierError(f"{root.path}/{name} is removed as fast as it is made; is it cleaned up?")


def _lock_file(folder: Folder) -> RecordLocks | None:
    """Open the lock file and take the opening lock; None if the folder is not ours."""
    descriptor = open_lock(folder)
    if descriptor is None:
        return None
    locks = RecordLocks(descriptor)
    try:
        _wait_for_opening(locks, folder)
    except BaseException:
        os.close(descriptor)
        raise
    return locks


def _wait_for_opening(locks: RecordLocks, folder: Folder) -> None:
    if not locks.wait_alone(OPENING):
        pid = locks.holder(OPENING)
        who = "another process" if pid is None else f"process {pid}"
        raise NoTierError(
            f"{folder.path} is held by {who}, which opens or closes it and makes no progress; is "
            "it stopped? End it, or give another folder"
        )


def _with_files(files: TierFiles, shape: TierShape) -> TierOpening | None:
    """Open the files in a locked folder; make new ones if they do not fit."""
    is_new = False
    try:
        is_alone = files.locks.try_alone(USERS)
        if not fits(files.folder, shape):
            if not is_alone or not _is_clear(files.folder):
                files.close()
                return None
            is_new = True
            make_files(files.folder, shape)
        files.open(shape)
    except BaseException:
        if is_new:
            _remove(files)
        files.close()
        raise
    return TierOpening(files=files, is_alone=is_alone, is_new=is_new)


def _is_clear(folder: Folder) -> bool:
    """Remove files that we left there earlier; False if there are files that we did not write."""
    if not set(folder.names()) & set(PAYLOAD):
        return True
    if not is_marked(folder):
        return False
    remove_payload(folder)
    return True


def enter_after_fork(files: TierFiles) -> None:
    """Become a user of a tier whose files the parent process has opened."""
    if files.pid == os.getpid():
        return
    with _mutex:
        # If another process is stuck in the opening, this one goes on without counting as a user.
        if files.locks.wait_alone(OPENING):
            files.locks.try_shared(USERS)
            files.header = files.read_header()
            files.locks.drop(OPENING)
        files.pid = os.getpid()


def announce_fill(files: TierFiles, spans: Bools, added_bytes: int, size_bytes: int) -> None:
    """Record that more bytes may be filled here, once for all users that place the same spans."""
    with _mutex:
        enter_after_fork(files)
        if not files.locks.wait_alone(OPENING):
            return  # a process is stuck in the opening; others will count on too much free room
        try:
            key = xxhash.xxh3_64_intdigest(np.packbits(spans).data) | 1
            files.header = files.read_header()
            if added_bytes and key not in files.terms():
                files.add_term(key, added_bytes)
                promised_bytes = min(size_bytes, files.header.promised_bytes + added_bytes)
                files.write_header(replace(files.header, promised_bytes=promised_bytes))
        finally:
            files.locks.drop(OPENING)


def release(files: TierFiles) -> None:
    """Close a tier for one user. The last user of all processes removes a memory tier."""
    with _mutex:
        files.num_users -= 1
        if files.num_users > 0:
            return
        _open.pop(files.identity, None)
        if files.pid == os.getpid():
            _leave(files)
        files.close()


def _leave(files: TierFiles) -> None:
    if not files.locks.wait_alone(OPENING):
        return  # the process that is stuck there, or the next one that opens tiers, cleans up
    # Under the opening lock: nobody can become a user between these two lines.
    files.locks.drop(USERS)
    is_last = files.locks.try_alone(USERS)
    with contextlib.suppress(OSError):
        os.utime(files.locks.descriptor)  # when it was last used, for evictions
        if is_last and files.kind == "memory":
            _remove(files)
            os.rmdir(files.folder.path.rpartition("/")[0])  # noqa: PTH106


def _remove(files: TierFiles) -> None:
    remove_payload(files.folder)
    path = files.folder.path.rpartition("/")[0]
    root = Folder(path=path, descriptor=os.open(path, os.O_RDONLY | os.O_DIRECTORY))
    try:
        remove_lock(files.folder, root)
    finally:
        root.close()


def is_open_here(folder: Folder) -> bool:
    """Return whether this process has the tier in a folder open; only in `registry_locked`."""
    return folder.identity in _open


def _close_all() -> None:
    """Close all tiers at the end of a program that has not closed its loaders, to free memory."""
    for files in list(_open.values()):
        files.num_users = 1
        release(files)


def _after_fork_in_child() -> None:
    global _mutex
    _mutex = threading.RLock()
    for files in _open.values():
        files.locks.after_fork()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
