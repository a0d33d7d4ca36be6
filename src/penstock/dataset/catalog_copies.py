"""Copies of remote parts in the user's cache: brought once to a node, mapped by all its processes.

Ranks of a node open a data set at the same moment. The first takes a lock and downloads, the others
wait and map what it brought. The lock is the kernel's and goes with its process, however that dies.
The lock saves work and guards nothing: a copy gets its name only when it is whole and has the hash
that the version names. So a process that cannot lock, or waits for one that makes no progress,
downloads for itself, which costs nothing but bytes.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from penstock.clock import Clock, SystemClock
from penstock.dataset.columns import REINDEX
from penstock.errors import CorruptError
from penstock.storage.base import ObjectInfo, Store
from penstock.storage.folder_errors import store_error
from penstock.storage.keys import TEMPORARY_PREFIX, checked_hash
from penstock.storage.pool import ReadPool

_log = logging.getLogger("penstock.dataset")

_COPY_BYTES = 8 << 20
_RANGES_AT_ONCE = 8
_TRIES_MAX = 2
_PAUSE_S_MAX = 0.1
STUCK_S = 30.0
"""A download in which nothing arrives for so long is not waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPart:
    """A part in a store, and where its copy lies or will lie."""

    store: Store
    key: str
    name: str
    """Hash of the whole file."""
    size_bytes: int
    folder: Path

    def __post_init__(self) -> None:
        checked_hash(self.name)  # Files and a lock are made under this name.

    @property
    def path(self) -> Path:
        """The copy."""
        return self.folder / f"{self.name}.idx"

    @property
    def is_here(self) -> bool:
        """Whether the copy is there; it has its name only when it is whole."""
        try:
            return self.path.stat().st_size == self.size_bytes
        except FileNotFoundError:
            return False


def local_copy(copy: CachedPart, clock: Clock | None = None) -> Path:
    """Return the file of a part on this node; one process downloads it, the others wait."""
    with store_error(str(copy.path), needed_bytes=copy.size_bytes):
        if not copy.is_here:
            copy.folder.mkdir(parents=True, exist_ok=True)
            with _turn(copy, clock or SystemClock()) as is_alone:
                # Looked at again: the process that had the lock before may have brought it.
                if not copy.is_here:
                    _download(copy, is_alone=is_alone)
    return copy.path


@contextmanager
def _turn(copy: CachedPart, clock: Clock) -> Iterator[bool]:
    """Hold the lock of a part while the block runs; give False if it was not obtained."""
    # The file stays: if it were removed, two processes could lock two different files of its name.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(copy.folder / f"{copy.name}.lock", flags, 0o666)
    try:
        is_alone = False
        try:
            is_alone = _wait(descriptor, copy, clock)
        except OSError as error:  # Some network file systems have no locks.
            _log.info("%s cannot be locked (%s): it may be downloaded twice", copy.path, error)
        yield is_alone
    finally:
        os.close(descriptor)


def _wait(descriptor: int, copy: CachedPart, clock: Clock) -> bool:
    """Wait for the lock while its holder makes progress; return whether it was obtained."""
    moved_s, state, pause_s = clock.now_s(), _arrived(copy), 0.001
    while not _try_lock(descriptor):
        now = _arrived(copy)
        if now != state:
            moved_s, state = clock.now_s(), now
        elif clock.now_s() - moved_s > STUCK_S:
            _log.warning(
                "%s: another process downloads it, but nothing has arrived for %g s; this one "
                "downloads it for itself",
                copy.path,
                STUCK_S,
            )
            return False
        clock.sleep(pause_s)
        pause_s = min(_PAUSE_S_MAX, 2 * pause_s)
    return True


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _temporaries(copy: CachedPart) -> list[Path]:
    return list(copy.folder.glob(f"{TEMPORARY_PREFIX}*-{copy.name}.idx"))


def _arrived(copy: CachedPart) -> list[tuple[str, int]]:
    """Return something that changes while the part is being downloaded."""
    out = []
    for path in _temporaries(copy):
        with suppress(FileNotFoundError):
            out.append((path.name, path.stat().st_blocks))
    return sorted(out)


def _download(copy: CachedPart, *, is_alone: bool) -> None:
    for path in _temporaries(copy) if is_alone else []:
        # Left by a process that was killed: we hold the lock, so no other is downloading.
        path.unlink(missing_ok=True)
    temporary = copy.folder / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}-{copy.name}.idx"
    found = ""
    try:
        for _ in range(_TRIES_MAX):
            _fill(copy, temporary)
            found = _hash(temporary)
            if found == copy.name:
                temporary.replace(copy.path)
                return
    finally:
        temporary.unlink(missing_ok=True)
    raise CorruptError(
        f"{copy.store.uri}{copy.key} has hash {found}, its name says {copy.name}: it was damaged "
        f"in its store; {REINDEX}"
    )


def _fill(copy: CachedPart, path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    # No marks are needed to notice another object: the hash of all bytes is compared at the end.
    info = ObjectInfo(key=copy.key, size_bytes=copy.size_bytes)

    def bring(start: int) -> None:
        length = min(_COPY_BYTES, copy.size_bytes - start)
        rest, at = copy.store.read_range(info, start, length), start
        while rest.nbytes:
            count = os.pwrite(descriptor, rest, at)
            rest, at = rest[count:], at + count

    try:
        with ReadPool(_RANGES_AT_ONCE) as pool:
            for _ in pool.map_unordered(bring, range(0, copy.size_bytes, _COPY_BYTES)):
                pass
    finally:
        os.close(descriptor)


def _hash(path: Path) -> str:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return xxhash.xxh3_128_hexdigest(data)
