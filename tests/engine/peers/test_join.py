"""Nodes that come together, whatever earlier runs left behind."""

from __future__ import annotations

import random
import subprocess
import sys
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from penstock.engine.peers.base import Address
from penstock.engine.peers.join import Joined, join
from penstock.engine.peers.members import Member
from penstock.engine.peers.rendezvous import StoreRendezvous
from penstock.errors import OptionError, RendezvousError
from penstock.world import World

DIGEST = {"data set": "a1", "penstock": "1.0"}


def worlds(*sizes: int) -> list[World]:
    """Return the worlds of all ranks, on nodes with these numbers of them."""
    total = sum(sizes)
    return [
        World(sum(sizes[:node]) + local, total, len(sizes), node, local, size)
        for node, size in enumerate(sizes)
        for local in range(size)
    ]


def member(world: World, name: str = "") -> Member | None:
    if not world.is_first_of_node:
        return None
    return Member(
        name=name or uuid.uuid4().hex,
        node=world.node,
        addresses=(Address(host="::1", port=7000 + world.node),),
        capacity_bytes=100 + world.node,
        incarnation=1,
        host=f"host-{world.node}",
    )


def joined(
    place: StoreRendezvous,
    world: World,
    *,
    key: str = "0",
    name: str = "",
    digest: bytes | dict[str, str] = b"same",
    timeout_s: float = 60,
) -> Joined:
    mine = member(world, name)
    return join(place, world, key=key, mine=mine, digest=digest, timeout_s=timeout_s, run="run")


def all_joined(place: StoreRendezvous, of: Sequence[World]) -> list[Joined]:
    with ThreadPoolExecutor(len(of)) as pool:
        return list(pool.map(lambda world: joined(place, world), of))


@pytest.fixture
def place() -> StoreRendezvous:
    """A place of this process."""
    return StoreRendezvous(f"memory://{uuid.uuid4().hex}/")


def test_all_ranks_learn_the_same_nodes_and_the_same_secret(place: StoreRendezvous) -> None:
    found = all_joined(place, worlds(2, 1, 3))
    assert len({(each.run_id, each.secret, each.members) for each in found}) == 1
    assert [len(found[0].run_id), len(found[0].secret)] == [16, 32]
    assert [each.host for each in found[0].members] == ["host-0", "host-1", "host-2"]
    assert [each.capacity_bytes for each in found[0].members] == [100, 101, 102]
    assert [each.mine.node for each in found] == [0, 0, 1, 2, 2, 2]
    assert found[4].node_of_rank == (0, 0, 1, 2, 2, 2)


def test_nodes_are_counted_where_the_launcher_could_not(place: StoreRendezvous) -> None:
    # What Open MPI tells the ranks of nodes that have one and two of them.
    of = [World(0, 3, 3, 0, 0, 1), World(1, 3, 2, 1, 0, 2), World(2, 3, 2, 1, 1, 2)]
    found = all_joined(place, of)
    assert [(each.world.num_nodes, each.world.node) for each in found] == [(2, 0), (2, 1), (2, 1)]


def test_a_node_of_which_only_the_first_rank_came_is_enough(place: StoreRendezvous) -> None:
    firsts = [world for world in worlds(4, 4) if world.is_first_of_node]
    found = all_joined(place, firsts)
    late = joined(place, worlds(4, 4)[7])
    assert (late.secret, late.members) == (found[0].secret, found[0].members)


def test_meetings_of_one_process_do_not_mix(place: StoreRendezvous) -> None:
    def both(world: World) -> list[Joined]:
        return [joined(place, world, key=key) for key in ("loader-0/0", "loader-0/1")]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(both, worlds(1, 1))
    assert [each.secret for each in first] == [each.secret for each in second]
    assert first[0].secret != first[1].secret


@pytest.mark.parametrize("seed", range(4))
def test_what_earlier_runs_left_is_not_taken_for_a_node(place: StoreRendezvous, seed: int) -> None:
    draw = random.Random(seed)
    secrets = set()
    for _ in range(6):
        of = worlds(*draw.choice([(1, 1, 2), (2, 2), (1, 3), (3, 1), (1, 1, 1, 1)]))
        firsts = [world for world in of if world.is_first_of_node]
        hosts = [f"host-{world.node}" for world in firsts]
        draw.shuffle(firsts)
        with ThreadPoolExecutor(len(firsts)) as pool:
            # The last ones come when others have met what was left behind.
            early = [pool.submit(joined, place, world) for world in firsts[:-1]]
            found = [joined(place, firsts[-1]), *(each.result() for each in early)]
        assert len({each.secret for each in found}) == 1
        assert [each.host for each in found[0].members] == hosts
        assert len({m.name for each in found for m in each.members}) == len(found)
        secrets.add(found[0].secret)
    assert len(secrets) == 6


_EARLIER_RUN = """
import sys
from penstock.engine.peers.join import join
from penstock.engine.peers.members import Member
from penstock.engine.peers.rendezvous import StoreRendezvous
from penstock.world import World
mine = Member(name="old", node=0, addresses=(), capacity_bytes=0, incarnation=0, host="old")
place = StoreRendezvous(sys.argv[1])
found = join(place, World(0, 2), key="0", mine=mine, digest=b"same", run="run")
print(found.secret.hex())
"""


def test_a_late_rank_does_not_take_the_secret_of_a_run_that_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _EARLIER_RUN, str(tmp_path)]
    old = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    place = StoreRendezvous(tmp_path)
    with pytest.raises(RendezvousError):  # The first rank of its own run is not there.
        joined(place, World(1, 2), timeout_s=0.2)
    with ThreadPoolExecutor(1) as pool:
        late: Future[Joined] = pool.submit(joined, place, World(1, 2))
        first = joined(place, World(0, 2))
        assert late.result().secret == first.secret
    assert first.secret.hex() != old.strip()


# -- refusals ---------------------------------------------------------------------------------


def test_who_did_not_come_is_named(place: StoreRendezvous) -> None:
    of = worlds(2, 1, 2)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(joined, place, of[rank], timeout_s=0.3) for rank in (0, 3)]
    for each in waiting:
        text = str(each.exception())
        assert isinstance(each.exception(), RendezvousError)
        assert "within 300 ms at run/0: rank 2 did not come" in text
        assert "host-0 (ranks 0-1)" in text


def test_nodes_that_load_different_things_are_told_what_differs(place: StoreRendezvous) -> None:
    digests = [DIGEST, {**DIGEST, "data set": "b2"}]
    with ThreadPoolExecutor(2) as pool:
        tries = [
            pool.submit(partial(joined, place, world, digest=digest))
            for world, digest in zip(worlds(1, 1), digests, strict=True)
        ]
    for each in tries:
        with pytest.raises(OptionError, match=r"set is a1 on node 0 \(host-0\) and b2 on node 1"):
            each.result()


def test_a_rank_that_loads_something_else_than_its_node_is_refused(place: StoreRendezvous) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = worlds(2)
        fine = pool.submit(joined, place, first)
        with pytest.raises(OptionError, match="digest is"):
            joined(place, second, digest=b"other")
        assert len(fine.result().members) == 1


def test_two_nodes_with_one_folder_are_refused(place: StoreRendezvous) -> None:
    with ThreadPoolExecutor(2) as pool:
        tries = [pool.submit(joined, place, world, name="same") for world in worlds(1, 1)]
    for each in tries:
        with pytest.raises(OptionError, match=r"0 \(host-0\) and 1 \(host-1\) use one folder as a"):
            each.result()


def test_ranks_that_are_dealt_out_over_the_nodes_in_turn_are_refused(
    place: StoreRendezvous,
) -> None:
    with pytest.raises(OptionError, match="--distribution=block"):
        joined(place, World(1, 4, 2, 1, 0, 2))
