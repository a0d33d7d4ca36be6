"""Collectives through shared memory have the values that their definitions say, on real ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.step.comms.shm_ranks import shared
from tests.step.ranks import RankError, run_ranks

from penstock.errors import OptionError
from penstock.step.comms.comm import payload_bytes
from penstock.step.comms.shm import ShmComm
from penstock.step.groups import Groups
from penstock.step.program.layouts import part
from penstock.step.program.mesh import mesh

LENGTHS = (0, 1, 5, 64, 1001)
STAGE_BYTES = 256
"""So small that every tensor of more than a few elements takes several chunks."""


def values(rank: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank has: anybody can compute it."""
    generator = torch.Generator().manual_seed(1000 * length + rank)
    return (torch.rand(length, generator=generator) * 100 - 50).to(dtype)


def reduced(op: str, size: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The reduction in the order of ranks, wide, rounded once."""
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    total = values(0, length, dtype).to(wide)
    for rank in range(1, size):
        other = values(rank, length, dtype).to(wide)
        if op in ("sum", "mean"):
            total = total + other
        else:
            total = (torch.maximum if op == "max" else torch.minimum)(total, other)
    return (total / size if op == "mean" and size > 1 else total).to(dtype)


def placed(comm: ShmComm, tensor: torch.Tensor, inside: bool) -> torch.Tensor:
    """The same tensor in the arena, or where it is."""
    if not inside:
        return tensor.clone()
    taken = comm.arena.take(tensor.numel(), tensor.dtype)
    taken.copy_(tensor)
    return taken


def every_collective(rank: int, size: int) -> int:
    with shared(rank, size, stage_bytes=STAGE_BYTES) as comm:
        for length, inside in itertools.product(LENGTHS, (False, True)):
            check_reductions(comm, length, inside)
            check_parts(comm, length, inside)
            check_moves(comm, length, inside)
        comm.barrier()
        return comm.flags.count


def check_reductions(comm: ShmComm, length: int, inside: bool) -> None:
    rank, size = comm.rank, comm.size
    for op in ("sum", "mean", "max", "min"):
        tensor = placed(comm, values(rank, length), inside)
        comm.all_reduce(tensor, op=op).wait()
        assert torch.equal(tensor, reduced(op, size, length)), (op, length)
    for dtype in (torch.bfloat16, torch.float64, torch.int64):
        tensor = placed(comm, values(rank, length, dtype), inside)
        comm.all_reduce(tensor).wait()
        assert torch.equal(tensor, reduced("sum", size, length, dtype)), (dtype, length)
    root = size - 1
    tensor = placed(comm, values(rank, length), inside)
    comm.reduce(tensor, root=root, op="mean").wait()
    expected = reduced("mean", size, length) if rank == root else values(rank, length)
    assert torch.equal(tensor, expected), length


def check_parts(comm: ShmComm, length: int, inside: bool) -> None:
    rank, size = comm.rank, comm.size
    start, stop = part(length, size, rank)
    total = reduced("sum", size, length)
    tensor = placed(comm, values(rank, length), inside)
    out = torch.empty(stop - start)
    comm.reduce_scatter(out, tensor).wait()
    assert torch.equal(out, total[start:stop]), length
    comm.reduce_scatter(tensor[start:stop], tensor).wait()
    assert torch.equal(tensor[start:stop], total[start:stop]), length
    whole = placed(comm, torch.zeros(length), inside)
    comm.all_gather(whole, out).wait()
    assert torch.equal(whole, total), length
    whole.zero_()[start:stop] = out
    comm.barrier()
    comm.all_gather(whole, whole[start:stop]).wait()
    assert torch.equal(whole, total), length


def check_moves(comm: ShmComm, length: int, inside: bool) -> None:
    rank, size = comm.rank, comm.size
    for root in {0, size - 1}:
        tensor = placed(comm, values(rank, length), inside)
        comm.broadcast(tensor, root=root).wait()
        assert torch.equal(tensor, values(root, length)), length
    for by, wrap in ((1, False), (-1, False), (1, True)):
        tensor = placed(comm, values(rank, length), inside)
        out = torch.zeros(length)
        comm.shift(out, tensor, by=by, wrap=wrap).wait()
        source = (rank - by) % size if wrap else rank - by
        is_end = not 0 <= source < size
        assert torch.equal(out, torch.zeros(length) if is_end else values(source, length))
    # Rank i gives i + j elements to rank j: pieces differ, and the first is empty.
    counts = [rank + peer for peer in range(size)]
    tensor = placed(comm, values(rank, sum(counts)), inside)
    out = torch.empty(sum(counts))
    comm.all_to_all(out, tensor, out_counts=counts, counts=counts).wait()
    expected = [
        values(peer, sum(peer + j for j in range(size))).split([peer + j for j in range(size)])
        for peer in range(size)
    ]
    assert torch.equal(out, torch.cat([pieces[rank] for pieces in expected]))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_collective_has_its_values_to_the_bit_in_the_arena_and_outside(size: int) -> None:
    counts = run_ranks(every_collective, size)
    assert len(set(counts)) == 1, "all ranks have arrived equally often"


def some_inside(rank: int, size: int) -> list[float]:
    with shared(rank, size, stage_bytes=STAGE_BYTES) as comm:
        taken = comm.arena.take(300)
        tensor = taken if rank == 0 else torch.empty(300)
        tensor.fill_(rank + 1)
        comm.all_reduce(tensor).wait()
        return tensor.unique().tolist()


def test_a_tensor_in_the_arena_on_one_rank_only_is_staged_by_all() -> None:
    assert run_ranks(some_inside, 3) == [[6.0]] * 3


def counted(rank: int, size: int) -> bool:
    with shared(rank, size) as comm:
        out = torch.empty(part(1001, size, rank)[1] - part(1001, size, rank)[0])
        expected = 0
        for wire, item_bytes in ((None, 4), ("bf16", 2)):
            tensor = values(rank, 1001)
            comm.all_reduce(tensor, wire=wire).wait()
            comm.reduce_scatter(out, tensor, wire=wire).wait()
            comm.all_gather(tensor, out, wire=wire).wait()
            for kind in ("all_reduce", "reduce_scatter", "all_gather"):
                expected += payload_bytes(kind, 1001, item_bytes, size=size, rank=rank)
        return comm.sent_bytes == expected


def test_what_is_sent_is_what_the_table_says() -> None:
    assert run_ranks(counted, 3) == [True] * 3


def rounded(rank: int, size: int) -> tuple[list[float], float]:
    with shared(rank, size) as comm:
        tensor = values(rank, 1001)
        comm.all_reduce(tensor, wire="bf16").wait()
        error = (tensor - reduced("sum", size, 1001)).abs().max()
        return tensor.tolist(), float(error)


def test_a_wire_of_bf16_is_near_and_the_same_on_all_ranks() -> None:
    results = run_ranks(rounded, 3)
    assert all(values == results[0][0] for values, _ in results)
    assert all(0 < error < 150 * 2**-7 for _, error in results)


def queued(rank: int, size: int) -> list[float]:
    """Many operations are under way at once; what follows each happens in their order."""
    with shared(rank, size) as comm:
        seen: list[int] = []
        tensors = [torch.full((100,), float(i + rank)) for i in range(50)]
        handles = [comm.all_reduce(tensor) for tensor in tensors]
        for i, handle in enumerate(handles):
            handle.then(lambda i=i: seen.append(i))
        handles[-1].wait()
        comm.barrier()
        assert all(handle.is_done() for handle in handles)
        assert sorted(seen) == list(range(50))
        return [float(tensor[0]) for tensor in tensors]


def test_operations_run_in_the_order_in_which_they_were_called() -> None:
    assert run_ranks(queued, 2) == [[2.0 * i + 1 for i in range(50)]] * 2


def crossed(rank: int, size: int) -> list[float]:
    """A mesh of two by two: each rank is in a communicator of its row and of its column."""
    with Groups(mesh(dp=2, tp=2), backend="shm", shared="1MB") as groups:
        rows, columns = groups.comm("tp"), groups.comm("dp")
        first, second = torch.full((9,), float(rank)), torch.full((9,), float(rank))
        handles = [rows.all_reduce(first), columns.all_reduce(second)]
        for handle in handles:
            handle.wait()
        return [float(first[0]), float(second[0])]


def test_axes_of_a_mesh_have_communicators_of_their_own() -> None:
    assert run_ranks(crossed, 4) == [[1.0, 2.0], [1.0, 4.0], [5.0, 2.0], [5.0, 4.0]]


def differing(rank: int, size: int) -> str:
    with shared(rank, size) as comm:
        handle = comm.all_reduce(torch.ones(10 + rank))
        with pytest.raises(OptionError) as caught:
            handle.wait()
        return str(caught.value)


def test_ranks_that_call_different_things_are_told_so_on_all_sides() -> None:
    first, second = run_ranks(differing, 2)
    assert first == second
    assert "rank 0 all_reduce sum of 10 " in first
    assert "rank 1 all_reduce sum of 11 " in first


def refused(rank: int, size: int) -> None:
    with shared(rank, size) as comm:
        with pytest.raises(OptionError, match="contiguous"):
            comm.all_reduce(torch.ones(4, 4).t())
        with pytest.raises(OptionError, match="rank 0 of 1 has 10 of 10 elements"):
            comm.all_gather(torch.ones(10), torch.ones(11))
        with pytest.raises(OptionError, match="root 3 of an axis with 1 ranks"):
            comm.broadcast(torch.ones(1), root=3)
        with pytest.raises(OptionError, match=r"a mean of torch\.int64"):
            comm.all_reduce(torch.ones(2, dtype=torch.int64), op="mean")
        with pytest.raises(OptionError, match="no wire format 'int8'"):
            comm.all_reduce(torch.ones(2), wire="int8")


def test_what_cannot_be_done_is_refused_before_anything_moves() -> None:
    run_ranks(refused, 1)


def fails(rank: int, size: int) -> None:
    with shared(rank, size) as comm:
        if rank == 1:

            def breaks() -> None:
                raise ZeroDivisionError("on purpose")

            comm.start(breaks)
        comm.all_reduce(torch.ones(1)).wait()


def test_a_rank_whose_lane_fails_takes_nobody_into_a_wait() -> None:
    with pytest.raises(RankError, match=r"on purpose|rank 1 has given up"):
        run_ranks(fails, 2)
