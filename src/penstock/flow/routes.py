"""Which route the bytes of a sample take: a tier here, other nodes, a run read whole, or alone."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from penstock.dataset.part import Ints

Flags = npt.NDArray[np.bool_]


class Route(IntEnum):
    """How samples get their bytes."""

    TIER = 0
    """From a tier of this node that holds them, or is to hold them."""
    RUN = 1
    """From a run of samples that is read whole for several batches."""
    ALONE = 2
    """Each for itself, near ones together."""
    PEER = 3
    """From other nodes, which hold them or are to hold them."""


def store_route(*, in_runs: bool) -> Route:
    """Return the route of samples that come from the store."""
    return Route.RUN if in_runs else Route.ALONE


def routes_of(
    placed: Flags,
    *,
    in_runs: bool = False,
    is_run_bare: Callable[[], Flags] | None = None,
    can_come_from_peers: Callable[[], Flags] | None = None,
) -> Ints:
    """Return the route of each sample.

    `placed` are those whose units all have their place in a tier here: nothing is nearer. Of the
    others, those whose units other nodes have (`can_come_from_peers`, asked only in a cluster) come
    from there. The rest is read from the store: in whole runs where the order goes by runs, but for
    runs of which a tier holds something (`is_run_bare` says which have nothing there), since that
    part would be read twice.

    >>> by_peers = np.array([True, True, False])
    >>> routes_of(np.array([True, False, False]), can_come_from_peers=lambda: by_peers)
    array([0, 3, 2])
    """
    routes = np.full(len(placed), store_route(in_runs=in_runs), np.int64)
    if in_runs and is_run_bare is not None and placed.any():
        routes[~is_run_bare()] = Route.ALONE
    routes[placed] = Route.TIER
    if can_come_from_peers is not None and not placed.all():
        routes[~placed & can_come_from_peers()] = Route.PEER
    return routes
