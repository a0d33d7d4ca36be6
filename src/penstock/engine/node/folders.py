"""The folders where the service lets jobs keep their tiers.

    PLACE/penstock-node/            belongs to the service; jobs may only pass through
        identity                    the name of this node, kept on the first disk
        service.lock                held by the service, so that a second one is refused
        u1000/                      data sets of one user (g100: of a group, all: of everybody)
            DATASET/                belongs to the user: here jobs open their tiers
                penstock…/DATASET/  a tier, as `storage.tier_files` describes it

Every data set has a folder of its own, so that a job that cleans up never removes what the service
keeps for another one. The service may run as root, while users own the folders and can change them
at any time. So it opens them step by step from descriptors, follows no links, and uses only files
of the expected owner.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.engine.node.grants import DatasetKey
from penstock.errors import OptionError
from penstock.storage.tier_folders import (
    IDENTITY,
    LOCK,
    PARTS,
    Folder,
    has_only_lock,
    remove_lock,
    remove_payload,
)
from penstock.storage.tier_header import is_marked, meta_in

SHARED_MARK = ".penstock-shared"
"""If root owns this file, jobs know that several users may keep tiers in its folder."""
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_OWNERS = re.compile(r"u[0-9]+|g[0-9]+|all")
_DATASETS = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{0,199}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedFolder(Folder):
    """An open folder of a known user, in which the service acts for that user."""

    user: int | None
    """None: several users share it."""

    def open_file(self, name: str, flags: int = os.O_RDWR) -> int:
        """Open a regular file of the user; anything else is an `OSError`."""
        # Non-blocking: a user may have put a pipe there, and opening that would wait.
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(name, flags, 0o600, dir_fd=self.descriptor)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and self.user in (None, status.st_uid):
            return descriptor
        os.close(descriptor)
        raise OSError(errno.EPERM, f"not a file of user {self.user}", f"{self.path}/{name}")

    def inner(self, name: str) -> OwnedFolder:
        """Open a folder inside, of the same user."""
        descriptor = os.open(name, _FLAGS, dir_fd=self.descriptor)
        path = f"{self.path}/{name}"
        if self.user not in (None, os.fstat(descriptor).st_uid):
            os.close(descriptor)
            raise OSError(errno.EPERM, f"not a folder of user {self.user}", path)
        return OwnedFolder(path=path, descriptor=descriptor, user=self.user)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOwner:
    """The user or group of a folder of data sets."""

    name: str
    """Of the folder: u1000, g100 or all."""
    user: int | None
    """The owner of the files there; None: files of several users."""
    group: int = -1
    mode: int = 0o700

    @property
    def is_shared(self) -> bool:
        """Whether files of several users may lie side by side."""
        return self.user is None


def owner_named(name: str) -> FolderOwner:
    """Return an owner by the name of its folder.

    >>> owner_named("u1000").user, oct(owner_named("g100").mode)
    (1000, '0o2770')
    """
    if name == "all":
        return FolderOwner(name=name, user=None, mode=0o777)
    number = int(name[1:])
    if name[0] == "u":
        return FolderOwner(name=name, user=number)
    return FolderOwner(name=name, user=None, group=number, mode=0o2770)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSet:
    """The files of one data set in one place."""

    key: DatasetKey
    held_bytes: int
    used_at_s: float
    about: dict[str, str] = field(default_factory=dict)


def check_dataset(name: str) -> None:
    """Refuse a name that is not a plain name of one folder."""
    if not _DATASETS.fullmatch(name):
        raise OptionError(f"{name!r} cannot be the name of a data set's folder")


def make_base(root: Folder, owner: FolderOwner, dataset: str) -> str:
    """Make the folder where an owner's jobs open the tiers of a data set; return its path."""
    check_dataset(dataset)
    owned = _made(root, owner.name, 0o711)  # users may pass through, but not list it
    try:
        base = _made(owned, dataset, None)
    finally:
        owned.close()
    try:
        status = os.fstat(base.descriptor)
        user = os.geteuid() if owner.user is None else owner.user
        group = status.st_gid if owner.group < 0 else owner.group
        if (status.st_uid, status.st_gid) != (user, group):
            os.fchown(base.descriptor, user, group)
        os.fchmod(base.descriptor, owner.mode)
        if owner.is_shared:
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(SHARED_MARK, flags, 0o644, dir_fd=base.descriptor))
        return base.path
    finally:
        base.close()


def _made(parent: Folder, name: str, mode: int | None) -> Folder:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent.descriptor)
    descriptor = os.open(name, _FLAGS, dir_fd=parent.descriptor)
    if mode is not None:
        os.fchmod(descriptor, mode)
    return Folder(path=f"{parent.path}/{name}", descriptor=descriptor)


@contextlib.contextmanager
def tier_folders(root: Folder, key: DatasetKey) -> Iterator[list[tuple[OwnedFolder, OwnedFolder]]]:
    """Yield the folders of a data set's tiers, each with its parent; most often there is one."""
    with contextlib.ExitStack() as stack:
        found: list[tuple[OwnedFolder, OwnedFolder]] = []
        with contextlib.suppress(OSError):
            base = _base(root, key)
            stack.callback(base.close)
            for above in _inners(base, stack):
                found += [(above, inner) for inner in _inners(above, stack)]
        yield [(above, inner) for above, inner in found if LOCK in inner.names()]


def _base(root: Folder, key: DatasetKey) -> OwnedFolder:
    user = owner_named(key.owner).user
    owned = os.open(key.owner, _FLAGS, dir_fd=root.descriptor)
    try:
        descriptor = os.open(key.dataset, _FLAGS, dir_fd=owned)
    finally:
        os.close(owned)
    return OwnedFolder(
        path=f"{root.path}/{key.owner}/{key.dataset}", descriptor=descriptor, user=user
    )


def _inners(folder: OwnedFolder, stack: contextlib.ExitStack) -> list[OwnedFolder]:
    found = []
    for name in folder.names():
        with contextlib.suppress(OSError):  # a file, a link, or of another user
            inner = folder.inner(name)
            stack.callback(inner.close)
            found.append(inner)
    return found


def found_sets(root: Folder) -> list[FoundSet]:
    """Return the data sets that have files in a place."""
    return [
        _found_set(root, DatasetKey(owner, dataset))
        for owner in filter(_OWNERS.fullmatch, root.names())
        for dataset in filter(_DATASETS.fullmatch, _names_in(root, owner))
    ]


def _names_in(root: Folder, name: str) -> list[str]:
    try:
        descriptor = os.open(name, _FLAGS, dir_fd=root.descriptor)
    except OSError:
        return []
    try:
        return sorted(os.listdir(descriptor))  # noqa: PTH208
    finally:
        os.close(descriptor)


def _found_set(root: Folder, key: DatasetKey) -> FoundSet:
    held_bytes, used_at_s = 0, 0.0
    about: dict[object, object] = {}
    with tier_folders(root, key) as found:
        for _, folder in found:
            with contextlib.suppress(OSError):
                held_bytes += sum(folder.status(name).st_blocks for name in PARTS)
                used_at_s = max(used_at_s, folder.status(LOCK).st_mtime)
                told = meta_in(folder).get("about")
                about = told if isinstance(told, dict) else about
    texts = {str(name): str(value) for name, value in about.items()}
    return FoundSet(key=key, held_bytes=512 * held_bytes, used_at_s=used_at_s, about=texts)


def clear_tier(folder: OwnedFolder, above: OwnedFolder) -> None:
    """Remove the files of an unused tier; the caller holds its locks."""
    if is_marked(folder) or has_only_lock(folder):
        remove_payload(folder)
        remove_lock(folder, above)


def clear_base(root: Folder, key: DatasetKey) -> None:
    """Remove the folders of a data set if they are empty."""
    with contextlib.suppress(OSError):
        base = _base(root, key)
        try:
            with contextlib.ExitStack() as stack:
                for inner in _inners(base, stack):
                    if inner.names() == [IDENTITY]:  # a name for a node, of no use without bytes
                        os.unlink(IDENTITY, dir_fd=inner.descriptor)
            for name in base.names():
                with contextlib.suppress(OSError):
                    os.rmdir(name, dir_fd=base.descriptor)
            if base.names() == [SHARED_MARK]:
                os.unlink(SHARED_MARK, dir_fd=base.descriptor)
        finally:
            base.close()
        owned = os.open(key.owner, _FLAGS, dir_fd=root.descriptor)
        try:
            os.rmdir(key.dataset, dir_fd=owned)
        finally:
            os.close(owned)
