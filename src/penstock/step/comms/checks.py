"""What every Comm refuses before anything is sent: tensors that do not fit each other or the wire.

A mistake that only some ranks make is found later, by those who wait for the others. One that this
rank can see is the caller's, and the error names the two numbers that do not match.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.errors import OptionError
from penstock.step.program.layouts import part

__all__ = [
    "WIRES",
    "check_counts",
    "check_list",
    "check_op",
    "check_part",
    "check_self",
    "flat",
    "wire_dtype",
]

OPS = ("sum", "mean", "max", "min")
WIRES = {"bf16": torch.bfloat16, "fp16": torch.float16, "f16": torch.float16}


def flat(name: str, tensor: torch.Tensor, device_type: str | None) -> torch.Tensor:
    """Return a tensor as one row that shares its memory and takes no part in autograd."""
    if device_type is not None and tensor.device.type != device_type:
        raise OptionError(
            f"{name}: this Comm carries {device_type} tensors, got one on {tensor.device}; copy it "
            f"there or use the Comm of that device"
        )
    if not tensor.is_contiguous():
        raise OptionError(
            f"{name}: strides {tuple(tensor.stride())} of shape {tuple(tensor.shape)} are not "
            f"contiguous; call contiguous() first"
        )
    if tensor.dim() == 1 and not tensor.requires_grad:
        return tensor
    return tensor.detach().view(-1)


def check_op(name: str, op: str, tensor: torch.Tensor) -> None:
    """Refuse unknown reductions, and those that make no sense for a type."""
    if op not in OPS:
        raise OptionError(f"{name}: no reduction {op!r}; there are {', '.join(OPS)}")
    if tensor.dtype == torch.bool:
        raise OptionError(f"{name}: booleans have no {op}; convert them to uint8")
    if op in ("max", "min") and tensor.is_complex():
        raise OptionError(f"{name}: complex numbers have no {op}")
    if op == "mean" and not (tensor.dtype.is_floating_point or tensor.is_complex()):
        raise OptionError(f"{name}: a mean of {tensor.dtype} would be cut off; use sum")


def check_part(name: str, mine: torch.Tensor, whole: torch.Tensor, *, rank: int, size: int) -> None:
    """Refuse a part that is not this rank's part of the whole."""
    _check_same_type(name, mine, whole)
    start, stop = part(whole.numel(), size, rank)
    if mine.numel() != stop - start:
        raise OptionError(
            f"{name}: rank {rank} of {size} has {stop - start} of {whole.numel()} elements, but "
            f"its tensor has {mine.numel()}; parts are cut as torch.chunk cuts them"
        )


def check_list(
    name: str, mine: torch.Tensor, parts: Sequence[torch.Tensor], *, rank: int, size: int
) -> None:
    """Refuse a list of parts that has not one for each rank, or another part for this one."""
    if len(parts) != size:
        raise OptionError(f"{name}: {len(parts)} parts for {size} ranks; give one for each")
    for each in parts:
        _check_same_type(name, mine, each)
    if parts[rank].numel() != mine.numel():
        raise OptionError(
            f"{name}: the part of rank {rank} has {parts[rank].numel()} elements, its own tensor "
            f"{mine.numel()}; they must be equal"
        )


def check_counts(name: str, tensor: torch.Tensor, counts: Sequence[int], *, size: int) -> None:
    """Refuse counts, one for each rank, that do not add up to a tensor's elements."""
    if len(counts) != size or min(counts) < 0 or sum(counts) != tensor.numel():
        raise OptionError(
            f"{name}: {size} counts that add up to {tensor.numel()} elements are needed, got "
            f"{list(counts)}, together {sum(counts)}"
        )


def check_self(
    name: str, out: torch.Tensor, tensor: torch.Tensor, lengths: tuple[int, int]
) -> None:
    """Refuse what a rank cannot send to itself: (received, sent) elements of these tensors."""
    received, sent = lengths
    if out.dtype != tensor.dtype or received != sent:
        raise OptionError(
            f"{name}: this rank sends itself {sent} elements of {tensor.dtype} and has room for "
            f"{received} of {out.dtype}; both must be equal"
        )
    if tensor.numel() and out.data_ptr() == tensor.data_ptr():
        raise OptionError(f"{name}: out and tensor share memory; give it another place")


def wire_dtype(name: str, wire: str | None, tensor: torch.Tensor) -> torch.dtype:
    """Return the type in which elements travel."""
    if wire is None:
        return tensor.dtype
    if wire not in WIRES:
        raise OptionError(f"{name}: no wire format {wire!r}; there are {', '.join(WIRES)}")
    if not tensor.dtype.is_floating_point:
        raise OptionError(f"{name}: {tensor.dtype} cannot travel as {wire}; leave wire out")
    sent = WIRES[wire]
    return sent if sent.itemsize < tensor.dtype.itemsize else tensor.dtype


def _check_same_type(name: str, one: torch.Tensor, other: torch.Tensor) -> None:
    if one.dtype != other.dtype:
        raise OptionError(f"{name}: tensors of {one.dtype} and {other.dtype}; they must be equal")
