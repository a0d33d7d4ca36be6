"""What a key may look like, checked in one place.

A key is a relative name: parts joined by `/`, none of them empty, `.` or `..`. That is the part of
every store's naming on which all of them agree, so a data set can move between stores.
"""

from __future__ import annotations

import functools

from penstock.errors import OptionError

TEMPORARY_PREFIX = ".penstock-tmp-"
"""How half-written files are named; listings never show such names and nobody may write one."""

KEY_BYTES_MAX = 1024
"""The shortest limit of the object stores we know (S3)."""


@functools.lru_cache(maxsize=4096)
def checked_key(key: str) -> str:
    """Return the key, or raise `OptionError` when it is none.

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
    """Return whether a listing for users leaves this key out.

    Names with a leading dot (also ours, `.penstock/`) and the `_SUCCESS` marks of Spark are not
    data.

    >>> is_hidden("a/.penstock/index"), is_hidden("a/_SUCCESS"), is_hidden("a/b.tar")
    (True, True, False)
    """
    return any(part.startswith((".", "_SUCCESS")) for part in key.split("/"))
