"""Conversion of values: to arrays on their way into a batch, to tensors on their way out.

`loader.torch`, the only room of the data path that imports torch, lies above this one, so its
modules are imported by name, as a plug-in would be. Tensors that a transform has returned are
handled as arrays over their memory: the code that joins them copies once and need not know torch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from penstock.engine.cuts import Cuts
from penstock.errors import MissingPackageError

Convert = Callable[[Any], Any]
_Method = TypeVar("_Method", bound=Callable[..., Any])
Special = Any
"""A type of torch that NumPy lacks, such as bfloat16."""

_NEVER_ARRAYS = frozenset(
    {str, int, float, bool, complex, type(None), dict, list, tuple, bytes, bytearray, memoryview}
)


def converter(output: str) -> Convert:
    """Return the function that converts every field of a batch for the training loop."""
    has_torch = output != "numpy" and importlib.util.find_spec("torch") is not None
    if output == "torch" and not has_torch:
        raise MissingPackageError("output='torch'", "torch", "torch")
    if not has_torch:
        return _as_arrays
    tensors = _tensors()
    return lambda value: _as_tensors(value, tensors.tensor_of, tensors.tensors_of)


def _as_arrays(value: Any) -> Any:
    return value.arrays() if isinstance(value, Cuts) else value


def _as_tensors(value: Any, tensor_of: Convert, tensors_of: Convert) -> Any:
    if isinstance(value, np.ndarray):
        return tensor_of(value)
    if isinstance(value, Cuts):
        return tensors_of(value)
    if isinstance(value, list):
        return [tensor_of(v) if isinstance(v, np.ndarray) else v for v in value]
    return value


def array_of(value: Any, name: str) -> tuple[npt.NDArray[Any], Special | None] | None:
    """Return a value of field `name` as an array, or None if it is not one; nothing is copied.

    A tensor's array looks into its memory. If NumPy lacks the tensor's type, the elements of the
    array are integers of the same size, and the type comes with it.
    """
    if isinstance(value, np.ndarray):
        return None if value.dtype == object else (value, None)
    if type(value) in _NEVER_ARRAYS or isinstance(value, np.generic):
        return None
    if "torch" in sys.modules and (tensors := _tensors()).is_tensor(value):
        found: tuple[npt.NDArray[Any], Special | None] | None = tensors.array_of(value, name)
        return found
    # Images of Pillow have this interface; our own decoders would make the same arrays.
    return (np.asarray(value), None) if hasattr(value, "__array_interface__") else None


def special_of(array: npt.NDArray[Any], special: Special) -> Any:
    """Return an array's memory as a tensor of a type that NumPy lacks."""
    return _tensors().tensor_as(array, special)


def tensor_reducers() -> dict[type, Callable[[Any], Any]]:
    """Return how a pickler reduces tensors; empty if this process has not imported torch."""
    reducers: dict[type, Callable[[Any], Any]] = (
        _tensors().REDUCERS if "torch" in sys.modules else {}
    )
    return reducers


def seed_tensors(key: int) -> None:
    """Seed torch's own generator, where this process has torch."""
    if "torch" in sys.modules:
        _tensors().seed(key)


def pinned_memory() -> Any:
    """Return what page-locks memory for the GPU; None while this process uses no GPU."""
    if "torch" not in sys.modules:
        return None
    return importlib.import_module("penstock.loader.torch.pinning").pinned_memory()


def profiled(name: str) -> Callable[[_Method], _Method]:
    """Show a method as a range in torch profiles, while a profile is being made."""

    def wrap(method: _Method) -> _Method:
        @functools.wraps(method)
        def ranged(*args: Any, **kwargs: Any) -> Any:
            if "torch" not in sys.modules:
                return method(*args, **kwargs)
            # Called for each batch: a lookup is cheaper than `import_module`.
            ranges = sys.modules.get(_RANGES) or importlib.import_module(_RANGES)
            with ranges.range_of(name):
                return method(*args, **kwargs)

        return cast(_Method, ranged)

    return wrap


_RANGES = "penstock.loader.torch.ranges"


def _tensors() -> Any:
    return importlib.import_module("penstock.loader.torch.tensors")
