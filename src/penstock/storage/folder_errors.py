"""Translates errors of the operating system into ours, with a way out."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import DeniedError, NotFoundError, OptionError, StoreError, UnavailableError
from penstock.units import show_bytes


@contextlib.contextmanager
def store_error(path: str, *, needed_bytes: int = 0) -> Iterator[None]:
    """Translate an `OSError` about `path` into our error."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise translated(error, path, needed_bytes) from error


def translated(error: OSError, path: str, needed_bytes: int = 0) -> Exception:
    """Return our error for one of the operating system's."""
    match error.errno:
        case errno.ENOENT | errno.ENOTDIR:
            return NotFoundError(
                f"{path} does not exist; of this path only {_nearest(path)} is there", uri=path
            )
        case errno.EISDIR:
            return NotFoundError(
                f"{path} is a folder, not a file; add the name of a file in it", uri=path
            )
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return DeniedError(
                f"{path}: {error.strerror} for user {os.geteuid()}; check the owner and mode of "
                f"{_nearest(path)}",
                uri=path,
            )
        case errno.ENOSPC | errno.EDQUOT:
            free_bytes = shutil.disk_usage(_nearest(path)).free
            return StoreError(
                f"{path}: no room for {show_bytes(needed_bytes)}, {show_bytes(free_bytes)} free; "
                "delete files, raise the quota or write to another folder",
                uri=path,
            )
        case errno.ENAMETOOLONG:
            return OptionError(f"{path}: a part of this name is longer than the file system takes")
        case errno.EMFILE | errno.ENFILE:
            return StoreError(
                f"{path}: too many files are open; raise it with `ulimit -n`", uri=path
            )
        case errno.EIO | errno.ESTALE | errno.ETIMEDOUT:
            return UnavailableError(
                f"{path}: {error.strerror}; the disk or the file server behind it has a problem",
                uri=path,
            )
    return StoreError(f"{path}: {error.strerror or error}", uri=path)


def _nearest(path: str) -> Path:
    """Return the longest part of a path that exists."""
    candidate = Path(path)
    while not candidate.exists() and candidate != candidate.parent:
        candidate = candidate.parent
    return candidate
