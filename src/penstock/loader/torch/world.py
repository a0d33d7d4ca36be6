"""Worlds from existing process groups; no group for the job is started here.

A world is the ranks that share the *data*. Ranks that split one model between them (tensor,
pipeline or context parallel) work on the same samples, so they have to load as one rank. Pass the
group, or the dimension of the device mesh, along which the data is split, not all processes.
"""

from __future__ import annotations

from zlib import crc32

from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import OptionError
from penstock.world import World


def world_of(group: distributed.ProcessGroup | DeviceMesh | None = None) -> World:
    """Return the world of a process group, of a device mesh, or of the default group.

    A mesh counts with all its dimensions, so take those along which the data is split:
    `world_of(mesh["dp"])`, or `world_of(mesh["dp_replicate", "dp_shard"])` for hybrid sharding.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        raise OptionError(
            "world_of reads a process group, and none is there yet; call it after "
            "torch.distributed.init_process_group, or use penstock.World.from_env()"
        )
    members = _members(group)
    me = distributed.get_rank()
    if me not in members:
        raise OptionError(
            f"rank {me} is no member of this group (its members are {members}); "
            "call world_of with the group that this rank belongs to"
        )
    _members_of[_name(members)] = members
    return _world(members, members.index(me))


_members_of: dict[str, list[int]] = {}
"""Members of worlds that were made of groups, by the names of these worlds."""
_groups: dict[str, tuple[object, distributed.ProcessGroup]] = {}
"""Groups that were made here, by the names of their worlds; each with the job's group then."""


def group_of(world: World) -> distributed.ProcessGroup:
    """Return a group of the ranks of a world that only Penstock uses.

    All ranks of the world must make the first call together. It is never the job's own group: if a
    rank left out a collective there, the next one of the training loop would be taken for it.
    """
    job = distributed.group.WORLD
    made_in, group = _groups.get(world.name, (None, None))
    if group is None or made_in is not job:  # The job may have made its group anew.
        members = _members_of.get(world.name) if world.name else None
        if world.num_ranks != (distributed.get_world_size() if members is None else len(members)):
            raise OptionError(
                f"the world has {world.num_ranks} ranks and the job {distributed.get_world_size()},"
                " so losses cannot be brought together; give the loader the group along which the "
                'data is split: world=penstock.torch.world_of(mesh["dp"])'
            )
        is_part = members is not None
        group = distributed.new_group(members, use_local_synchronization=is_part)
        _groups[world.name] = job, group
    return group


def world_here() -> World:
    """Return the default group's world if there is one, else that of the environment."""
    if distributed.is_available() and distributed.is_initialized():
        return world_of()
    return World.from_env()


def _members(group: distributed.ProcessGroup | DeviceMesh | None) -> list[int]:
    """Return the ranks that share the data, in the order in which they do."""
    if isinstance(group, DeviceMesh):
        ranks: list[int] = group.mesh.flatten().tolist()
        return ranks
    members_of = distributed.group.WORLD if group is None else group
    # On ranks outside of a group, torch represents it by a number.
    if not isinstance(members_of, distributed.ProcessGroup):
        return []
    return list(distributed.get_process_group_ranks(members_of))


def _world(members: list[int], place: int) -> World:
    try:
        launched = World.from_env()
    except OptionError:
        launched = World()  # The group knows rank and size without a launcher.
    name = _name(members)
    # Only the launcher of this very job knows how many processes share a machine.
    is_same_job = launched.num_ranks == distributed.get_world_size()
    if not is_same_job or launched.rank != distributed.get_rank():
        return World(rank=place, num_ranks=len(members), name=name)
    if not name:
        return launched
    return _part_of(launched, members, place, name)


def _part_of(launched: World, members: list[int], place: int, name: str) -> World:
    """Return the world of some ranks of a job, with the nodes that these ranks are on."""
    first = launched.rank - launched.local_rank
    here = [rank for rank in members if first <= rank < first + launched.num_local_ranks]
    # Assumes equal numbers of ranks on all nodes: no rank knows where the others are.
    per_node = -(-launched.num_ranks // launched.num_nodes)
    nodes = sorted({rank // per_node for rank in members})
    return World(
        rank=place,
        num_ranks=len(members),
        num_nodes=len(nodes),
        node=nodes.index(members[place] // per_node),
        local_rank=here.index(members[place]),
        num_local_ranks=len(here),
        name=name,
    )


def _name(members: list[int]) -> str:
    """Return a name that other groups of ranks do not have; empty for all ranks of the job.

    Without a name, the worlds of ranks that split a model would look alike.
    """
    if members == list(range(distributed.get_world_size())):
        return ""
    return f"{members[0]}-{crc32(repr(members).encode()):08x}"
