"""Checks of names that come from outside.

A key is a relative name: parts joined by `/`, none of them empty, `.` or `..`. All stores allow
such names, so a data set can move between stores. Every store checks each key that it is given,
whoever made it. Files that are named by their content have a hash of 32 hex digits as their name,
so such a name can never lead out of its folder.
"""

from __future__ import annotations

import functools
import re

from penstock.errors import OptionError

TEMPORARY_PREFIX = ".penstock-tmp-"
"""Begins the names of half-written files; listings leave them out and users cannot write them."""

KEY_BYTES_MAX = 1024
"""The shortest limit of the object stores we know (S3)."""


_HASH = re.compile(r"[0-9a-f]{32}")


def is_hash(name: str) -> bool:
    """Return whether a name is an xxh3_128 hash: 32 small hex digits.

    >>> is_hash("99aa06d3014798d86001c324468d497f"), is_hash("../../x")
    (True, False)
    """
    return _HASH.fullmatch(name) is not None


def checked_hash(name: str) -> str:
    """Return a name that is a hash, or raise `OptionError`."""
    if not is_hash(name):
        raise OptionError(f"{name[:80]!r} is not the name of a part: that has 32 hex digits")
    return name


@functools.lru_cache(maxsize=4096)
def checked_key(key: str) -> str:
    """Return the key, or raise `OptionError` if it is not valid.

    >>> checked_key("train/shard 0001.tar")
    'train/shard 0001.tar'
    """
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in key:
        raise OptionError(
            f"{key!r} is not a key: parts between '/' must not be empty, '.' or '..'; "
            "write it relative to the store's root"
        )
    if parts[-1].startswith(TEMPORARY_PREFIX):
        raise OptionError(f"{key!r} starts with {TEMPORARY_PREFIX!r}, which is kept for writers")
    size_bytes = len(key.encode("utf-8", "surrogateescape"))
    if size_bytes > KEY_BYTES_MAX:
        raise OptionError(
            f"a key has at most {KEY_BYTES_MAX} bytes, {key[:40]!r}… has {size_bytes}"
        )
    return key


def is_hidden(key: str) -> bool:
    """Return whether a listing of data leaves this key out.

    Names with a leading dot (also our `.penstock/`) and Spark's `_SUCCESS` marks are not data.

    >>> is_hidden("a/.penstock/index"), is_hidden("a/_SUCCESS"), is_hidden("a/b.tar")
    (True, True, False)
    """
    return any(part.startswith((".", "_SUCCESS")) for part in key.split("/"))
