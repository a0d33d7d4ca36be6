"""Which tiers this process has open, and how one is opened, shared, closed and removed.

A process opens a tier's files once, however many loaders use it: closing a second descriptor of the
lock file would drop every lock that the process holds on it. A forked child finds the entries of
its parent here and uses the same descriptors with locks of its own, which it takes on first use.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import replace

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
"""A folder may be removed while we open it; each try then starts with a new one."""
_SIBLINGS_MAX = 10
"""Names tried when a folder of the tier's name holds files that are not ours."""

_open: dict[tuple[int, int], TierFiles] = {}
_mutex = threading.RLock()


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """Let one thread at a time open, close or look at tiers: record locks tell processes apart."""
    with _mutex:
        yield


class TierOpening:
    """A tier in its opening moment: nobody else opens, closes or removes it."""

    def __init__(self, files: TierFiles, *, is_alone: bool, is_new: bool) -> None:
        self.files = files
        self.is_alone = is_alone
        """Whether no other process, and nobody else in this one, uses it."""
        self.is_new = is_new


@contextlib.contextmanager
def opening(root: Folder, shape: TierShape, kind: str) -> Iterator[TierOpening]:
    """Give a tier's files, in the opening moment; one user more has them afterwards."""
    with _mutex:
        opened = _opened(root, shape, kind)
        files = opened.files
        # From here on nobody in this process may open the lock file again, not even to look.
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
            enter(here)
            _wait_for_opening(here.locks, here.folder)
            here.header = here.read_header()  # others may have promised more
            return TierOpening(here, is_alone=False, is_new=False)
        try:
            locks = _lock_file(folder)
        except FileNotFoundError:
            folder.close()  # the folder was removed since
            continue
        except BaseException:
            folder.close()
            raise
        if locks is None:
            folder.close()
            return None
        if os.fstat(locks.descriptor).st_nlink == 0:
            os.close(locks.descriptor)
            folder.close()
            continue
        return _with_files(TierFiles(folder, locks, kind), shape)
    raise NoTierError(f"{root.path}/{name} is removed as fast as it is made; is it cleaned up?")


def _lock_file(folder: Folder) -> RecordLocks | None:
    """Open the lock and wait for the opening moment; None where the folder is not ours."""
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
            f"{folder.path} is held by {who}, which opens or closes it and does not get on; is it "
            "stopped? End it, or give another folder"
        )


def _with_files(files: TierFiles, shape: TierShape) -> TierOpening | None:
    """Open the files in a locked folder, made anew where they do not fit."""
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
    return TierOpening(files, is_alone=is_alone, is_new=is_new)


def _is_clear(folder: Folder) -> bool:
    """Remove what we left there earlier; False where there are files that we did not write."""
    if not set(folder.names()) & set(PAYLOAD):
        return True
    if not is_marked(folder):
        return False
    remove_payload(folder)
    return True


def enter(files: TierFiles) -> None:
    """Become a user of a tier whose files a parent process opened."""
    if files.pid == os.getpid():
        return
    with _mutex:
        if files.locks.wait_alone(OPENING):  # else somebody is stuck, and we go on unseen
            files.locks.try_shared(USERS)
            files.header = files.read_header()
            files.locks.drop(OPENING)
        files.pid = os.getpid()


def promise(files: TierFiles, spans: Bools, added_bytes: int, size_bytes: int) -> None:
    """Write down that so much more may be filled here, once for all who place the same spans."""
    with _mutex:
        enter(files)
        if not files.locks.wait_alone(OPENING):
            return  # somebody is stuck, and others will reckon with more room than there is
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
    """Let one user go. The last one of all processes removes a memory tier."""
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
        return  # whoever is stuck there, or opens tiers next, cleans up
    files.locks.drop(USERS)
    is_last = files.locks.try_alone(USERS)
    with contextlib.suppress(OSError):
        os.utime(files.locks.descriptor)
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
    """Return whether this process has the tier in a folder open; only `in_turn`."""
    return folder.identity in _open


def _close_all() -> None:
    """Leave no memory behind when a program ends without closing its loaders."""
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
