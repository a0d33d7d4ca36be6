"""Element types: their names in programs and in torch.

Inside a kernel narrow floats are computed with 32 bits; only its results are rounded, once.
"""

from __future__ import annotations

import torch

from penstock.errors import ProgramError

__all__ = ["COMPUTED", "TORCH", "computed", "name_of", "torch_dtype"]

TORCH: dict[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "u8": torch.uint8,
    "bool": torch.bool,
}

COMPUTED = {"bf16": "f32", "f16": "f32"}
"""The types in which narrow floats are computed."""

_NAMES = {dtype: name for name, dtype in TORCH.items()}


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's name of an element type.

    >>> torch_dtype("bf16")
    torch.bfloat16
    """
    found = TORCH.get(name)
    if found is None:
        raise ProgramError(f"no element type {name!r}; there are {', '.join(TORCH)}")
    return found


def name_of(dtype: torch.dtype) -> str:
    """Return the name in programs of an element type of torch.

    >>> name_of(torch.int64)
    'i64'
    """
    found = _NAMES.get(dtype)
    if found is None:
        raise ProgramError(f"programs have no elements of {dtype}; there are {', '.join(TORCH)}")
    return found


def computed(name: str) -> str:
    """Return the element type in which values of a type are computed inside a kernel."""
    return COMPUTED.get(name, name)
