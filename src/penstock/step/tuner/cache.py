"""What was measured once, kept on disk: one small file for each key.

A key is a hash of everything that the answer depends on. A file that cannot be read, or a folder
that cannot be written, is as good as none: what it would have said is measured again.
"""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path

import torch
import xxhash

import penstock

__all__ = ["keep", "kept", "key_of", "versions"]

_SIZE_BYTES_MAX = 1 << 20


def key_of(*facts: object) -> str:
    """Return a name for some facts."""
    return xxhash.xxh3_128_hexdigest("\n".join(map(str, facts)).encode())


def versions() -> str:
    """Return of what runs which versions it is: another one may do the same in another time."""
    return f"torch {torch.__version__}, penstock {penstock.__version__}"


def kept(cache: str | Path | None, key: str) -> str | None:
    """Return what was kept, if there is something."""
    if cache is None:
        return None
    try:
        path = _path(cache, key)
        if path.stat().st_size > _SIZE_BYTES_MAX:
            return None
        return path.read_text("utf-8")
    except (OSError, ValueError, RuntimeError):
        # The last: nobody knows where `~` is, as in a container whose user has no name.
        return None


def keep(cache: str | Path | None, key: str, text: str) -> None:
    """Keep something, in one go: who reads sees all of it or nothing."""
    if cache is None:
        return
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        path = _path(cache, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Processes of two hosts may have one number, and one folder.
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        try:
            part.write_text(text, "utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def _path(cache: str | Path, key: str) -> Path:
    return Path(cache).expanduser() / f"step-{key}"
