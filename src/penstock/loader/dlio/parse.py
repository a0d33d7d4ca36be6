"""What DLIO's readers do with a file: parse all of it, then return an array of a fixed shape.

DLIO's own readers return one constant array in place of the data. Here the array holds bytes of the
sample itself, which costs the same copy and lets a test compare them with the file. No DLIO is
imported here: this is what worker processes run.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import OptionError

Array = npt.NDArray[Any]

FORMATS = ("npz", "npy", "jpeg", "png")
"""Formats of DLIO that hold one sample a file and that DLIO's torch loader reads, too."""


def refuse_format(name: str, num_samples_per_file: int) -> None:
    """Raise if files of this kind cannot be read sample by sample, each file a sample."""
    if name not in FORMATS:
        raise OptionError(
            f"dataset.format is {name!r}; Penstock reads {', '.join(FORMATS)} under DLIO"
        )
    if num_samples_per_file != 1:
        raise OptionError(
            f"dataset.num_samples_per_file is {num_samples_per_file}; under DLIO Penstock reads "
            "files of one sample each: set it to 1 and raise num_files_train"
        )


def array_of(raw: bytes, format: str) -> Array:
    """Return the array that a whole file holds.

    `np.load` compares the checksum of an npz member, Pillow decodes every pixel: as DLIO's readers.
    """
    if format == "npz":
        with np.load(io.BytesIO(raw)) as members:
            return np.asarray(members["x"])
    if format == "npy":
        return np.asarray(np.load(io.BytesIO(raw)))
    from PIL import Image

    with Image.open(io.BytesIO(raw)) as image:
        return np.asarray(image)


def fitted(array: Array, side: int) -> Array:
    """Return the first bytes of an array as a square, repeated where there are too few of them.

    >>> fitted(np.arange(5, dtype=np.uint8), 3).tolist()
    [[0, 1, 2], [3, 4, 0], [1, 2, 3]]
    """
    flat = array.reshape(-1).view(np.uint8)
    return np.resize(flat[: side * side], (side, side))


def parsed_sample(sample: dict[str, Any], *, format: str, side: int) -> dict[str, Any]:
    """Return what one sample becomes in a batch: its image, and how many bytes were read for it."""
    (raw,) = sample.values()
    return {"image": fitted(array_of(raw, format), side), "size_bytes": len(raw)}
