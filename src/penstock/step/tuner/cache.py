"""Measurements kept on disk: one small file for each key.

A key is a hash of everything that a measurement depends on. A file that cannot be read, or a folder
that cannot be written, counts as none: the measurement is made again.
"""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path

import torch
import xxhash

import penstock
from penstock.errors import ProgramError

__all__ = ["UNREADABLE", "keep", "kept", "key_of", "versions"]

UNREADABLE = (
    *(ProgramError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
    RecursionError,
)
"""Errors of reading text from the cache that something else has written: it is measured again."""

_SIZE_BYTES_MAX = 1 << 20


def key_of(*facts: object) -> str:
    """Return a hash of some facts."""
    return xxhash.xxh3_128_hexdigest("\n".join(map(str, facts)).encode())


def versions() -> str:
    """Return the versions of torch and Penstock: others may be faster or slower."""
    return f"torch {torch.__version__}, penstock {penstock.__version__}"


def kept(cache: str | Path | None, key: str) -> str | None:
    """Return the text of a key, or None."""
    if cache is None:
        return None
    try:
        path = _path(cache, key)
        if path.stat().st_size > _SIZE_BYTES_MAX:
            return None
        return path.read_text("utf-8")
    except (OSError, ValueError, RuntimeError):
        # RuntimeError: `~` is unknown, as in a container whose user has no name.
        return None


def keep(cache: str | Path | None, key: str, text: str) -> None:
    """Write a text under a key. Readers see all of it or nothing."""
    if cache is None:
        return
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        path = _path(cache, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        # A random name: processes on two hosts may share a process id and a folder.
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        try:
            part.write_text(text, "utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def _path(cache: str | Path, key: str) -> Path:
    return Path(cache).expanduser() / f"step-{key}"
