"""Arrays as tensors, without a copy wherever torch allows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.loader.cuts import Cuts

_NATIVE = {np.dtype(t) for t in ("bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8")}
_NATIVE |= {np.dtype(t) for t in ("f2", "f4", "f8", "c8", "c16")}


def tensor_of(array: npt.NDArray[Any]) -> Any:
    """Return a tensor that shares the array's memory; types that torch lacks stay arrays.

    Torch knows neither read-only memory nor negative strides, such as a flipped image has: these
    are copied.
    """
    if array.dtype not in _NATIVE:
        return array
    if not array.flags.writeable or min(array.strides, default=0) < 0:
        array = array.copy()
    return torch.from_numpy(array)


def tensors_of(cuts: Cuts) -> list[Any]:
    """Return the ragged values of a field, as tensors that share one buffer."""
    sizes, every = cuts.sizes()
    pieces = torch.from_numpy(cuts.buffer).split_with_sizes(sizes)
    values = list(pieces[every - 1 : -1 : every])
    if (cuts.lengths < 0).any():
        return [v if n >= 0 else None for v, n in zip(values, cuts.lengths.tolist(), strict=True)]
    return values
