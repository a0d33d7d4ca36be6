"""Ragged bytes of one field: many pieces of one buffer, not yet cut.

Making an array or tensor for each of hundreds of samples holds the interpreter's lock while other
threads could copy. So a batch carries only the places of the pieces; the hand-over makes all pieces
with one call.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.dataset.part import Ints
from penstock.engine.buffers import Bytes


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where the values of a field lie in a buffer, in rising order."""

    buffer: Bytes
    starts: Ints
    lengths: Ints
    """-1 where a sample has no such field."""

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return int(np.maximum(self.lengths, 0).sum())

    def arrays(self) -> list[Bytes | None]:
        """Return the values as views of the buffer."""
        buffer = self.buffer
        return [
            buffer[start : start + length] if length >= 0 else None
            for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True)
        ]

    def sizes(self) -> tuple[list[int], int]:
        """Return the sizes for one split of the buffer into pieces, and every how many is a value.

        With gaps, the pieces are gap, value, gap, value, …, and every second one is a value.
        Without gaps, all pieces but the last are values.
        """
        lengths = np.maximum(self.lengths, 0)
        gaps = self.starts - np.concatenate([[0], (self.starts + lengths)[:-1]])
        if gaps.any():
            sizes = np.stack([gaps, lengths], axis=1).reshape(-1)
            return [*sizes.tolist(), len(self.buffer) - int(sizes.sum())], 2
        return [*lengths.tolist(), len(self.buffer) - int(lengths.sum())], 1
