"""Collectives over sockets, from point-to-point messages of a private gloo group.

Gloo's own reduce-scatter moves the bytes of an all-reduce, twice too many, and its broadcast sends
a tensor several times. Here every rank sends what `comm.payload_bytes` says and no more. Small
worlds exchange directly, larger ones in a ring, unless the pieces are so small that the number of
hops is all that counts. All-reduce can be gloo's own as well ("native"): it sends the same bytes,
but ends the process when ranks differ in what they ask for, so it is for plans that all have agreed
to.

Names and numbers that fail are in the error: the operation, the axis, and the peer's rank on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import distributed

from penstock.errors import OptionError
from penstock.step.comms import gloo_waves as waves
from penstock.step.comms.checks import (
    check_apart,
    check_op,
    check_parts,
    check_runs,
    flat,
    wire_dtype,
)
from penstock.step.comms.comm import Done, Handle, parts_of, payload_bytes
from penstock.step.comms.completion import Completion, Pending
from penstock.step.comms.gloo_waves import (
    PIECE_BYTES,
    WAVES_MAX,
    MakeWave,
    Wave,
    WavedCollective,
    pieces_of,
)
from penstock.step.comms.gloo_wire import MESSAGES_MAX, GlooWire, Lease, Staging

__all__ = ["GlooComm"]

DIRECT_RANKS_MAX = 4
"""Beyond, a ring: each rank talks to two neighbours, whatever the world's size."""
DIRECT_PART_BYTES_MAX = 64 << 10
"""Parts up to this size go directly in any world: a ring would be as many latencies as ranks."""
PIECE_BYTES_MIN = 256 << 10
_UNEVEN = -1
"""A length on which ranks need not agree."""
_NATIVE_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)


class GlooComm:
    """One axis, one lane. The group is the lane's own: nobody else sends in it."""

    def __init__(self, group: distributed.ProcessGroup, *, axis: str, lane: str = "net") -> None:
        self.axis = axis
        self.rank, self.size = group.rank(), group.size()
        self._group = group
        self._wire = GlooWire(group, axis)
        self._staging = Staging()
        self._completion = Completion(f"penstock-{axis}-{lane}")

    @property
    def in_parts(self) -> GlooComm:
        """Itself: parts need not lie in a row."""
        return self

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent so far, without headers."""
        return self._wire.sent_bytes

    # -- collectives -------------------------------------------------------------------------

    def all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        op: str = "sum",
        wire: str | None = None,
        algo: str | None = None,
    ) -> Handle:
        """Put the sum of all ranks' tensors in the place of each."""
        row = flat("all_reduce", tensor)
        check_op("all_reduce", op, row)
        sent = wire_dtype("all_reduce", wire, row)
        algo = self._algo("all_reduce", algo, row.numel(), row.dtype, sent)
        if algo == "native":
            return self._start("all_reduce", self._native_all_reduce(row, op))
        job = self._job("all_reduce", row.numel(), row.dtype, sent, op=op, algo=algo)
        if algo == "direct" and self.size == 2:
            pair = waves.reduce_pair
            return self._along(job, row, lambda lease, at, piece: pair(job, lease, at, piece))
        return self._scatter_and_gather(job, row, is_ring=algo == "ring")

    def reduce_scatter(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        *,
        op: str = "sum",
        wire: str | None = None,
        algo: str | None = None,
    ) -> Handle:
        """Put this rank's part of the sum in `out`."""
        mine, row = flat("reduce_scatter", out), flat("reduce_scatter", tensor)
        check_op("reduce_scatter", op, row)
        check_parts("reduce_scatter", mine, row, rank=self.rank, size=self.size)
        return self._scatter(mine, parts_of(row, self.size), op=op, wire=wire, algo=algo)

    def scatter_parts(
        self,
        out: torch.Tensor,
        parts: Sequence[torch.Tensor],
        *,
        op: str = "sum",
        wire: str | None = None,
        algo: str | None = None,
    ) -> Handle:
        """Put this rank's part of the sum in `out`; parts may lie apart."""
        mine = flat("reduce_scatter", out)
        check_op("reduce_scatter", op, mine)
        rows = check_apart("reduce_scatter", mine, parts, rank=self.rank, size=self.size)
        return self._scatter(mine, rows, op=op, wire=wire, algo=algo)

    def _scatter(
        self,
        mine: torch.Tensor,
        parts: list[torch.Tensor],
        *,
        op: str,
        wire: str | None,
        algo: str | None,
    ) -> Handle:
        sent, longest = wire_dtype("reduce_scatter", wire, mine), max(p.numel() for p in parts)
        count = sum(each.numel() for each in parts)
        algo = self._algo("reduce_scatter", algo, count, mine.dtype, sent)
        job = self._job("reduce_scatter", count, mine.dtype, sent, op=op, algo=algo)
        scatter = waves.scatter_direct if algo == "direct" else waves.scatter_ring
        length = PIECE_BYTES // sent.itemsize

        def wave(lease: Lease, number: int) -> Wave:
            pieces, (piece,) = pieces_of(parts, number, length), pieces_of([mine], number, length)
            return scatter(job, lease, number * self.size, pieces, piece)

        num_buffers = self._scatter_buffers(job, mine.dtype)
        is_ring = algo == "ring"
        return self._run(job, wave, longest, in_turns=is_ring, num_buffers=num_buffers)

    def all_gather(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        *,
        wire: str | None = None,
        algo: str | None = None,
    ) -> Handle:
        """Put all ranks' parts in `out`."""
        row, mine = flat("all_gather", out), flat("all_gather", tensor)
        check_parts("all_gather", mine, row, rank=self.rank, size=self.size)
        return self._gather(parts_of(row, self.size), mine, wire=wire, algo=algo)

    def gather_parts(
        self,
        outs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        *,
        wire: str | None = None,
        algo: str | None = None,
    ) -> Handle:
        """Put each rank's part in its place; places may lie apart."""
        mine = flat("all_gather", tensor)
        rows = check_apart("all_gather", mine, outs, rank=self.rank, size=self.size)
        return self._gather(rows, mine, wire=wire, algo=algo)

    def _gather(
        self, parts: list[torch.Tensor], mine: torch.Tensor, *, wire: str | None, algo: str | None
    ) -> Handle:
        sent, longest = wire_dtype("all_gather", wire, mine), max(p.numel() for p in parts)
        count = sum(each.numel() for each in parts)
        algo = self._algo("all_gather", algo, count, mine.dtype, sent)
        job = self._job("all_gather", count, mine.dtype, sent, algo=algo)
        gather = waves.gather_direct if algo == "direct" else waves.gather_ring
        length = PIECE_BYTES // sent.itemsize

        def wave(lease: Lease, number: int) -> Wave:
            outs, (piece,) = pieces_of(parts, number, length), pieces_of([mine], number, length)
            return gather(job, lease, number * self.size, piece, outs)

        num_buffers = self._gather_buffers(job, mine.dtype)
        is_ring = algo == "ring"
        return self._run(job, wave, longest, in_turns=is_ring, num_buffers=num_buffers)

    def all_to_all(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        *,
        out_counts: Sequence[int],
        counts: Sequence[int],
    ) -> Handle:
        """Send each rank its run of elements; put what came from each in a row."""
        into, row = flat("all_to_all", out), flat("all_to_all", tensor)
        outs = check_runs("all_to_all", into, out_counts, size=self.size)
        runs = check_runs("all_to_all", row, counts, size=self.size)
        self._check_pair("all_to_all", into, row, outs[self.rank], runs[self.rank])
        job = self._job("all_to_all", _UNEVEN, row.dtype, row.dtype, algo="direct")
        outs[self.rank].copy_(runs[self.rank])
        return self._exchange(
            job,
            {peer: outs[peer] for peer in reversed(job.others)},
            {peer: runs[peer] for peer in job.others},
        )

    def shift(
        self,
        out: torch.Tensor | None,
        tensor: torch.Tensor | None,
        *,
        by: int = 1,
        wrap: bool = False,
    ) -> Handle:
        """Send to the rank `by` further, receive from the one `by` before; ends are left alone."""
        to, source = self.rank + by, self.rank - by
        outs, pieces = {}, {}
        if wrap or 0 <= source < self.size:
            outs[source % self.size] = flat("shift", _given(out, "out", source % self.size))
        if wrap or 0 <= to < self.size:
            pieces[to % self.size] = flat("shift", _given(tensor, "tensor", to % self.size))
        if not outs and not pieces:
            return Done()
        one = next(iter([*outs.values(), *pieces.values()]))
        if wrap and by % self.size == 0:
            outs[self.rank].copy_(pieces[self.rank])
            return Done()
        job = self._job("shift", _UNEVEN, one.dtype, one.dtype, op=f"{by} {wrap}", algo="direct")
        return self._exchange(job, outs, pieces)

    def reduce(
        self, tensor: torch.Tensor, *, root: int, op: str = "sum", algo: str | None = None
    ) -> Handle:
        """Put the sum of all in the root's tensor."""
        row = flat("reduce", tensor)
        check_op("reduce", op, row)
        self._check_root("reduce", root)
        if algo is None:
            is_small = row.numel() * row.itemsize <= DIRECT_PART_BYTES_MAX
            algo = "direct" if self.size <= 2 or is_small else "ring"
        job = self._job("reduce", row.numel(), row.dtype, row.dtype, op=f"{op} {root}", algo=algo)
        job = WavedCollective(wire=job.wire, topic=job.topic, sent=job.sent, op=op)
        way = waves.reduce_direct if algo == "direct" else waves.reduce_chain
        return self._along(job, row, lambda lease, at, piece: way(job, lease, at, piece, root))

    def broadcast(self, tensor: torch.Tensor, *, root: int) -> Handle:
        """Put the root's tensor in all."""
        row = flat("broadcast", tensor)
        self._check_root("broadcast", root)
        job = self._job("broadcast", row.numel(), row.dtype, row.dtype, op=str(root), algo="ring")
        chain = waves.broadcast_chain
        return self._along(job, row, lambda lease, at, piece: chain(job, lease, at, piece, root))

    def barrier(self) -> None:
        """Return when all ranks have come here and all that was asked on this lane is done."""
        self._completion.drain()
        token = torch.zeros(self.size, dtype=torch.uint8)
        self.all_gather(token, token[self.rank : self.rank + 1]).wait()

    def close(self) -> None:
        """Wait for what is under way and end the lane's thread."""
        self._completion.close()

    # -- what they have in common ------------------------------------------------------------

    def _algo(
        self, name: str, algo: str | None, length: int, dtype: torch.dtype, sent: torch.dtype
    ) -> str:
        is_rounded = sent != dtype or dtype in (torch.bfloat16, torch.float16)
        is_native = sent == dtype and dtype in _NATIVE_DTYPES
        if algo is None:
            part_bytes = length * sent.itemsize / self.size
            is_small = self.size <= DIRECT_RANKS_MAX or part_bytes <= DIRECT_PART_BYTES_MAX
            return "direct" if is_small or is_rounded else "ring"
        if algo not in ("direct", "ring", "native"):
            raise OptionError(f"{name}: no way {algo!r}; there are direct, ring, native")
        if algo == "native" and name != "all_reduce":
            raise OptionError(
                f"{name}: gloo's own moves more bytes or needs even parts; use direct"
            )
        if algo == "native" and not is_native:
            raise OptionError(f"{name}: gloo's own has no sums for {dtype} as {sent}")
        if algo == "ring" and sent != dtype and name != "all_gather":
            raise OptionError(f"{name}: a ring would round sums to {sent} on each rank; use direct")
        return algo

    def _job(
        self,
        name: str,
        length: int,
        dtype: torch.dtype,
        sent: torch.dtype,
        *,
        algo: str,
        op: str = "",
    ) -> WavedCollective:
        """Name an operation by what all ranks must agree on."""
        topic = self._wire.topic(name, length, dtype, sent, op, algo)
        return WavedCollective(wire=self._wire, topic=topic, sent=sent, op=op)

    def _run(
        self,
        job: WavedCollective,
        make: MakeWave,
        longest: int,
        *,
        length: int = 0,
        in_turns: bool = False,
        num_buffers: int = 0,
    ) -> Handle:
        """Begin the waves of an operation whose longest part has so many elements."""
        length = length or PIECE_BYTES // job.sent.itemsize
        count = -(-longest // length)
        wave_bytes = num_buffers * min(longest, length) * job.sent.itemsize
        # Neighbours may be a window apart, and a wave has two messages a rank at most.
        window = max(1, min(WAVES_MAX, MESSAGES_MAX // (4 * self.size)))
        steps = waves.waves_in_flight(
            make,
            count,
            self._staging,
            wave_bytes=wave_bytes,
            in_turns=in_turns,
            window=window,
        )
        return self._start(job.topic.name, steps)

    def _scatter_and_gather(
        self, job: WavedCollective, row: torch.Tensor, *, is_ring: bool
    ) -> Handle:
        ways = (waves.scatter_direct, waves.gather_direct)
        scatter, gather = (waves.scatter_ring, waves.gather_ring) if is_ring else ways
        parts = parts_of(row, self.size)
        # Several waves, so that one gathers while others scatter.
        length = max(parts[0].numel() // WAVES_MAX, PIECE_BYTES_MIN // job.sent.itemsize)
        length = min(length, PIECE_BYTES // job.sent.itemsize)

        def wave(lease: Lease, number: int) -> Wave:
            pieces, at = pieces_of(parts, number, length), number * 2 * self.size
            mine = pieces[self.rank]
            yield from scatter(job, lease, at, pieces, mine)
            yield from gather(job, lease, at + self.size, mine, pieces)

        num_buffers = self._scatter_buffers(job, row.dtype) + self._gather_buffers(job, row.dtype)
        return self._run(
            job, wave, parts[0].numel(), length=length, in_turns=True, num_buffers=num_buffers
        )

    def _scatter_buffers(self, job: WavedCollective, dtype: torch.dtype) -> int:
        """Pieces that a wave stages: what arrives, a sum, what is sent in another type."""
        return self.size if job.sent == dtype else 2 * self.size

    def _gather_buffers(self, job: WavedCollective, dtype: torch.dtype) -> int:
        """Without another type everything arrives in its place."""
        return 0 if job.sent == dtype else self.size

    def _along(
        self,
        job: WavedCollective,
        row: torch.Tensor,
        way: Callable[[Lease, int, torch.Tensor], Wave],
    ) -> Handle:
        length = PIECE_BYTES // job.sent.itemsize

        def wave(lease: Lease, number: int) -> Wave:
            return way(lease, number, row[number * length : (number + 1) * length])

        num_buffers = 0 if job.topic.name == "broadcast" else self.size
        return self._run(job, wave, row.numel(), num_buffers=num_buffers)

    def _exchange(
        self, job: WavedCollective, outs: dict[int, torch.Tensor], pieces: dict[int, torch.Tensor]
    ) -> Handle:
        length = PIECE_BYTES // job.sent.itemsize
        longest = max(each.numel() for each in [*outs.values(), *pieces.values()])

        def wave(lease: Lease, number: int) -> Wave:
            span = slice(number * length, (number + 1) * length)
            into = {peer: out[span] for peer, out in outs.items()}
            return waves.exchange(
                job, lease, number, into, {peer: each[span] for peer, each in pieces.items()}
            )

        return self._run(job, wave, longest)

    def _start(self, name: str, steps: Iterator[Pending]) -> Handle:
        return self._completion.start(name, steps)

    def _native_all_reduce(self, row: torch.Tensor, op: str) -> Iterator[Pending]:
        topic = self._wire.topic("all_reduce", row.numel(), row.dtype, op, "native")
        kind = {"max": distributed.ReduceOp.MAX, "min": distributed.ReduceOp.MIN}
        options = distributed.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp(kind.get(op, distributed.ReduceOp.SUM))
        yield self._wire.native(topic, lambda: self._group.allreduce([row], options))
        if op == "mean":
            row.div_(self.size)
        self._wire.count(
            payload_bytes("all_reduce", row.numel(), row.itemsize, size=self.size, rank=self.rank)
        )

    def _check_root(self, name: str, root: int) -> None:
        if not 0 <= root < self.size:
            raise OptionError(f"{name}: root {root} of an axis with {self.size} ranks")

    def _check_pair(
        self,
        name: str,
        out: torch.Tensor,
        row: torch.Tensor,
        mine_out: torch.Tensor,
        mine: torch.Tensor,
    ) -> None:
        if out.dtype != row.dtype or len(mine_out) != len(mine):
            raise OptionError(
                f"{name}: this rank sends itself {len(mine)} of {row.dtype} and has room for "
                f"{len(mine_out)} of {out.dtype}"
            )
        if row.numel() and out.data_ptr() == row.data_ptr():
            raise OptionError(f"{name}: out and tensor share memory; give it another place")


def _given(tensor: torch.Tensor | None, name: str, peer: int) -> torch.Tensor:
    if tensor is None:
        raise OptionError(f"shift: rank {peer} is there, so {name} is needed")
    return tensor
