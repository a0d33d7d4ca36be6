"""Random numbers that are a function of a seed and of a place.

A mask drawn for element i of a value is the same whoever computes it: one rank, or the rank that
holds the slice in which i lies. So slicing, chunking and recomputing cannot change it. The mixing
is 32-bit integer arithmetic, two rounds of multiply and shift, which NumPy, torch and Triton all
do alike to the last bit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["DRAW_BITS", "MIX", "draws", "threshold"]

DRAW_BITS = 24
"""A draw is an integer below two to the power of this; floats of 32 bits hold it exactly."""

MIX = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 0))
"""Shift right and xor, then multiply: three times, the last without multiplying."""

_GOLDEN = 0x9E3779B9
_LOW = 0xFFFFFFFF

Ints = npt.NDArray[np.int64]


def draws(seed: int, indices: Ints) -> Ints:
    """Return a draw for each place, in the range [0, 2^24).

    >>> draws(7, np.arange(4)).tolist() == draws(7, np.arange(4)).tolist()
    True
    """
    low = np.asarray(indices, np.int64) & _LOW
    high = np.asarray(indices, np.int64) >> 32
    mixed = _mixed((low ^ (seed & _LOW)) + (_GOLDEN & _LOW) & _LOW)
    mixed = _mixed((mixed + high * _GOLDEN + ((seed >> 32) & _LOW)) & _LOW)
    return mixed >> (32 - DRAW_BITS)


def threshold(share: float) -> int:
    """Return the draw below which so large a share of all draws lies."""
    return round(share * (1 << DRAW_BITS))


def _mixed(x: Ints) -> Ints:
    for shift, factor in MIX:
        x = x ^ (x >> shift)
        if factor:
            # Both are below 2^32, so the product wraps in 64 bits; its low half is right anyway.
            x = (x * factor) & _LOW
    return x
