"""One number for everything that was delivered.

Each delivered sample is hashed together with its epoch and its position, and the hashes are added
up. A sum does not depend on who delivered which part, or when; yet it depends on the order, because
each hash contains the position. So the sums of any number of ranks, before and after any number of
interruptions, merge to the one that a single uninterrupted rank would have.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.errors import OptionError
from penstock.order.keys import Words, check_epoch, key_of, mix64

_ODD = np.uint64(0xD6E8FEB86659FD93)
_WORD_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamHash:
    """The hash of a part of a stream of samples.

    >>> whole = StreamHash().update(0, [0, 1, 2], [40, 41, 42])
    >>> half = StreamHash().update(0, [2], [42]).merge(StreamHash().update(0, [0, 1], [40, 41]))
    >>> whole == half, whole.hexdigest()
    (True, 'e138d8ac851a9710')
    """

    total: int = 0
    """Sum of the hashes of all samples, modulo 2**64."""
    num_samples: int = 0
    """Samples hashed."""

    def update(
        self,
        epoch: int,
        positions: npt.ArrayLike,
        ids: npt.ArrayLike,
        mask: npt.ArrayLike | None = None,
    ) -> StreamHash:
        """Return the hash with more samples in it; those with a mask of False are padding."""
        check_epoch(epoch)
        words, names = _words(positions), _words(ids)
        if words.shape != names.shape:
            raise OptionError(f"got {len(words)} positions for {len(names)} sample ids")
        if mask is not None:
            kept = np.asarray(mask, dtype=np.bool_)
            words, names = words[kept], names[kept]
        # Two rounds of mixing, one for each coordinate: a swap of two samples changes the sum.
        hashes = mix64(mix64(words * _ODD + np.uint64(key_of(epoch, "stream"))) + names)
        added = int(hashes.sum(dtype=np.uint64))
        return StreamHash(
            total=(self.total + added) & _WORD_MASK, num_samples=self.num_samples + len(names)
        )

    def merge(self, other: StreamHash) -> StreamHash:
        """Return the hash of both parts together."""
        return StreamHash(
            total=(self.total + other.total) & _WORD_MASK,
            num_samples=self.num_samples + other.num_samples,
        )

    def hexdigest(self) -> str:
        """Return 16 hex digits that stand for the samples and their number."""
        return f"{key_of(self.total, 'stream', self.num_samples):016x}"


def _words(values: npt.ArrayLike) -> Words:
    return np.atleast_1d(np.asarray(values, dtype=np.int64)).view(np.uint64)
