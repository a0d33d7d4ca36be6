"""From arrays to what the training loop wants: torch's tensors where torch is there.

The one room that imports torch lies above this one, so it is found by name, as a plug-in would be.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.errors import MissingPackageError, OptionError
from penstock.loader.cuts import Cuts

Convert = Callable[[Any], Any]


def converter(output: str) -> Convert:
    """Return the function that every array of a batch goes through."""
    if output not in ("auto", "torch", "numpy"):
        raise OptionError(f"output={output!r}: there are 'auto', 'torch' and 'numpy'")
    has_torch = output != "numpy" and importlib.util.find_spec("torch") is not None
    if output == "torch" and not has_torch:
        raise MissingPackageError("output='torch'", "torch", "torch")
    if not has_torch:
        return _as_arrays
    tensors = importlib.import_module("penstock.torch.tensors")
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
