"""Arguments as users give them: checked once, kept as plain values.

Whole numbers of NumPy and torch are accepted wherever a whole number is expected, and kept as
`int`, because states and descriptions of orders are written as JSON. Bools, floats and texts are
refused there, even where Python would compute with them: `epochs=2.5` and `batch_size="32"` are
mistakes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np

from penstock.errors import OptionError

COUNT_MAX = 2**62
"""The sum of two such counts still fits 64 bits."""


def count_of(
    name: str, value: Any, *, least: int = 1, most: int = COUNT_MAX, hint: str = ""
) -> int:
    """Return a whole number from `least` to `most`, or say what `name` must be.

    >>> count_of("batch_size", np.int64(32))
    32
    """
    way_out = f"; {hint}" if hint else ""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise OptionError(f"{name} must be a whole number, got {value!r}{way_out}")
    if number < least:
        raise OptionError(f"{name} must be at least {least}, got {number}{way_out}")
    if number > most:
        raise OptionError(f"{name} must be at most {most}, got {number}{way_out}")
    return number


def optional_count(name: str, value: Any, *, hint: str = "") -> int | None:
    """Return a whole number of at least 1, or None where None was given."""
    return None if value is None else count_of(name, value, hint=hint)


def number_of(name: str, value: Any) -> float:
    """Return a finite number that is not negative, as it was written.

    >>> number_of("a weight", np.float32(0.7)), number_of("a weight", 2)
    (0.7, 2)
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number:
        raise OptionError(f"{name} must be a number, got {value!r}")
    if not (math.isfinite(value) and value >= 0):
        raise OptionError(f"{name} must be a finite number from 0 on, got {value!r}")
    if isinstance(value, np.generic):
        # A float32 of 0.7 means 0.7, not the double that is nearest to that float32.
        return int(value) if isinstance(value, np.integer) else float(str(value))
    number: float = value
    return number


def flag_of(name: str, value: Any) -> bool:
    """Return True or False."""
    if not isinstance(value, bool | np.bool_):
        raise OptionError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def word_of(name: str, value: Any, words: Sequence[str]) -> str:
    """Return one of some words."""
    if not isinstance(value, str) or value not in words:
        *first, last = map(repr, words)
        raise OptionError(f"{name}={value!r}: there are {', '.join(first)} and {last}")
    return value


def function_of(name: str, value: Any) -> Any:
    """Return something that can be called, or None."""
    if value is not None and not callable(value):
        raise OptionError(f"{name} must be a function, got {value!r}")
    return value
