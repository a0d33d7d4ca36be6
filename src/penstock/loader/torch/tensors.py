"""Arrays as tensors and tensors as arrays, without a copy wherever torch allows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.cuts import Cuts
from penstock.errors import OptionError

_NATIVE = {np.dtype(t) for t in ("bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8")}
_NATIVE |= {np.dtype(t) for t in ("f2", "f4", "f8", "c8", "c16")}
_KNOWN = {torch.from_numpy(np.zeros(0, kind)).dtype for kind in _NATIVE}
"""Types of tensors that NumPy has, too."""
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_of(array: npt.NDArray[Any]) -> Any:
    """Return a tensor that shares the array's memory; types that torch lacks stay arrays.

    Read-only arrays and arrays with negative strides, such as flipped images, are copied: torch has
    neither.
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


def seed(key: int) -> None:
    """Seed the generator of the CPU, and of no other device."""
    torch.default_generator.manual_seed(key % 2**63)


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, of whatever class."""
    return isinstance(value, torch.Tensor)


def array_of(tensor: torch.Tensor, name: str) -> tuple[npt.NDArray[Any], torch.dtype | None] | None:
    """Return an array that looks into the memory of a tensor of field `name`.

    If NumPy lacks its type, the elements are integers of the same size, and the type comes with the
    array. A tensor that is not one piece of memory (sparse, nested, quantized) has no array.
    """
    if tensor.device.type != "cpu":
        raise OptionError(
            f"field {name!r} is a tensor on {tensor.device}: transforms run ahead of the step, on "
            "the CPU; return it from there, and use batch.to(device) in the training loop"
        )
    if tensor.requires_grad:
        raise OptionError(
            f"field {name!r} is a tensor that requires grad: batches are made ahead of the step "
            "and carry no graph; return x.detach(), or compute it in the training loop"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    plain = tensor.as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    if plain.dtype in _KNOWN:
        return plain.numpy(), None
    return plain.view(_SAME_SIZE[plain.itemsize]).numpy(), plain.dtype


def tensor_as(array: npt.NDArray[Any], kind: torch.dtype) -> torch.Tensor:
    """Return an array's memory as a tensor of a type with elements of the same size."""
    return torch.from_numpy(array).view(kind)


def _reduced(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Reduce a tensor for pickle to its own elements, not the whole storage that it views."""
    if tensor.device.type == "cpu" and not tensor.requires_grad:
        found = array_of(tensor, "")
        if found is not None:
            array = found[0]
            if not array.flags.c_contiguous:
                array = array.copy()  # `ascontiguousarray` would give a number an axis.
            return _remade, (array, found[1])
    default: tuple[Any, ...] = tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    return default


def _remade(array: npt.NDArray[Any], kind: torch.dtype | None) -> torch.Tensor:
    return torch.from_numpy(array) if kind is None else tensor_as(array, kind)


REDUCERS: dict[type, Callable[[Any], Any]] = {torch.Tensor: _reduced}
"""Reducers by type, for `engine.shared`."""
