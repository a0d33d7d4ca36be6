"""The errors of ranges, worded once for all stores."""

from __future__ import annotations

from penstock.errors import OptionError, RangeError, TruncatedError


def check_range(offset: int, length: int) -> None:
    """Raise `OptionError` for a range that no object could have."""
    if offset < 0 or length < 0:
        raise OptionError(f"a range needs offset and length of at least 0, got {offset}, {length}")


def range_error(uri: str, offset: int, length: int, size_bytes: int) -> RangeError:
    """Return the error of a range that reaches past the end."""
    return RangeError(
        f"{uri}: bytes {offset} to {offset + length} were asked for, the object has {size_bytes}; "
        "if it was replaced by a shorter one, index the data set again",
        uri=uri,
    )


def truncated_error(uri: str, found_bytes: int, expected_bytes: int) -> TruncatedError:
    """Return the error of an answer that ends too early."""
    return TruncatedError(
        f"{uri}: {found_bytes} of {expected_bytes} bytes arrived before the store hung up; "
        "asking again usually helps",
        uri=uri,
    )
