"""Folders of tiers: made safely where other users can write, and removed without other files.

Everybody can write to /dev/shm and /tmp. So a folder is made with `mkdir`, opened without following
links, and used only if it is a real folder of this user. From then on it is used through its
descriptor, never again through its path. Only files with names that we write are removed, and only
from a folder that carries our mark; `rmdir` then fails if any other file is left.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.errors import OptionError
from penstock.storage.keys import TEMPORARY_PREFIX
from penstock.storage.tier_sizes import Wish

META, DATA, SUMS, CELLS, STATE, LOCK = "meta.json", "data", "sums", "cells", "state", "lock"
IDENTITY = "identity"
"""A file beside those of a memory tier, or beside the folders of disk tiers (`tier_identity`)."""
PARTS = (DATA, SUMS, CELLS, STATE)
"""The files that take room."""
PAYLOAD = (IDENTITY, META, *PARTS)
"""In the order of removal. `state` carries our mark, so it is the first made and the last
removed."""

_LOCK_MARK = b"penstock tier\n"

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class NoTierError(Exception):
    """A tier cannot be opened, and the run goes on without it. The message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """An open folder."""

    path: str
    descriptor: int
    is_shared: bool = False
    """Whether several users keep files in it, see `_is_shared`."""

    @property
    def identity(self) -> tuple[int, int]:
        """Return device and inode, which no other folder has."""
        status = os.fstat(self.descriptor)
        return status.st_dev, status.st_ino

    def names(self) -> list[str]:
        """Return the names in it, sorted."""
        return sorted(os.listdir(self.descriptor))  # noqa: PTH208

    def status(self, name: str) -> os.stat_result:
        """Return the status of a file in it; of a link, not of its target."""
        return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)

    def open_file(self, name: str, flags: int = os.O_RDWR) -> int:
        """Open one of our files in it; a link or another user's file is an `OSError`."""
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=self.descriptor)
        status = os.fstat(descriptor)
        is_ours = status.st_uid == os.geteuid()
        if stat.S_ISREG(status.st_mode) and (is_ours or self.is_shared):
            if is_ours and self.is_shared:
                os.fchmod(descriptor, os.fstat(self.descriptor).st_mode & 0o666)
            return descriptor
        os.close(descriptor)
        raise OSError(errno.EPERM, "not a file of this user", f"{self.path}/{name}")

    def close(self) -> None:
        """Close its descriptor."""
        os.close(self.descriptor)


@contextlib.contextmanager
def no_tier_errors(path: str) -> Iterator[None]:
    """Turn an error of the system into the reason why a tier is left out."""
    try:
        yield
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else path
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            hint = "give a folder that this user can write to"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space there or give another folder"
        elif error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            hint = "this file system cannot do it; give a folder on a local disk"
        else:
            hint = "give another folder"
        raise NoTierError(f"{path} cannot be used ({error.strerror}: {where}); {hint}") from error


@contextlib.contextmanager
def root_of(wish: Wish, *, make: bool = True) -> Iterator[Folder]:
    """Yield the folder with all tiers of this user in the place of a wish."""
    base = _base_of(wish)
    try:
        root = _root(base, wish, make=make)
    finally:
        base.close()
    try:
        yield root
    finally:
        root.close()


def _base_of(wish: Wish) -> Folder:
    path = wish.place
    try:
        return Folder(path=path, descriptor=os.open(path, _FOLDER_FLAGS))
    except (FileNotFoundError, NotADirectoryError) as error:
        what = "does not exist" if isinstance(error, FileNotFoundError) else "is not a folder"
        raise OptionError(
            f"{wish.place} {what}, so it cannot hold a {wish.kind} tier; make the folder or "
            "name another"
        ) from error
    except OSError as error:
        with no_tier_errors(path):
            raise error


SHARED_MARK = ".penstock-shared"
"""If root puts this file into a folder, users that may write to the folder share their tiers."""


def _is_shared(base: Folder) -> bool:
    """Return whether root has set up a folder for several users (`penstock node --share`).

    These users can damage each other's bytes, so only root may decide it.
    """
    try:
        mark = base.status(SHARED_MARK)
    except OSError:
        return False
    return mark.st_uid == os.fstat(base.descriptor).st_uid == 0


def _root(base: Folder, wish: Wish, *, make: bool) -> Folder:
    if _is_shared(base):
        return open_folder(replace(base, is_shared=True), "penstock", make=make)
    if wish.kind == "memory":
        return _private(open_folder(base, f"penstock-{os.geteuid()}", make=make))
    if not _is_free_or_ours(base, "penstock"):
        root = _private(open_folder(base, f"penstock-disk-{os.geteuid()}", make=make))
    else:
        root = open_folder(base, "penstock", make=make)
    if not is_shared_by_nodes(base.descriptor):
        return root
    try:  # a tier belongs to one node, because its locks do not reach further
        return open_folder(root, f"node-{os.uname().nodename}", make=make)
    finally:
        root.close()


def _private(root: Folder) -> Folder:
    os.fchmod(root.descriptor, 0o700)
    return root


_SHARED_SYSTEMS = {
    "afs", "beegfs", "ceph", "cifs", "gfs2", "gpfs", "lustre", "nfs", "nfs4", "ocfs2", "panfs",
    "pvfs2", "smb3", "weka", "wekafs",
}  # fmt: skip


def is_shared_by_nodes(descriptor: int, mounts: str = "/proc/self/mountinfo") -> bool:
    """Return whether a folder lies on a file system that other machines write to as well."""
    device = os.fstat(descriptor).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path(mounts).read_text().splitlines()
    except OSError:
        return False
    found = [line.split(" - ", 1) for line in lines if line.split()[2:3] == [number]]
    kinds = {parts[1].split()[0].removeprefix("fuse.") for parts in found if len(parts) == 2}
    return bool(kinds & _SHARED_SYSTEMS)


def _is_free_or_ours(base: Folder, name: str) -> bool:
    try:
        status = base.status(name)
    except FileNotFoundError:
        return True
    # A link counts as ours here; `open_folder` then refuses it.
    return status.st_uid == os.geteuid() or stat.S_ISLNK(status.st_mode)


def open_folder(parent: Folder, name: str, *, make: bool = True) -> Folder:
    """Open a folder of this user; make it if there is none."""
    path = f"{parent.path.rstrip('/')}/{name}"
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent.descriptor)
            if parent.is_shared:  # the umask must not keep other users out
                mode = stat.S_IMODE(os.fstat(parent.descriptor).st_mode)
                os.chmod(name, mode, dir_fd=parent.descriptor)
    try:
        descriptor = os.open(name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=parent.descriptor)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise OptionError(
                f"{path} is a link or a file where a tier's folder should be, and links in shared "
                "places may be traps; remove it or name another folder for the tier"
            ) from error
        raise
    folder = Folder(path=path, descriptor=descriptor, is_shared=parent.is_shared)
    if not folder.is_shared:
        _check_owner(folder)
    return folder


def _check_owner(folder: Folder) -> None:
    status = os.fstat(folder.descriptor)
    if status.st_uid != os.geteuid():
        folder.close()
        raise OptionError(
            f"{folder.path} belongs to user {status.st_uid} and we are user {os.geteuid()}; "
            "name another folder for the tier"
        )


def open_lock(folder: Folder) -> int | None:
    """Open the lock file, made if there is none; None if it is not ours."""
    names = folder.names()
    # The lock is the first file that we make and the last that we remove: without it, the other
    # files are not ours.
    if LOCK not in names and set(names) & set(PAYLOAD):
        return None
    try:
        descriptor = folder.open_file(LOCK, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EPERM):
            return None
        raise
    mark = os.pread(descriptor, len(_LOCK_MARK) + 1, 0)
    if mark and mark != _LOCK_MARK:
        os.close(descriptor)
        return None
    if not mark:
        os.pwrite(descriptor, _LOCK_MARK, 0)
    return descriptor


def has_only_lock(folder: Folder) -> bool:
    """Return whether a tier has only its lock left: it was half made or half removed."""
    if [name for name in folder.names() if not name.startswith(TEMPORARY_PREFIX)] != [LOCK]:
        return False
    descriptor = folder.open_file(LOCK, os.O_RDONLY)
    try:
        return os.pread(descriptor, len(_LOCK_MARK) + 1, 0) == _LOCK_MARK
    finally:
        os.close(descriptor)


def remove_payload(folder: Folder) -> None:
    """Remove all files of a tier but its lock. The caller has checked that they are ours."""
    unfinished = [name for name in folder.names() if name.startswith(TEMPORARY_PREFIX)]
    for name in (*unfinished, *PAYLOAD):
        _unlink(folder, name)


def remove_lock(folder: Folder, parent: Folder) -> None:
    """Remove the lock file and the folder, if nothing else is in it."""
    _unlink(folder, LOCK)
    with contextlib.suppress(OSError):  # files of others are left there
        os.rmdir(folder.path.rpartition("/")[2], dir_fd=parent.descriptor)


def _unlink(folder: Folder, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder.descriptor)


def write_named(folder: Folder, name: str, data: bytes, *, size_bytes: int = 0) -> None:
    """Write a file, extend it with zeros to a size, and give it its name in one step."""
    temporary = f"{TEMPORARY_PREFIX}{os.getpid()}-{name}"
    _unlink(folder, temporary)
    descriptor = folder.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.truncate(max(len(data), size_bytes))
    inside = folder.descriptor
    os.rename(temporary, name, src_dir_fd=inside, dst_dir_fd=inside)
