"""Loops that use what they are given.

A batch that nobody reads costs a loader less than it would in training: views are never opened,
pages of mapped files never come, and the interpreter's lock is free. `touch` reads as little as a
loop can without leaving a page out; every loader and every limit is measured with it. What a GPU
does with a batch is in `gpu_feed`.
"""

from collections.abc import Mapping

import numpy as np

PAGE = 4096


def touch(value: object) -> int:
    """Read one byte of each page of everything inside, and all of what is smaller than a page.

    >>> touch({"bin": [bytes([3]) * 9000], "cls": np.array([1, 2])})
    12
    """
    if isinstance(value, bytes):
        return sum(value[::PAGE])
    if isinstance(value, list | tuple):
        return sum(map(touch, value))
    if isinstance(value, Mapping):
        return sum(map(touch, value.values()))
    if isinstance(value, int | float):
        return int(value)
    # In the order of memory, so that an array with its axes exchanged is no copy.
    array = (value.numpy() if hasattr(value, "numpy") else np.asarray(value)).ravel(order="K")
    if array.nbytes <= PAGE:
        return int(array.sum())
    return sum(memoryview(array).cast("B")[::PAGE].tobytes())
