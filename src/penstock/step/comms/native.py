"""Torch's own collectives on flat tensors, under the names that this release of torch has.

The flat forms have had three names; from 2.13 on the older ones warn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

__all__ = ["all_gather_flat", "reduce_scatter_flat"]


def _named(*names: str) -> Any:
    """Return the first of these functions that this release has."""
    for name in names:
        if hasattr(distributed, name):
            return getattr(distributed, name)
    raise AssertionError(f"torch {torch.__version__} has none of {', '.join(names)}")


def all_gather_flat(
    out: torch.Tensor,
    tensor: torch.Tensor,
    *,
    group: distributed.ProcessGroup | None = None,
    async_op: bool = False,
) -> distributed.Work | None:
    """Put all ranks' tensors, which have equal lengths, in a row."""
    call = _named("all_gather_single", "all_gather_into_tensor")
    work: distributed.Work | None = call(out, tensor, group=group, async_op=async_op)
    return work


def reduce_scatter_flat(
    out: torch.Tensor,
    tensor: torch.Tensor,
    *,
    op: Any = None,
    group: distributed.ProcessGroup | None = None,
    async_op: bool = False,
) -> distributed.Work | None:
    """Put this rank's part of the sum in `out`; parts have equal lengths."""
    call = _named("reduce_scatter_single", "reduce_scatter_tensor")
    op = distributed.ReduceOp.SUM if op is None else op
    work: distributed.Work | None = call(out, tensor, op=op, group=group, async_op=async_op)
    return work
