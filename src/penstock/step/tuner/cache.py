"""What was measured once, kept on disk: one small file for each key.

A key is a hash of everything that the answer depends on. A file that cannot be read, or a folder
that cannot be written, is as good as none: what it would have said is measured again.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import xxhash

__all__ = ["keep", "kept", "key_of"]

_SIZE_BYTES_MAX = 1 << 20


def key_of(*facts: object) -> str:
    """Return a name for some facts."""
    return xxhash.xxh3_128_hexdigest("\n".join(map(str, facts)).encode())


def kept(cache: str | Path | None, key: str) -> str | None:
    """Return what was kept, if there is something."""
    if cache is None:
        return None
    path = _path(cache, key)
    try:
        if path.stat().st_size > _SIZE_BYTES_MAX:
            return None
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def keep(cache: str | Path | None, key: str, text: str) -> None:
    """Keep something, in one go: who reads sees all of it or nothing."""
    if cache is None:
        return
    path = _path(cache, key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(text, "utf-8")
        part.replace(path)


def _path(cache: str | Path, key: str) -> Path:
    return Path(cache).expanduser() / f"step-{key}"
