"""A folder as a store: keys are relative paths.

Readers never see half an object. A writer fills a temporary file beside the target, flushes it to
the disk, and gives it its name in one step: by `rename` if an object may be replaced, by `link` if
it must be new (exactly one of several links succeeds). A writer that is killed leaves only a file
whose name starts with `.penstock-tmp-`, which listings leave out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from penstock.errors import ExistsError, OptionError
from penstock.storage.base import Buffer, ObjectInfo
from penstock.storage.files import OpenFile, files
from penstock.storage.folder_errors import store_error, translated
from penstock.storage.keys import TEMPORARY_PREFIX, checked_key
from penstock.storage.ranges import changed_error, check_range, range_error

_DEPTH_MAX = 64
"""Depth of folders in a listing; a greater depth means that links form a cycle."""


class FolderStore:
    """The objects below one folder. The folder need not exist before the first write."""

    source = "folder"
    can_list = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._root = str(Path(path).expanduser().absolute())

    def __repr__(self) -> str:
        return f"FolderStore({self._root!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FolderStore) and other._root == self._root

    def __hash__(self) -> int:
        return hash((FolderStore, self._root))

    @property
    def uri(self) -> str:
        """Return the folder's path."""
        return self._root.rstrip("/") + "/"

    def path_of(self, key: str) -> Path:
        """Return the path of an object, for callers that map files."""
        return Path(self._path(key))

    def _path(self, key: str) -> str:
        return self.uri + checked_key(key)

    def info(self, key: str) -> ObjectInfo:
        """Return size and time of a file."""
        path = self._path(key)
        with store_error(path):
            status = os.stat(path)  # noqa: PTH116
            if not stat.S_ISREG(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, "not a file", path)
        return ObjectInfo(key=key, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the files whose key starts with `prefix`, sorted by key; links are followed."""
        folder = prefix.rpartition("/")[0]
        if folder:
            checked_key(folder)
        below = f"{folder}/" if folder else ""
        for info in self._walk(below, _DEPTH_MAX, prefix):
            if info.key.startswith(prefix):
                yield info

    def _walk(self, below: str, depth_left: int, prefix: str) -> Iterator[ObjectInfo]:
        if depth_left == 0:
            raise OptionError(
                f"{self.uri}{below} lies more than {_DEPTH_MAX} folders deep; "
                "does a symbolic link lead back to a folder above it?"
            )
        with store_error(self.uri + below):
            entries = _sorted_entries(self.uri + below)
        for name, entry in entries:
            key = below + name
            if name.endswith("/"):
                if key.startswith(prefix) or prefix.startswith(key):
                    yield from self._walk(key, depth_left - 1, prefix)
            else:
                with contextlib.suppress(FileNotFoundError):  # removed since, or a dangling link
                    status = entry.stat()
                    if stat.S_ISREG(status.st_mode):  # reading a pipe or a device may never end
                        yield ObjectInfo(
                            key=key, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns
                        )

    def read(self, key: str) -> memoryview:
        """Return a whole file, as it was at one moment."""
        path = self._path(key)
        with store_error(path):
            file = OpenFile(path)
            size_bytes = os.fstat(file.descriptor).st_size
            data = np.empty(size_bytes, np.uint8)
            _fill(file, path, 0, data.data)
        return data.data

    def read_range(self, info: ObjectInfo, offset: int, length: int) -> memoryview:
        """Return a part of a file."""
        check_range(offset, length)
        target = np.empty(length, np.uint8).data
        self.read_into(info, offset, target)
        return target

    def read_into(self, info: ObjectInfo, offset: int, target: memoryview) -> None:
        """Read a part of a file straight into `target`."""
        check_range(offset, target.nbytes)
        path = self._path(info.key)
        try:  # not `store_error`: a context manager costs as much as reading 4 KiB
            file = files.open(path)
            try:
                _fill(file, path, offset, target)
            finally:
                self.check(info, file)
        except OSError as error:
            raise translated(error, path) from error

    def open_file(self, key: str) -> OpenFile:
        """Return an open file, for many reads without a lookup each.

        After each copy from it, the caller calls `check`.
        """
        path = self._path(key)
        with store_error(path):
            return OpenFile(path)

    def check(self, info: ObjectInfo, file: OpenFile) -> None:
        """Raise `ChangedError` if an open file is not the indexed one.

        Called *after* bytes were copied: if the file has the indexed time now, it also had it while
        it was read, as far as the clock of its file system can tell.
        """
        status = os.fstat(file.descriptor)
        if status.st_size != info.size_bytes or status.st_mtime_ns != info.mtime_ns:
            now = ObjectInfo(key=info.key, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)
            if not info.allows(now):
                raise changed_error(self.uri + info.key, info, now)

    def write(self, key: str, data: Buffer, *, only_if_absent: bool = False) -> ObjectInfo:
        """Write a file beside the target, flush it, then give it its name in one step."""
        path = self._path(key)
        folder = path.rpartition("/")[0]
        temporary = f"{folder}/{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        size_bytes = memoryview(data).nbytes
        with store_error(path, needed_bytes=size_bytes):
            os.makedirs(folder, exist_ok=True)  # noqa: PTH103
            try:
                mtime_ns = _write_through(temporary, data)
                if only_if_absent:
                    os.link(temporary, path)
                else:
                    os.rename(temporary, path)  # noqa: PTH104
            except FileExistsError:
                raise ExistsError(f"{path} exists already", uri=path) from None
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)  # noqa: PTH108
            _flush_folder(folder)  # the data is flushed already, now its name
        return ObjectInfo(key=key, size_bytes=size_bytes, mtime_ns=mtime_ns)

    def delete(self, key: str) -> None:
        """Remove a file; its folders stay."""
        path = self._path(key)
        with store_error(path), contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108

    def close(self) -> None:
        """Close the files kept open for this folder."""
        files.forget(self.uri)


def _sorted_entries(folder: str) -> list[tuple[str, os.DirEntry[str]]]:
    """Return a folder's entries; a folder's name ends with `/`, so that keys are sorted."""
    entries: list[tuple[str, os.DirEntry[str]]] = []
    try:
        with os.scandir(folder) as found:
            for entry in found:
                if entry.name.startswith(TEMPORARY_PREFIX):
                    continue
                entries.append((f"{entry.name}/" if entry.is_dir() else entry.name, entry))
    except (FileNotFoundError, NotADirectoryError):
        return []  # as in an object store: nothing lies below a name that does not exist
    return sorted(entries, key=lambda item: item[0])


def _fill(file: OpenFile, path: str, offset: int, target: memoryview) -> None:
    rest = target.cast("B") if target.nbytes else target
    while rest.nbytes:
        count = os.preadv(file.descriptor, [rest], offset + target.nbytes - rest.nbytes)
        if count == 0:
            size_bytes = os.fstat(file.descriptor).st_size
            raise range_error(path, offset, target.nbytes, size_bytes)
        rest = rest[count:]
    if not target.nbytes and offset > os.fstat(file.descriptor).st_size:
        raise range_error(path, offset, 0, os.fstat(file.descriptor).st_size)


def _write_through(path: str, data: Buffer) -> int:
    """Write a new file, flush it to the disk, and return its time."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        rest = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        while rest.nbytes:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def _flush_folder(folder: str) -> None:
    """Make the new name survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
