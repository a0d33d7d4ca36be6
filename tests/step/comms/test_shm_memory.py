"""Shared arenas: what ranks see of each other, what is left when they die, and what is refused."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.step.comms.shm_ranks import meeting_at, shared
from tests.step.ranks import run_ranks
from torch import distributed

from penstock.errors import OptionError, PeerError, RendezvousError
from penstock.memory import memory_left_bytes
from penstock.step.comms.shm import ShmComm
from penstock.step.comms.shm_flags import Flags
from penstock.step.comms.shm_memory import HostArena, meeting


def alone(said: bytes) -> list[bytes]:
    return [said]


def places(rank: int, size: int) -> list[float]:
    with HostArena(meeting(), rank=rank, size=size, size_bytes=40_000) as arena:
        first, second = arena.take(3), arena.take(5, torch.float64)
        assert first.data_ptr() % 128 == second.data_ptr() % 128 == 0
        assert not first.any()
        assert not second.any()
        second.fill_(rank + 1)
        distributed.barrier()
        seen = [float(arena.of(second, rank=other).sum()) for other in range(size)]
        # A view into a place is found too: what counts is where it begins.
        assert arena.of(second[2:], rank=0).tolist() == [1.0] * 3
        assert arena.offset_of(torch.ones(1)) is None
        with pytest.raises(OptionError, match="not in the arena of rank"):
            arena.of(torch.ones(1), rank=0)
        with pytest.raises(OptionError, match=r"need 4 GB, the arena has .* left of 41 kB"):
            arena.take(10**9)
        distributed.barrier()
        return seen


def test_a_tensor_is_seen_by_all_ranks_at_the_same_place() -> None:
    assert run_ranks(places, 3) == [[5.0, 10.0, 15.0]] * 3


def test_ranks_can_meet_at_a_store() -> None:
    store = distributed.HashStore()
    arenas = [
        HostArena(meeting_at(store, rank=rank, size=2), rank=rank, size=2, size_bytes=4096)
        for rank in range(2)
    ]
    threads = [threading.Thread(target=arena.open) for arena in arenas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tensors = [arena.take(1) for arena in arenas]
    tensors[1].fill_(7)
    assert arenas[0].of(tensors[0], rank=1).item() == 7
    for arena in arenas:
        arena.close()


def test_nothing_has_a_name_in_any_folder() -> None:
    arena = HostArena(alone, rank=0, size=1, size_bytes="1MB", run_id="named")
    with arena, ShmComm(arena, stage_bytes=1000):
        assert not list(Path("/dev/shm").glob("*named*"))
    maps = Path("/proc/self/maps").read_text()
    assert "penstock-named" not in maps, "the memory is let go"


def test_tensors_outlive_the_arena() -> None:
    with HostArena(alone, rank=0, size=1, size_bytes="1MB", run_id="kept") as arena:
        tensor = arena.take(10)
        tensor.fill_(3)
    assert tensor.sum() == 30
    assert "penstock-kept-0" in Path("/proc/self/maps").read_text()
    del tensor
    assert "penstock-kept-0" not in Path("/proc/self/maps").read_text()


# -- what is refused ---------------------------------------------------------------------------


def test_more_than_the_memory_that_is_left_is_refused_with_both_numbers() -> None:
    arena = HostArena(alone, rank=0, size=1, size_bytes=2 * memory_left_bytes())
    with pytest.raises(OptionError, match=r"GB in all, and this host has .* left; take a smaller"):
        arena.open()


def unequal(rank: int, size: int) -> str:
    arena = HostArena(meeting(), rank=rank, size=size, size_bytes=4096 * (rank + 1))
    with pytest.raises(RendezvousError) as caught:
        arena.open()
    return str(caught.value)


def test_ranks_that_take_unequal_arenas_all_hear_of_it() -> None:
    first, second = run_ranks(unequal, 2)
    assert first == second
    assert "4096 and 8192 bytes" in first


def elsewhere(rank: int, size: int) -> str:
    """Rank 1 says the number of a process that is not it: as if it were on another host."""

    def meet(said: bytes) -> list[bytes]:
        if rank == 1:
            said = said.replace(f'"pid": {os.getpid()}'.encode(), b'"pid": 1')
        return list(meeting()(said))

    with pytest.raises(RendezvousError) as caught:
        HostArena(meet, rank=rank, size=size, size_bytes=4096).open()
    return str(caught.value)


def test_ranks_of_two_hosts_are_told_to_use_sockets() -> None:
    first, second = run_ranks(elsewhere, 2)
    assert first == second
    assert "rank 0 cannot share memory with rank 1" in first
    assert "over sockets (gloo)" in first


# -- ranks that die ----------------------------------------------------------------------------


def dying(rank: int, size: int) -> tuple[str, str, float]:
    with shared(rank, size) as comm:
        comm.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin_s = time.monotonic()
        with pytest.raises(PeerError) as caught:
            comm.all_reduce(torch.ones(10)).wait()
        waited_s = time.monotonic() - begin_s
        with pytest.raises(PeerError):
            comm.barrier()
        return str(caught.value), caught.value.peer, waited_s


def test_a_rank_that_is_killed_is_noticed_and_named() -> None:
    for result in (r for r in run_ranks(dying, 3, dies={1}) if r is not None):
        text, peer, waited_s = result
        # Who is told first gives up, and tells those who wait for it.
        assert "rank 1 is gone" in text or "has given up" in text
        assert peer in ("rank 0", "rank 1", "rank 2")
        assert waited_s < 20
    assert not list(Path("/dev/shm").glob("penstock-shm*"))


def in_step(work: Callable[[Flags], None], *, timeout_s: float = 20.0) -> Flags:
    """Two ranks of one process: their flags, of which the second does some work in a thread."""
    store = distributed.HashStore()
    flags: list[Flags] = []

    def be(rank: int) -> None:
        meet = meeting_at(store, rank=rank, size=2)
        arena = HostArena(meet, rank=rank, size=2, size_bytes=4096)
        arena.open()
        mine = Flags(arena, 0, timeout_s=timeout_s)
        if rank == 0:
            flags.append(mine)
        else:
            work(mine)

    thread = threading.Thread(target=be, args=(1,))
    thread.start()
    be(0)
    thread.join()
    return flags[0]


def test_a_rank_that_closed_is_not_waited_for() -> None:
    flags = in_step(Flags.close)
    with pytest.raises(PeerError, match=r"rank 1 has closed .* at step 1, it came to 0"):
        flags.sync()


def test_a_rank_that_gave_up_is_not_waited_for() -> None:
    flags = in_step(Flags.fail)
    with pytest.raises(PeerError, match="rank 1 has given up"):
        flags.sync()


def test_what_arrived_before_the_end_counts() -> None:
    def arrive(flags: Flags) -> None:
        flags.arrive()
        flags.close()

    flags = in_step(arrive)
    flags.sync()
    with pytest.raises(PeerError, match="at step 2, it came to 1"):
        flags.sync()


def test_a_rank_that_lives_and_does_not_come_is_given_up_as_stuck() -> None:
    flags = in_step(lambda _: None, timeout_s=0.01)
    with pytest.raises(PeerError, match=r"after 0.01 s, .* either it is slow") as caught:
        flags.sync()
    assert (caught.value.kind, caught.value.peer) == ("stuck", "rank 1")


def ordered(rank: int, size: int) -> int:
    """Each writes a page of its count, arrives, and looks at what the other wrote."""
    with shared(rank, size) as comm:
        mine = comm.arena.take(1024, torch.int64)
        pages = comm.everyones(mine)
        wrong = 0
        for turn in range(2000):
            mine.fill_(turn)
            comm.flags.sync()
            wrong += sum(int((page != turn).any()) for page in pages)
            comm.flags.sync()
        return wrong


def test_data_written_before_an_arrival_are_seen_after_it() -> None:
    assert run_ranks(ordered, 2) == [0, 0]
