"""A keyed permutation: a shuffled list that is computed instead of stored.

A value below `size` is split into its low bits (left) and the rest (right). Rounds in turn stir a
hash of the right into the left and a hash of the left into the right; each can be undone, so the
whole is one to one, whatever the hash (a Feistel network, unbalanced in Rivest's sense). Left is a
power of two wide and right just wide enough, so that no step divides, and that fewer than
2 * sqrt(size) values of the network lie outside the range. A value that lands there goes through
once more until it comes back (cycle walking), which keeps the map one to one on the range.

Integers only, and no more than 32 bits of them in a round: twice as many fit in a vector register.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import OptionError
from penstock.order.keys import NUM_KEYS, Words, member_keys, stream_of

Halves: TypeAlias = npt.NDArray[np.uint32]

SIZE_MAX = 2**63
_CHUNK = 2**15
"""Values worked on at once: their scratch arrays fit in a second-level cache."""
_NETWORKS_KEPT = 256

_M1 = np.uint32(0x7FEB352D)
_M2 = np.uint32(0x846CA68B)
_SHIFT = np.uint32(16)
_HIGH_WORD = 1 if sys.byteorder == "little" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Permutation:
    """A bijection of range(size), picked by a key.

    >>> shuffle = Permutation(size=10, key=1)
    >>> shuffle.forward(np.arange(10)).tolist()
    [3, 6, 0, 9, 5, 2, 4, 7, 1, 8]
    >>> shuffle.inverse(shuffle.forward(np.arange(10))).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]

    With `members` it is a family of permutations, numbered, and each value goes through the member
    beside it. That is for short permutations, where one call for each costs more than the work.

    >>> Permutation(size=4, key=1).forward([0, 1, 2, 3] * 2, members=[0] * 4 + [1] * 4).tolist()
    [0, 1, 3, 2, 3, 1, 0, 2]
    """

    size: int
    """How many values are permuted; at most 2**63."""
    key: int
    """Which permutation, or which family; any 64-bit number."""

    def __post_init__(self) -> None:
        if not 1 <= self.size <= SIZE_MAX:
            raise OptionError(f"a permutation has between 1 and 2**63 values, got {self.size}")
        if not 0 <= self.key < NUM_KEYS:
            raise OptionError(f"a key lies between 0 and 2**64 - 1, got {self.key}")

    def forward(self, values: npt.ArrayLike, members: npt.ArrayLike | None = None) -> Words:
        """Return where each value goes."""
        return _network(self.size, self.key).map(values, members, inverse=False)

    def inverse(self, values: npt.ArrayLike, members: npt.ArrayLike | None = None) -> Words:
        """Return where each value came from."""
        return _network(self.size, self.key).map(values, members, inverse=True)


def _num_rounds(size: int) -> int:
    """Return how many rounds hide the network from the tests in tests/order/test_uniformity.py.

    A round of a tiny network has only a handful of outcomes, so tiny sizes need more of them: five
    values need 24 until all 120 lists are equally likely, and 100 values need 8 until all pairs
    are. Large sizes pass with 6, and get 8.
    """
    if size <= 2**6:
        return 24
    return 12 if size <= 2**10 else 8


class _Network:
    """The rounds over a domain that is barely larger than the range. Scratch lives for one call."""

    def __init__(self, size: int, key: int) -> None:
        left_bits = ((size - 1).bit_length() + 1) // 2
        right_size = ((size - 1) >> left_bits) + 1
        # At most 2**31, so that a sum of two right halves, and its wrapped difference, fit 32 bits.
        assert right_size <= 2**31, right_size
        self.size = size
        self.key = key
        self.left_bits = np.uint64(left_bits)
        self.left_mask = np.uint64((1 << left_bits) - 1)
        self.hash_shift = np.uint32(32 - left_bits)
        self.right_size = np.uint32(right_size)
        self.right_size_wide = np.uint64(right_size)
        words = stream_of(key, _num_rounds(size))
        self.keys = np.stack([words, words >> np.uint64(32)], axis=1).astype(np.uint32)

    def map(self, values: npt.ArrayLike, members: npt.ArrayLike | None, *, inverse: bool) -> Words:
        """Return the image of each value in the range."""
        words = self._words(values)
        numbers = None if members is None else np.asarray(members).astype(np.uint64, copy=False)
        out, outside = self._map_domain(words, numbers, inverse)
        # Fewer values are outside each time, so the repeated rounds cost next to nothing.
        while len(outside):
            near = None if numbers is None else numbers[outside]
            out[outside], still = self._map_domain(out[outside], near, inverse)
            outside = outside[still]
        return out

    def _map_domain(
        self, words: Words, members: Words | None, inverse: bool
    ) -> tuple[Words, npt.NDArray[np.intp]]:
        """Return the image of each word in the domain, and which of them fell outside the range."""
        out = np.empty(len(words), dtype=np.uint64)
        outside = [np.empty(0, dtype=np.intp)]
        for start in range(0, len(words), _CHUNK):
            part = slice(start, start + _CHUNK)
            tweaks = None if members is None else _tweaks(self.key, members[part])
            self._rounds(words[part], tweaks, out[part], inverse)
            outside.append(np.flatnonzero(out[part] >= np.uint64(self.size)) + start)
        return out, np.concatenate(outside)

    def _words(self, values: npt.ArrayLike) -> Words:
        # A negative value wraps to one beyond 2**63, so one comparison finds both mistakes.
        words = np.asarray(values).astype(np.uint64, copy=False)
        if words.size and int(words.max()) >= self.size:
            raise OptionError(f"a permutation of {self.size} values has no {int(words.max())}")
        return words

    def _rounds(self, words: Words, tweaks: Halves | None, out: Words, inverse: bool) -> None:
        wide = np.empty(len(words), dtype=np.uint64)
        left, right, mixed, spare = np.empty((4, len(words)), dtype=np.uint32)
        np.bitwise_and(words, self.left_mask, out=wide)
        left[...] = wide
        np.right_shift(words, self.left_bits, out=wide)
        right[...] = wide
        rounds = range(len(self.keys))
        for i in reversed(rounds) if inverse else rounds:
            _hash(left if i % 2 else right, self.keys[i], tweaks, mixed, spare)
            if i % 2:
                # Multiply-high spreads 32 bits over the right half without a division.
                np.multiply(mixed, self.right_size_wide, out=wide, dtype=np.uint64)
                self._stir_right(right, wide.view(np.uint32)[_HIGH_WORD::2], spare, inverse)
            else:
                np.right_shift(mixed, self.hash_shift, out=mixed)
                np.bitwise_xor(left, mixed, out=left)
        out[...] = right
        np.left_shift(out, self.left_bits, out=out)
        wide[...] = left
        np.bitwise_or(out, wide, out=out)

    def _stir_right(self, right: Halves, shift: Halves, spare: Halves, inverse: bool) -> None:
        # Of a sum and the sum reduced once, the wrapped one is the larger: take the other.
        if inverse:
            np.subtract(right, shift, out=right)
            np.add(right, self.right_size, out=spare)
        else:
            np.add(right, shift, out=right)
            np.subtract(right, self.right_size, out=spare)
        np.minimum(right, spare, out=right)


# Networks never change, so threads share them; two that race make the same network twice.
_network = lru_cache(maxsize=_NETWORKS_KEPT)(_Network)


def _tweaks(key: int, members: Words) -> Halves:
    """Return two 32-bit words for each member, which it adds to the keys of all rounds."""
    words = member_keys(key, members)
    return np.stack([words, words >> np.uint64(32)]).astype(np.uint32)


def _hash(half: Halves, keys: Halves, tweaks: Halves | None, mixed: Halves, spare: Halves) -> None:
    """Write 32 keyed bits for each value of a half; the high ones are the good ones."""
    np.bitwise_xor(half, keys[0], out=mixed)
    if tweaks is not None:
        np.bitwise_xor(mixed, tweaks[0], out=mixed)
    np.multiply(mixed, _M1, out=mixed)
    np.right_shift(mixed, _SHIFT, out=spare)
    np.bitwise_xor(mixed, spare, out=mixed)
    np.add(mixed, keys[1], out=mixed)
    if tweaks is not None:
        np.add(mixed, tweaks[1], out=mixed)
    np.multiply(mixed, _M2, out=mixed)
