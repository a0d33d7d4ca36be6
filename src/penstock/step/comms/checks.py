"""What every Comm refuses before anything is sent: tensors that do not fit each other or the wire.

A mistake that only some ranks make is found later, by those who wait for the others. One that this
rank can see is the caller's, with the two numbers that do not match.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.errors import OptionError
from penstock.step.program.layouts import part

__all__ = ["WIRES", "check_apart", "check_op", "check_parts", "check_runs", "flat", "wire_dtype"]

OPS = ("sum", "mean", "max", "min")
WIRES = {"bf16": torch.bfloat16, "fp16": torch.float16, "f16": torch.float16}


def flat(name: str, tensor: torch.Tensor, device_type: str = "cpu") -> torch.Tensor:
    """Return a tensor as one row that shares its memory and knows no gradients."""
    if tensor.device.type != device_type:
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
    """Refuse reductions that are not there or make no sense for a type."""
    if op not in OPS:
        raise OptionError(f"{name}: no reduction {op!r}; there are {', '.join(OPS)}")
    if tensor.dtype == torch.bool:
        raise OptionError(f"{name}: booleans have no {op}; convert them to uint8")
    if op in ("max", "min") and tensor.is_complex():
        raise OptionError(f"{name}: complex numbers have no {op}")
    if op == "mean" and not (tensor.dtype.is_floating_point or tensor.is_complex()):
        raise OptionError(f"{name}: a mean of {tensor.dtype} would be cut off; use sum")


def check_parts(
    name: str, mine: torch.Tensor, whole: torch.Tensor, *, rank: int, size: int
) -> None:
    """Refuse a part that is not this rank's part of the whole."""
    _same_type(name, mine, whole)
    start, stop = part(whole.numel(), size, rank)
    if mine.numel() != stop - start:
        raise OptionError(
            f"{name}: rank {rank} of {size} has {stop - start} of {whole.numel()} elements, but "
            f"its tensor has {mine.numel()}; parts are cut as torch.chunk cuts them"
        )


def check_apart(
    name: str, mine: torch.Tensor, parts: Sequence[torch.Tensor], *, rank: int, size: int
) -> list[torch.Tensor]:
    """Return parts that lie apart as rows, or refuse what are not parts of one whole."""
    if len(parts) != size:
        raise OptionError(f"{name}: {len(parts)} parts for {size} ranks; give one for each")
    for each in parts:
        _same_type(name, mine, each)
    if parts[rank].numel() != mine.numel():
        raise OptionError(
            f"{name}: the part of rank {rank} has {parts[rank].numel()} elements, its own tensor "
            f"{mine.numel()}; they must be equal"
        )
    return [flat(name, each) for each in parts]


def check_runs(
    name: str, tensor: torch.Tensor, counts: Sequence[int], *, size: int
) -> list[torch.Tensor]:
    """Return runs of a tensor, one for each rank, or refuse counts that do not add up."""
    if len(counts) != size or min(counts) < 0 or sum(counts) != tensor.numel():
        raise OptionError(
            f"{name}: {size} counts that add up to {tensor.numel()} elements are needed, got "
            f"{list(counts)}, together {sum(counts)}"
        )
    return list(torch.split(tensor, list(counts)))


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


def _same_type(name: str, one: torch.Tensor, other: torch.Tensor) -> None:
    if one.dtype != other.dtype:
        raise OptionError(f"{name}: tensors of {one.dtype} and {other.dtype}; they must be equal")
