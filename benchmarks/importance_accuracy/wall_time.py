"""Wall time of recorded steps under a modelled store.

A queue of `look_ahead` steps lies between reading and training. Reading takes one step after the
other: step t is read when step t-1 is read and the queue has a free place. Training takes step t
when it is read and step t-1 is trained:

    read(t)    = max(read(t-1), begun(t - look_ahead)) + misses(t) * miss_s + hits(t) * hit_s
    begun(t)   = max(trained(t-1), read(t))
    trained(t) = begun(t) + compute_s * compute_share(t)

`slowness` says what a store is: how much longer than its compute a step of uniform epochs with a
cache that never evicts is read, once the cache is full.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """What a step costs, and how far reading runs ahead of training."""

    compute_s: float = 0.02
    """A gradient step on a whole batch."""
    hit_share: float = 0.02
    """The cost of a cache hit, in misses."""
    look_ahead: int = 4
    """Steps that are read ahead of the one in training."""
    cache_share: float = 0.2
    """Samples of the data set that the cache holds."""

    def miss_s(self, slowness: float, batch_size: int) -> float:
        """Seconds to read one sample from the store."""
        uniform = 1 - self.cache_share + self.cache_share * self.hit_share
        return slowness * self.compute_s / (batch_size * uniform)


def wall_s(
    misses: NDArray[np.int64],
    compute_shares: NDArray[np.float64],
    clock: Clock,
    *,
    batch_size: int,
    slowness: float,
) -> NDArray[np.float64]:
    """Return the second at which each step is trained.

    >>> clock = Clock(compute_s=1.0, hit_share=0.0, cache_share=0.0, look_ahead=1)
    >>> wall_s(np.array([4, 4, 0, 0]), np.ones(4), clock, batch_size=4, slowness=3.0)
    array([4., 7., 8., 9.])
    """
    miss_s = clock.miss_s(slowness, batch_size)
    io_s = miss_s * (misses + (batch_size - misses) * clock.hit_share)
    compute_s = clock.compute_s * compute_shares
    begun, trained = np.zeros(len(misses)), np.zeros(len(misses))
    read = done = 0.0
    for step, (reads, computes) in enumerate(zip(io_s, compute_s, strict=True)):
        free = begun[step - clock.look_ahead] if step >= clock.look_ahead else 0.0
        read = max(read, free) + reads
        begun[step] = max(done, read)
        trained[step] = done = begun[step] + computes
    return trained
