"""Errors about ranges of objects, with the same words for all stores."""

from __future__ import annotations

from datetime import UTC, datetime

from penstock.errors import ChangedError, OptionError, RangeError, TruncatedError
from penstock.storage.base import ObjectInfo


def check_range(offset: int, length: int) -> None:
    """Raise `OptionError` for a range that no object could have."""
    if offset < 0 or length < 0:
        raise OptionError(f"a range needs offset and length of at least 0, got {offset}, {length}")


def range_error(uri: str, offset: int, length: int, size_bytes: int) -> RangeError:
    """Return the error of a range that reaches past the end."""
    return RangeError(
        f"{uri}: bytes {offset} to {offset + length} were asked for, the object has {size_bytes}",
        uri=uri,
    )


def truncated_error(uri: str, found_bytes: int, expected_bytes: int) -> TruncatedError:
    """Return the error of an answer that ends too early."""
    return TruncatedError(
        f"{uri}: {found_bytes} of {expected_bytes} bytes arrived before the store hung up; "
        "asking again usually helps",
        uri=uri,
    )


def changed_error(uri: str, was: ObjectInfo, now: ObjectInfo) -> ChangedError:
    """Return the error of an object that is not the one that was indexed."""
    return ChangedError(
        f"{uri} is not the object that was indexed: {shown_mark(was)} then, {shown_mark(now)} now; "
        "put the old one back, or index the data set again with penstock.open(..., rebuild=True) "
        "or `penstock index --rebuild`"
    )


def shown_mark(info: ObjectInfo) -> str:
    """Return the size and mark of an object in words."""
    if not (info.etag or info.mtime_ns):
        return f"{info.size_bytes} bytes"
    # All digits of the time: two different marks must not look the same.
    seconds, rest_ns = divmod(info.mtime_ns, 10**9)
    when = datetime.fromtimestamp(seconds, UTC).strftime(f"%Y-%m-%d %H:%M:%S.{rest_ns:09}")
    return f"{info.size_bytes} bytes, {info.etag or when}"
