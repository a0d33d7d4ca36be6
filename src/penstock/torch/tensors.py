"""Arrays as tensors, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_NATIVE = {np.dtype(t) for t in ("bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8")}
_NATIVE |= {np.dtype(t) for t in ("f2", "f4", "f8", "c8", "c16")}


def tensor_of(array: npt.NDArray[Any]) -> Any:
    """Return a tensor that shares the array's memory; types that torch lacks stay arrays."""
    if array.dtype not in _NATIVE:
        return array
    return torch.from_numpy(array)
