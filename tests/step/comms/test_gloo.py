"""Collectives over gloo: values, bytes, orders, and what is said when a rank is gone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.step.ranks import run_ranks
from torch import distributed

from penstock.errors import OptionError, PeerError
from penstock.step.comms import gloo
from penstock.step.comms.comm import Comm, parts_of, payload_bytes
from penstock.step.groups import Groups
from penstock.step.program.mesh import mesh

WAVE = 1024
"""Elements of float32 in a piece, here: lengths beyond it go in several waves."""
LENGTHS = (0, 1, 2, 7, 1000, 2 * WAVE + 31, 40 * WAVE, 40 * WAVE + 1)
REDUCED = {
    "sum": lambda all_: all_.sum(0),
    "mean": lambda all_: all_.mean(0),
    "max": lambda all_: all_.amax(0),
    "min": lambda all_: all_.amin(0),
}


def of_rank(rank: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return what a rank has: other ranks can make it as well."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-99, 99, (length,), generator=generator).to(dtype)


def with_comm(size: int, work: Callable[[Comm], Any]) -> Any:
    gloo.PIECE_BYTES, gloo.PIECE_BYTES_MIN = 4 * WAVE, WAVE  # of this process, which is a rank
    with Groups(mesh(dp=size)) as groups:
        comm = groups.comm("dp")
        result = work(comm)
        comm.barrier()
        return result


def expected(size: int, length: int, op: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    everyone = torch.stack([of_rank(each, length).double() for each in range(size)])
    return REDUCED[op](everyone).to(dtype)


# -- values and bytes ------------------------------------------------------------------------


def reduces(rank: int, size: int, algo: str) -> None:
    def work(comm: Comm) -> None:
        for length in LENGTHS:
            for op in REDUCED if length == 1000 else ("sum",):
                sent = comm.sent_bytes
                whole, want = of_rank(rank, length), expected(size, length, op)
                mine = torch.full_like(parts_of(whole, size)[rank], -7)
                comm.reduce_scatter(mine, whole, op=op, algo=algo).wait()
                assert torch.equal(whole, of_rank(rank, length)), "the input stays as it was"
                assert torch.equal(mine, parts_of(want, size)[rank]), (length, op)
                counts = {"size": size, "rank": rank, "algo": algo}
                want_bytes = payload_bytes("reduce_scatter", length, 4, **counts)
                assert comm.sent_bytes - sent == want_bytes
                comm.all_reduce(whole, op=op, algo=algo).wait()
                assert torch.equal(whole, want), (length, op)
                want_bytes += payload_bytes("all_reduce", length, 4, **counts)
                assert comm.sent_bytes - sent == want_bytes

    with_comm(size, work)


def gathers(rank: int, size: int, algo: str) -> None:
    def work(comm: Comm) -> None:
        for length in LENGTHS:
            sent = comm.sent_bytes
            want = of_rank(99, length)
            out = torch.full((length,), -7.0)
            comm.all_gather(out, parts_of(want, size)[rank].clone(), algo=algo).wait()
            assert torch.equal(out, want)
            counts = {"size": size, "rank": rank, "algo": algo}
            assert comm.sent_bytes - sent == payload_bytes("all_gather", length, 4, **counts)

    with_comm(size, work)


def reduces_and_gathers(rank: int, size: int, algo: str) -> None:
    reduces(rank, size, algo)
    gathers(rank, size, algo)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("algo", ["direct", "ring"])
def test_values_are_right_and_bytes_are_those_of_the_formula(size: int, algo: str) -> None:
    run_ranks(reduces_and_gathers, size, algo)


def moves(rank: int, size: int) -> None:
    def work(comm: Comm) -> None:
        for length in (1, 1000, 2 * WAVE + 31):
            for root in range(size):
                before = comm.sent_bytes
                value = of_rank(rank, length)
                comm.broadcast(value, root=root).wait()
                assert torch.equal(value, of_rank(root, length))
                far = (rank - root) % size
                want = payload_bytes("broadcast", length, 4, size=size, rank=far)
                assert comm.sent_bytes - before == want
                value = of_rank(rank, length)
                comm.reduce(value, root=root).wait()
                if rank == root:
                    assert torch.equal(value, expected(size, length, "sum"))
                want += payload_bytes("reduce", length, 4, size=size, rank=far)
                assert comm.sent_bytes - before == want
            out = torch.full((length,), -7.0)
            comm.shift(out, of_rank(rank, length)).wait()
            want_out = of_rank(rank - 1, length) if rank else torch.full((length,), -7.0)
            assert torch.equal(out, want_out)
            comm.shift(out, of_rank(rank, length), by=-1, wrap=True).wait()
            assert torch.equal(out, of_rank((rank + 1) % size, length))
            comm.shift(out, value, by=size - 1).wait()  # ranks in between have no part in it
            comm.reduce(value := of_rank(rank, length), root=0, op="mean", algo="ring").wait()
            assert rank or torch.equal(value, expected(size, length, "mean"))

    with_comm(size, work)


@pytest.mark.parametrize("size", [2, 4])
def test_moves_to_from_and_between_ranks(size: int) -> None:
    run_ranks(moves, size)


def exchanges(rank: int, size: int) -> None:
    def run(source: int, to: int) -> torch.Tensor:
        length = (WAVE + 5) * source if to == 0 else 3 * source + to
        return of_rank(10 * source + to, length, torch.int64)

    def work(comm: Comm) -> None:
        given = [run(rank, to) for to in range(size)]
        want = [run(source, rank) for source in range(size)]
        out = torch.empty(sum(map(len, want)), dtype=torch.int64)
        counts = {"counts": [*map(len, given)], "out_counts": [*map(len, want)]}
        comm.all_to_all(out, torch.cat(given), **counts).wait()
        assert torch.equal(out, torch.cat(want))
        assert comm.sent_bytes == 8 * sum(len(g) for to, g in enumerate(given) if to != rank)

    with_comm(size, work)


def test_each_sends_to_each_what_it_likes() -> None:
    run_ranks(exchanges, 3)


def types(rank: int, size: int) -> None:
    def work(comm: Comm) -> None:
        for dtype in (torch.float64, torch.int64, torch.int32, torch.uint8, torch.complex64):
            want = sum(of_rank(each, 100).to(dtype) for each in range(size))
            value = of_rank(rank, 100).to(dtype)
            comm.all_reduce(value).wait()
            assert torch.equal(value, want), dtype
        for dtype in (torch.bool, torch.int16, torch.float8_e5m2, torch.complex128):
            value = of_rank(rank, 100).to(dtype)
            comm.broadcast(value, root=1).wait()
            want = of_rank(1, 100).to(dtype)
            assert torch.equal(value.view(torch.uint8), want.view(torch.uint8)), dtype

    with_comm(size, work)


def test_any_type_travels() -> None:
    run_ranks(types, 3)


def halves(rank: int, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    everyone = torch.randn(size, 3 * WAVE + 5, generator=generator)
    rounded = everyone.bfloat16().float()

    def work(comm: Comm) -> None:
        length = everyone.shape[1]
        value = everyone[rank].clone()
        mine = torch.empty_like(parts_of(value, size)[rank])
        comm.reduce_scatter(mine, value, wire="bf16").wait()
        # Float32 sums, in the order of ranks, of what was rounded once; its own is not rounded.
        total = torch.zeros_like(mine)
        for each in range(size):
            whose = everyone if each == rank else rounded
            total += parts_of(whose[each], size)[rank]
        assert torch.equal(mine, total)
        assert comm.sent_bytes == payload_bytes("reduce_scatter", length, 2, size=size, rank=rank)
        comm.all_reduce(value, wire="bf16").wait()
        others = torch.empty(size * length)
        comm.all_gather(others, value).wait()
        same = others.view(size, length)
        assert all(torch.equal(same[0], each) for each in same), "ranks must not drift apart"
        assert torch.allclose(value, everyone.sum(0), rtol=2e-2, atol=5e-2)
        value = everyone[rank].half()
        comm.all_reduce(value).wait()
        exact = everyone.half().float().sum(0).half()
        assert torch.allclose(value.float(), exact.float(), rtol=1e-3, atol=1e-3)

    with_comm(size, work)


@pytest.mark.parametrize("size", [2, 3])
def test_half_the_bytes_with_sums_in_float32(size: int) -> None:
    run_ranks(halves, size)


def cut_differently(rank: int, size: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    whole = torch.randn(10_007, generator=generator)

    def work(comm: Comm) -> None:
        at_once = whole.clone()
        comm.all_reduce(at_once, algo="direct").wait()
        chunked = whole.clone()
        for handle in [comm.all_reduce(c, algo="direct") for c in chunked.split(1003)]:
            handle.wait()
        assert torch.equal(at_once, chunked)
        scattered = whole.clone()
        mine = parts_of(scattered, size)[rank]
        comm.reduce_scatter(mine, scattered).wait()  # in place
        comm.all_gather(scattered, mine).wait()
        assert torch.equal(at_once, scattered)

    with_comm(size, work)


def test_cutting_a_tensor_changes_no_bit_of_direct_sums() -> None:
    run_ranks(cut_differently, 4)


def natively(rank: int, size: int) -> None:
    def work(comm: Comm) -> None:
        value = of_rank(rank, 1000)
        comm.all_reduce(value, op="mean", algo="native").wait()
        assert torch.equal(value, expected(size, 1000, "mean"))
        assert comm.sent_bytes == payload_bytes("all_reduce", 1000, 4, size=size, rank=rank)

    with_comm(size, work)


def test_gloos_own_all_reduce_is_there_too() -> None:
    run_ranks(natively, 2)


# -- order, threads, memory --------------------------------------------------------------------


def chained(rank: int, size: int) -> None:
    with Groups(mesh(dp=size)) as groups:
        scatter, gather = groups.comm("dp", "rs"), groups.comm("dp", "ag")
        whole = of_rank(rank, 64 * WAVE)
        weights = torch.zeros_like(whole)
        rows, outs = whole.chunk(16), weights.chunk(16)
        handles, threads, is_all = [], set(), threading.Event()

        def update(row: torch.Tensor, out: torch.Tensor) -> None:
            threads.add(threading.current_thread().name)
            mine = parts_of(row, size)[rank]
            mine.mul_(2)
            handles.append(gather.all_gather(out, mine))
            if len(handles) == 16:
                is_all.set()

        for row, out in zip(rows, outs, strict=True):
            handle = scatter.reduce_scatter(parts_of(row, size)[rank], row)
            handle.then(lambda row=row, out=out: update(row, out))
        assert is_all.wait(20)
        for handle in handles:
            handle.wait()
        assert torch.equal(weights, 2 * expected(size, len(weights), "sum"))
        assert threads <= {"penstock-dp-rs", "MainThread"}
        calls = []
        handles[0].then(lambda: calls.append(threading.current_thread().name))
        assert calls == ["MainThread"], "of what is done already it is called now"


def test_work_is_chained_by_the_completion_thread() -> None:
    run_ranks(chained, 2)


def late(rank: int, size: int) -> float:
    """Ask for many operations while the other rank has not come yet."""

    def work(comm: Comm) -> float:
        comm.barrier()
        if rank == 1:
            time.sleep(0.5)
        tensors = [of_rank(rank, WAVE) for _ in range(40)]
        begin = time.perf_counter()
        handles = [comm.all_reduce(each, algo="direct") for each in tensors]
        asked_s = time.perf_counter() - begin
        assert rank == 1 or not handles[-1].is_done()
        for handle, tensor in zip(handles, tensors, strict=True):
            handle.wait()
            assert handle.is_done()
            assert torch.equal(tensor, expected(size, WAVE, "sum"))
        return asked_s

    return with_comm(size, work)


def test_asking_does_not_wait_for_the_peer() -> None:
    assert run_ranks(late, 2)[0] < 0.4, "it had half a second to ask before the other came"


def two_axes(rank: int, size: int) -> None:
    with Groups(mesh(dp=2, tp=2)) as groups:
        dp, tp, both = groups.comm("dp"), groups.comm("tp"), groups.comm(("dp", "tp"))
        values = [torch.full((5,), float(rank)) for _ in range(3)]
        order = (dp, tp, both) if rank % 2 else (both, tp, dp)
        handles = {comm.axis: None for comm in order}
        for comm in order:
            value = values[("dp", "tp", "dp.tp").index(comm.axis)]
            handles[comm.axis] = comm.all_reduce(value)
        for handle in handles.values():
            handle.wait()
        want = (rank % 2 + (rank % 2 + 2), 2 * (rank - rank % 2) + 1, 6)
        assert [value[0].item() for value in values] == [*want]
        assert (dp.rank, dp.size, tp.rank, both.size) == (rank // 2, 2, rank % 2, 4)


def test_lanes_may_be_used_in_any_order_beside_each_other() -> None:
    run_ranks(two_axes, 4)


# -- what is refused, and what goes wrong ------------------------------------------------------


def test_an_axis_of_one_rank_needs_no_process_group() -> None:
    with Groups(mesh(dp=1)) as groups:
        comm = groups.comm("dp")
        value, out = torch.arange(3.0), torch.zeros(3)
        comm.all_reduce(value, op="mean").wait()
        comm.reduce_scatter(out, value).then(lambda: out.add_(1))
        assert out.tolist() == [1, 2, 3]
        assert comm.sent_bytes == 0


def test_a_mesh_of_another_size_than_the_world_is_refused() -> None:
    with pytest.raises(OptionError, match="has 4 ranks, and there is no group of processes"):
        Groups(mesh(dp=4)).__enter__()


def refusals(rank: int, size: int) -> None:
    def work(comm: Comm) -> None:
        ten, five = torch.zeros(10), torch.zeros(5)
        for message, call in {
            "has 5 of 10 elements, but its tensor has 4": lambda: comm.reduce_scatter(ten[:4], ten),
            "tensors of torch.float64 and": lambda: comm.all_gather(ten, five.double()),
            "not contiguous": lambda: comm.all_reduce(torch.zeros(4, 4).T),
            "a mean of torch.int64": lambda: comm.all_reduce(ten.long(), op="mean"),
            "no reduction 'avg'": lambda: comm.all_reduce(ten, op="avg"),
            "no wire format 'int4'": lambda: comm.all_reduce(ten, wire="int4"),
            "round sums": lambda: comm.all_reduce(ten, wire="bf16", algo="ring"),
            "no way 'tree'": lambda: comm.all_reduce(ten, algo="tree"),
            "root 2 of an axis with 2": lambda: comm.broadcast(ten, root=2),
            "together 9": lambda: comm.all_to_all(ten, ten.clone(), out_counts=[5, 4], counts=[5]),
            "share memory": lambda: comm.all_to_all(ten, ten, out_counts=[5, 5], counts=[5, 5]),
        }.items():
            with pytest.raises(OptionError, match=message):
                call()
        assert comm.sent_bytes == 0
        comm.all_reduce(ten).wait()

    with_comm(size, work)


def test_what_cannot_be_right_is_refused_before_anything_is_sent() -> None:
    run_ranks(refusals, 2)


def dies(rank: int, size: int) -> tuple[str, float]:
    with Groups(mesh(dp=size)) as groups:
        comm = groups.comm("dp")
        comm.barrier()
        if rank == 1:
            os._exit(1)
        begin = time.perf_counter()
        with pytest.raises(PeerError) as caught:  # by the call or by the wait, as the socket says
            for handle in [comm.all_reduce(torch.zeros(100)) for _ in range(3)]:
                handle.wait()
        assert (caught.value.peer, caught.value.kind) == ("dp:1", "lost")
        with pytest.raises(PeerError):
            comm.broadcast(torch.zeros(1), root=0)
        return str(caught.value), time.perf_counter() - begin


def test_a_peer_that_dies_is_named_with_the_operation_and_the_axis() -> None:
    message, taken_s = run_ranks(dies, 2, dies={1})[0]
    assert "all_reduce (number " in message
    assert "on axis 'dp')" in message
    assert "rank 1" in message
    assert "its process has ended or the network has failed" in message
    assert taken_s < 15, "a closed connection is known at once, long before the timeout"


def differs(rank: int, size: int) -> str:
    with Groups(mesh(dp=size), timeout_s=1) as groups:
        comm = groups.comm("dp")
        value = torch.zeros(10 + rank)
        with pytest.raises(PeerError) as caught:
            comm.all_reduce(value).wait()
        assert caught.value.kind in ("stuck", "lost")
        return str(caught.value)


def test_ranks_that_ask_for_different_things_are_told_so_after_the_timeout() -> None:
    messages = run_ranks(differs, 2)
    assert any("has asked for something else" in message for message in messages)


def closes(rank: int, size: int) -> int:
    before = threading.active_count()
    with Groups(mesh(dp=size)) as groups:
        comm = groups.comm("dp")
        value = of_rank(rank, 3 * WAVE)
        comm.all_reduce(value)
        assert threading.active_count() > before
    assert torch.equal(value, expected(size, 3 * WAVE, "sum")), "what was asked is completed"
    assert distributed.is_initialized()
    return threading.active_count() - before


def test_closing_completes_and_leaves_no_thread() -> None:
    assert run_ranks(closes, 2) == [0, 0]


# -- parts that lie apart ----------------------------------------------------------------------


def apart(rank: int, size: int, algo: str) -> None:
    """Parts of any lengths, in any order in memory, to and from it."""
    lengths = [3 * WAVE + 5, 0, 7, 2 * WAVE, 1][:size]
    starts = [2 + sum(lengths[i + 1 :]) for i in range(size)]  # the last rank's come first

    def parts(row: torch.Tensor) -> list[torch.Tensor]:
        return [row[a : a + n] for a, n in zip(starts, lengths, strict=True)]

    def work(comm: Comm) -> None:
        assert comm.takes_parts
        length, sent = sum(lengths) + 4, comm.sent_bytes
        row, want = of_rank(rank, length), expected(size, length, "sum")
        mine = parts(row)[rank] if rank % 2 else torch.empty(lengths[rank])
        comm.reduce_scatter(mine, parts(row), algo=algo).wait()
        assert torch.equal(mine, parts(want)[rank])
        assert comm.sent_bytes - sent == 4 * (sum(lengths) - lengths[rank])
        out = torch.full((length,), -7.0)
        comm.all_gather(parts(out), mine, algo=algo).wait()
        assert torch.equal(out[2:-2], want[2:-2])
        assert out[:2].tolist() == out[-2:].tolist() == [-7.0, -7.0]
        with pytest.raises(OptionError, match=f"1 parts for {size} ranks"):
            comm.all_gather([out], mine)
        with pytest.raises(OptionError, match="elements, its own tensor"):
            comm.reduce_scatter(out, parts(out))

    with_comm(size, work)


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("algo", ["direct", "ring"])
def test_parts_may_lie_apart_and_be_of_any_length(size: int, algo: str) -> None:
    run_ranks(apart, size, algo)
