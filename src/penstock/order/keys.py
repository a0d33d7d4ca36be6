"""Keys: 64-bit numbers that stand for a seed, a purpose and an epoch.

Everything random in this room comes from a key, and every key comes from `key_of` or is mixed from
another one by `mix64`. Both are fixed for ever: a saved cursor is only worth something as long as
the same seed gives the same order, on any platform and in any later version.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.arguments import count_of
from penstock.errors import OptionError

Words: TypeAlias = npt.NDArray[np.uint64]
"""64-bit words; arithmetic on them wraps around, as mixing needs it."""
Ids: TypeAlias = npt.NDArray[np.int64]
"""Sample ids, or positions of an order."""

NUM_KEYS = 2**64
GOLDEN = 0x9E3779B97F4A7C15
"""What splitmix64 adds at each step: 2**64 over the golden ratio, odd."""


def key_of(seed: int, *parts: int | str) -> int:
    """Return the key for a seed and for what it is used for.

    Parts are tagged and strings carry their length, so no two lists of parts share their bytes.

    >>> key_of(7, "global", 0) == key_of(7, "global", 1)
    False
    """
    data = [struct.pack("<Q", seed_of(seed))]
    for part in parts:
        if isinstance(part, str):
            text = part.encode()
            data.append(struct.pack("<cI", b"s", len(text)) + text)
        else:
            data.append(struct.pack("<cq", b"i", part))
    return xxhash.xxh3_64_intdigest(b"".join(data))


def seed_of(seed: int) -> int:
    """Return a seed, or raise unless it fits the eight bytes that keys are made from."""
    if seed is None:
        raise OptionError(
            "seed=None: without a seed no run could be resumed and no rank would know what others "
            "read; give a number, and another one for another order"
        )
    return count_of("seed", seed, least=0, most=NUM_KEYS - 1)


def check_epoch(epoch: int) -> None:
    """Raise unless the epoch is one that a run can be in."""
    count_of("epoch", epoch, least=0, hint="epochs count from 0")


def mix64(words: Words) -> Words:
    """Return each word spread over all 64 bits, one to one (the finaliser of splitmix64)."""
    mixed = words ^ (words >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def stream_of(key: int, num_words: int) -> Words:
    """Return the first words that splitmix64 gives when it starts at `key`."""
    places = np.arange(1, num_words + 1, dtype=np.uint64)
    return mix64(places * np.uint64(GOLDEN) + np.uint64(key))


def member_keys(key: int, members: Words) -> Words:
    """Return one key for each member of a family."""
    # The member is mixed before it meets the key, so no two families run in step.
    return mix64(mix64((members + np.uint64(1)) * np.uint64(GOLDEN)) + np.uint64(key))
