"""Joining a run: all nodes meet and agree on the list of members, the run's id and its secret.

Every rank that reads from peers calls `join`. The first rank of each node contributes the record of
its node; the other ranks only read the result. All ranks get the same list, or all raise an error:
if nodes loaded different data sets, they would compute different homes for the same unit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.engine.peers.meeting import Hello, Meeting, new_hello
from penstock.engine.peers.members import Member, member_of, record_of
from penstock.engine.peers.rendezvous import Rendezvous, StoreRendezvous
from penstock.engine.peers.runs import is_once, run_name
from penstock.errors import OptionError, PenstockError
from penstock.world import World

JOIN_TIMEOUT_S = 300.0
"""Nodes of one job start within minutes of each other, or something is wrong."""

_log = logging.getLogger("penstock.engine.peers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """What all nodes of a run have agreed on."""

    members: tuple[Member, ...]
    """By node."""
    run_id: bytes
    """16 bytes, unique to this run."""
    secret: bytes = field(repr=False)
    """32 bytes with which members authenticate each other."""
    world: World
    """The caller's world, with the nodes that have met."""
    first_ranks: tuple[int, ...]
    """By node; ranks are numbered node by node."""
    left_overs: tuple[str, ...] = ()
    """Prefixes of the keys to remove after the run; only the first rank of each node has them."""

    @property
    def mine(self) -> Member:
        """The member that the caller's node is."""
        return self.members[self.world.node]

    @property
    def node_of_rank(self) -> tuple[int, ...]:
        """The node of each rank."""
        ends = (*self.first_ranks[1:], self.world.num_ranks)
        return tuple(
            node
            for node, (first, end) in enumerate(zip(self.first_ranks, ends, strict=True))
            for _ in range(first, end)
        )


def join(
    rendezvous: Rendezvous,
    world: World,
    *,
    key: str,
    mine: Member | None,
    digest: bytes | Mapping[str, str],
    timeout_s: float = JOIN_TIMEOUT_S,
    run: str | None = None,
) -> Joined:
    """Meet the other nodes and return what all have agreed on.

    `key` tells the meetings of one process apart: it must differ for each loader, which joins once,
    and be the same on all ranks. `mine` is None on ranks that are not the first of their node.
    `digest` must be the same everywhere; if it is a mapping, the error names the entry that
    differs. `run` names the job if its launcher does not.
    """
    assert (mine is not None) == world.is_first_of_node, (mine, world)
    _refuse_scattered(world)
    name = run_name() if run is None else run
    parts = {"digest": digest.hex()} if isinstance(digest, bytes) else dict(digest)
    meeting = Meeting(
        rendezvous,
        "/".join(part for part in (name, world.name, key) if part),
        num_ranks=world.num_ranks,
        timeout_s=timeout_s,
        is_once=is_once(name),
    )
    if mine is None:
        roster = meeting.find(world.rank - world.local_rank)
    else:
        hello = new_hello(
            rank=world.rank,
            num_local_ranks=world.num_local_ranks,
            num_ranks=world.num_ranks,
            record=record_of(mine),
            digest=parts,
        )
        roster = meeting.lead(hello) if world.rank == 0 else meeting.follow(hello)
    there = _joined(roster.hellos, world, parts, (roster.run_id, roster.secret))
    return replace(there, left_overs=meeting.left_overs(roster))


def wait_for_all(rendezvous: Rendezvous, joined: Joined) -> None:
    """Wait until every node serves: before it knows the run's secret, a server refuses members."""
    prefix, world = _ready_key(joined), joined.world
    if world.is_first_of_node:
        rendezvous.put(f"{prefix}/{world.node}", b"")
    if world.rank == 0:
        for node in range(len(joined.members)):
            rendezvous.get(f"{prefix}/{node}", JOIN_TIMEOUT_S)
        rendezvous.put(f"{prefix}/all", b"")
    rendezvous.get(f"{prefix}/all", JOIN_TIMEOUT_S)
    if not world.is_first_of_node:
        rendezvous.put(f"{prefix}/came/{world.node}/{world.rank}", b"")


def leave(rendezvous: Rendezvous, joined: Joined) -> None:
    """Remove the keys of a run from the rendezvous; for the first rank of a node.

    The last node to leave does it. If a node was killed or a rank of this node has not come yet,
    the keys stay. Torch's store ends with its job and needs no cleaning.
    """
    if not isinstance(rendezvous, StoreRendezvous):
        return
    prefix, world = _ready_key(joined), joined.world
    try:
        if rendezvous.count(f"{prefix}/came/{world.node}/") < world.num_local_ranks - 1:
            return
        rendezvous.put(f"{prefix}/left/{world.node}", b"")
        if rendezvous.count(f"{prefix}/left/") == len(joined.members):
            # The first of these is the roster, which holds the secret: it goes even if others fail.
            for key in (*joined.left_overs, prefix):
                rendezvous.remove(key)
    except (PenstockError, OSError) as error:
        _log.info("the keys of this run stay in %s: %s", rendezvous, error)


def _ready_key(joined: Joined) -> str:
    return f"ready/{joined.run_id.hex()}"


def _joined(
    hellos: list[Hello], world: World, parts: dict[str, str], keys: tuple[bytes, bytes]
) -> Joined:
    members = tuple(
        replace(member_of(hello.record), node=node) for node, hello in enumerate(hellos)
    )
    _refuse_one_folder(members)
    _refuse_differences(members, [hello.digest for hello in hellos])
    first_ranks = tuple(hello.rank for hello in hellos)
    node = max(node for node, first in enumerate(first_ranks) if first <= world.rank)
    _refuse_differences((members[node], members[node]), [hellos[node].digest, parts])
    return Joined(
        members=members,
        run_id=keys[0],
        secret=keys[1],
        world=replace(world, num_nodes=len(members), node=node),
        first_ranks=first_ranks,
    )


def _refuse_scattered(world: World) -> None:
    first = world.rank - world.local_rank
    end = first + world.num_local_ranks
    is_wrong_first = (world.node == 0) != (first == 0)
    is_wrong_last = world.node == world.num_nodes - 1 and end != world.num_ranks
    if is_wrong_first or is_wrong_last:
        raise OptionError(
            f"rank {world.rank} is number {world.local_rank} of {world.num_local_ranks} on node "
            f"{world.node} of {world.num_nodes}: peers need ranks that are numbered node by node; "
            "start with srun --distribution=block or mpirun --map-by slot, and keep that order in "
            "groups and meshes"
        )


def _refuse_one_folder(members: tuple[Member, ...]) -> None:
    seen: dict[str, Member] = {}
    for member in members:
        other = seen.setdefault(member.name, member)
        if other is not member:
            raise OptionError(
                f"nodes {other.node} ({other.host}) and {member.node} ({member.host}) use one "
                "folder as a tier; a tier lies on a disk of its own node: give each its own folder"
            )


def _refuse_differences(members: tuple[Member, ...], digests: list[dict[str, str]]) -> None:
    for member, digest in zip(members, digests, strict=True):
        for what in sorted({*digests[0], *digest}):
            first, other = digests[0].get(what, "nothing"), digest.get(what, "nothing")
            if first != other:
                raise OptionError(
                    f"the nodes of a job must load the same, but {what} is {first} on "
                    f"{members[0]} and {other} on {member}; give all ranks the same data set and "
                    "options and the same version of penstock, and where a rank has several "
                    "loaders, let all ranks begin them in the same order"
                )
