"""Reads: what a policy decides about one epoch. The step engine turns them into seconds.

For every use of a sample a policy says where its bytes come from, and whether they may be read
ahead of their step or only when the training loop asks. That is all there is to a policy: devices,
look-ahead and the barrier after every step are the same for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.dataset.part import Ints
from penstock.simulate.job import Codes, Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A place that holds samples from some time on. The first option that is there is taken."""

    sources: Codes
    """By access."""
    holders: Ints
    """The node that holds it, by access."""
    from_s: Floats
    """When the bytes are there, by access; infinite where they never are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """The uses of samples in one epoch, and where each finds its bytes."""

    ids: Ints
    steps: Ints
    workers: Ints
    sources: Codes
    """Where the bytes come from, or would if no option were there yet."""
    holders: Ints | None = None
    """The node that serves each access from its tier; None where no peer does."""
    ahead: npt.NDArray[np.bool_] | bool = True
    """Whether bytes may be fetched before their step; else the training loop waits for them."""
    fillers: Ints | None = None
    """The node that reads each access from the store into its tier first; -1 where none does."""
    options: tuple[Option, ...] = ()
    """Faster places than `sources`, best first, that exist from some time on."""
    threads: int | None = None
    """Reads in flight per rank; None for the scenario's."""
    stage_bytes: float | None = None
    """Room for what is fetched ahead, per node; None for the scenario's."""
    background: bool = False
    """Read by the threads that fill a tier, on all nodes at once."""
    free: bool = False
    """Reading costs nothing and moves nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What has to happen before the first step."""

    store_bytes: Floats
    """Read from the store, by node."""
    peer_bytes: Floats
    """Read from other nodes, by node, after that."""
    tier: int
    """The tier that is filled."""
