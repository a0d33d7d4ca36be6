"""Opens the tiers of this node, and meets the other nodes, with the first iteration of a loader.

Nodes meet once for each loader, in the store of the launcher. There they learn each other's
addresses and capacities, and a secret; from these each node computes the homes of all units by
itself. The first rank of a node serves the others, unless a node service does it.
"""

from __future__ import annotations

import importlib
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.dataset.dataset import Dataset
from penstock.dataset.mixture import Mixture
from penstock.dataset.part import Ints
from penstock.engine.local_tiers import LocalTiers
from penstock.engine.stats import Counters
from penstock.engine.stream import Assign
from penstock.errors import OptionError
from penstock.flow.layout.assignment import assign_local
from penstock.storage.tier_sizes import Disk, Memory
from penstock.world import World

if TYPE_CHECKING:
    from penstock.engine.cluster import Cluster
    from penstock.engine.peers.rendezvous import Rendezvous

VARIABLE = "PENSTOCK_RENDEZVOUS"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingOptions:
    """Where this process meets the other nodes, and with which settings."""

    where: bool | str
    """Whether they meet at all; a text names the place."""
    world: World
    count_meeting: Callable[[World], int]
    """Counts the meetings of this rank; called only when the nodes do meet."""
    rendezvous: Callable[[World], Rendezvous] | None = None
    """Returns the place where they meet, unless one is named."""
    num_samples: int
    """Samples of an epoch."""
    must_match: Mapping[str, str]
    """Settings that must be equal on all ranks, beside the data set."""
    moving_order: str = ""
    """Names the order, if its windows decide what tiers keep."""


class OpenedTiers:
    """Tiers that this process has open; they close with the last reference to this."""

    def __init__(
        self,
        local_tiers: LocalTiers,
        cluster: Cluster | None,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self.local_tiers = local_tiers
        self.cluster = cluster
        self.pid = os.getpid()
        self.close = weakref.finalize(self, _close_here, local_tiers, cluster, leave, self.pid)


def _close_here(
    local_tiers: LocalTiers, cluster: Cluster | None, leave: Callable[[], None], pid: int
) -> None:
    if os.getpid() != pid:
        return  # After a fork they belong to the parent.
    if cluster is not None:
        cluster.close()
    local_tiers.close()
    leave()


def open_here(
    dataset: Dataset | Mixture,
    wishes: tuple[Memory | Disk, ...],
    meeting: MeetingOptions,
    counters: Counters,
) -> OpenedTiers:
    """Open the tiers, and meet the other nodes if the user wants that and there are any."""
    if not meeting.where:
        return OpenedTiers(LocalTiers(dataset, wishes, moving=meeting.moving_order), None)
    refuse_workers()
    from penstock.engine.joining import NO_TIERS, TierGrant, join_cluster

    grant, world = TierGrant(wishes), meeting.world
    try:
        is_alone = world.num_nodes == 1
        if is_alone and grant.node is None and not wishes:
            raise OptionError(NO_TIERS)  # Among several nodes, some may have none.
        _refuse_unsaid_nodes(world)
        rendezvous = None if is_alone else _place_of(meeting)
        # Units of nodes that share their tiers never come and go: homes ignore the order.
        moving = meeting.moving_order if is_alone else ""
        local_tiers = LocalTiers(dataset, grant, placed=is_alone, moving=moving)
    except BaseException:
        grant.close()
        raise
    if rendezvous is None:
        grant.keep(local_tiers.name)
        return OpenedTiers(local_tiers, None, grant.close)
    try:
        cluster = join_cluster(meeting, rendezvous, local_tiers, grant, counters)
        return OpenedTiers(local_tiers, cluster, grant.close)
    except BaseException:
        local_tiers.close()
        grant.close()
        raise


def is_data_worker() -> bool:
    """Return whether this is a worker process of torch's DataLoader."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def refuse_workers() -> None:
    """Refuse worker processes of torch's DataLoader: all of them would be the same rank."""
    if is_data_worker():
        raise OptionError(
            "peers=True inside of a DataLoader's worker process: workers come and go, and nodes "
            "cannot count on them. Use penstock.Loader in the training process itself, or tiers "
            "without peers"
        )


def _refuse_unsaid_nodes(world: World) -> None:
    """Refuse a world that has one node only because the number of nodes was not given."""
    node = os.environ.get("NODE_RANK", "0")
    if world.num_nodes == 1 and world.num_ranks > 1 and node != "0":
        raise OptionError(
            f"this is node {node}, but nobody said how many there are: give world=penstock.World("
            "rank=…, num_ranks=…, num_nodes=…) (Lightning: trainer.global_rank, .world_size, "
            ".num_nodes), or start with torchrun"
        )


_meetings: dict[tuple[int, int, str], int] = {}


def number_of_meeting(world: World) -> int:
    """Return how often this rank has met the others, this time included.

    Ranks that run the same program meet in the same order, so the number is equal on all of them.
    """
    key = world.rank, world.num_ranks, world.name
    _meetings[key] = _meetings.get(key, 0) + 1
    return _meetings[key]


def _place_of(meeting: MeetingOptions) -> Rendezvous:
    is_named = isinstance(meeting.where, str) or bool(os.environ.get(VARIABLE))
    if meeting.rendezvous is None or is_named:
        return rendezvous_for(meeting.where, meeting.world)
    return meeting.rendezvous(meeting.world)


def rendezvous_for(where: bool | str, world: World) -> Rendezvous:
    """Return the store where nodes meet: the named one, else the launcher's."""
    named = where if isinstance(where, str) else os.environ.get(VARIABLE)
    if named:
        from penstock.engine.peers.rendezvous import StoreRendezvous

        return StoreRendezvous(named)
    if "torch" in sys.modules:
        found = importlib.import_module("penstock.loader.torch.rendezvous").rendezvous_here()
        if found is not None:
            here: Rendezvous = found
            return here
    raise OptionError(
        f"{world.num_ranks} ranks on {world.num_nodes} nodes have to meet somewhere, and there is "
        "neither a process group nor a launcher's store. Start with torchrun, call "
        "torch.distributed.init_process_group first, or name a folder or bucket that all can "
        f'write to: peers="/shared/meet", or {VARIABLE}=s3://bucket/meet'
    )


def by_home(local_tiers: LocalTiers, cluster: Cluster, dataset: Dataset | Mixture) -> Assign:
    """Return an assignment that gives samples to the nodes that hold them.

    It uses the homes that were agreed at the start. All ranks must compute the same result, and
    they learn at different times that a node is slow or lost.
    """
    homes, node_of_rank = cluster.homes, cluster.node_of_rank
    numbers = {id(bound): n for n, bound in reversed(list(enumerate(dataset.bound)))}

    def assign(ids: Ints, sizes: Ints) -> Ints:
        nodes = np.empty(len(ids), np.int64)
        for bound, where, local_ids in dataset.groups(ids):
            units, _ = local_tiers.units.locate(numbers[id(bound)], 0, local_ids)
            nodes[where] = homes.home_of(local_tiers.layout.offsets[units])
        return assign_local(nodes, node_of_rank, sizes)

    return assign
