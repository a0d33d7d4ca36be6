"""Torch's own collectives on flat tensors of equal parts, under the names of this release of torch.

The flat forms have had three names; from 2.13 on the older ones warn.
"""

from __future__ import annotations

from typing import Any

from torch import distributed

__all__ = ["all_gather_flat", "reduce_scatter_flat"]


def _first(*names: str) -> Any:
    """Return the first of these functions that this release has."""
    return next((getattr(distributed, name) for name in names if hasattr(distributed, name)), None)


all_gather_flat = _first("all_gather_single", "all_gather_into_tensor")
reduce_scatter_flat = _first("reduce_scatter_single", "reduce_scatter_tensor")
