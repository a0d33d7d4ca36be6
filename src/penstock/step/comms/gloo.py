"""Collectives over sockets, from point-to-point messages of a private gloo group.

Gloo's own reduce-scatter moves the bytes of an all-reduce, twice too many, and its broadcast sends
a tensor several times. Here every rank sends what `comm.payload_bytes` says and no more. Small
worlds exchange directly, larger ones in a ring, unless the pieces are so small that the number of
hops is all that counts. All-reduce can also be gloo's own ("native"): it sends the same bytes, but
ends the process when ranks differ in what they ask for, so it is for plans that all ranks have
agreed on.

An error names the operation, the axis, and the peer's rank on it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import distributed

from penstock.errors import OptionError
from penstock.step.comms import gloo_waves as waves
from penstock.step.comms.comm import Collective, Comm, Handle, payload_bytes
from penstock.step.comms.completion import Completion, Pending
from penstock.step.comms.gloo_waves import (
    PIECE_BYTES,
    WAVES_MAX,
    MakeWave,
    Wave,
    pieces_of,
)
from penstock.step.comms.gloo_wire import MESSAGES_MAX, GlooWire, Lease, Staging, WireOperation

__all__ = ["GlooComm"]

DIRECT_RANKS_MAX = 4
"""Beyond, a ring: each rank talks to two neighbours, whatever the world's size."""
DIRECT_PART_BYTES_MAX = 64 << 10
"""Parts up to this size go directly in any world: a ring would be as many latencies as ranks."""
PIECE_BYTES_MIN = 256 << 10
_NATIVE_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)


class GlooComm(Comm):
    """One axis, one lane. The process group belongs to the lane: nothing else sends in it."""

    takes_parts = True

    def __init__(self, group: distributed.ProcessGroup, *, axis: str, lane: str = "net") -> None:
        super().__init__(axis, rank=group.rank(), size=group.size())
        self._wire = GlooWire(group, axis)
        self._staging = Staging()
        self._completion = Completion(f"penstock-{axis}-{lane}")

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent so far, without headers."""
        return self._wire.sent_bytes

    def begin(self, collective: Collective) -> Handle:
        """Begin a collective as waves of messages."""
        kind, algo = collective.kind, self._algo(collective)
        job = self._job(collective, algo)
        if algo == "native":
            return self._completion.start(kind, self._native_all_reduce(job, collective))
        if kind in ("all_to_all", "shift"):
            return self._exchange(job, collective)
        is_pair = kind == "all_reduce" and algo == "direct" and self.size == 2
        if is_pair or kind in ("reduce", "broadcast"):
            return self._piece_by_piece(job, collective, algo)
        return self._part_by_part(job, collective, is_ring=algo == "ring")

    def barrier(self) -> None:
        """Return when all ranks have come here and everything begun on this lane is done."""
        self._completion.drain()
        token = torch.zeros(self.size, dtype=torch.uint8)
        self.all_gather(token, token[self.rank : self.rank + 1]).wait()

    def close(self) -> None:
        """Wait for what is under way and end the lane's thread."""
        self._completion.close()

    # -- which way ---------------------------------------------------------------------------

    def _algo(self, collective: Collective) -> str:
        name, algo = collective.kind, collective.algo
        sent, dtype = collective.sent, collective.dtype
        if algo is None:
            return self._fastest(collective)
        if algo not in ("direct", "ring", "native"):
            raise OptionError(f"{name}: no way {algo!r}; there are direct, ring, native")
        if algo == "native" and name != "all_reduce":
            raise OptionError(
                f"{name}: gloo's own moves more bytes or needs even parts; use direct"
            )
        if algo == "native" and not (sent == dtype and dtype in _NATIVE_DTYPES):
            raise OptionError(f"{name}: gloo's own has no sums for {dtype} as {sent}; use direct")
        if algo == "ring" and sent != dtype and name != "all_gather":
            raise OptionError(f"{name}: a ring would round sums to {sent} on each rank; use direct")
        return algo

    def _fastest(self, collective: Collective) -> str:
        kind, sent = collective.kind, collective.sent
        if kind in ("all_to_all", "shift"):
            return "direct"
        if kind == "broadcast":
            return "ring"
        size_bytes = collective.length * sent.itemsize
        if kind == "reduce":
            return "direct" if self.size <= 2 or size_bytes <= DIRECT_PART_BYTES_MAX else "ring"
        # A ring would round a narrow sum once on each rank.
        is_rounded = sent != collective.dtype or sent in (torch.bfloat16, torch.float16)
        is_small = self.size <= DIRECT_RANKS_MAX or size_bytes / self.size <= DIRECT_PART_BYTES_MAX
        return "direct" if is_small or is_rounded else "ring"

    def _job(self, collective: Collective, algo: str) -> WireOperation:
        """Begin an operation, identified by what all ranks must agree on."""
        # Ranks need not exchange runs of the same length.
        length = None if collective.kind in ("all_to_all", "shift") else collective.length
        facts = (length, collective.dtype, collective.sent, collective.op, collective.root, algo)
        sent, op = collective.sent, collective.op
        return self._wire.begin(collective.kind, *facts, sent=sent, op=op)

    # -- waves -------------------------------------------------------------------------------

    def _part_by_part(self, job: WireOperation, collective: Collective, *, is_ring: bool) -> Handle:
        """Scatter parts, gather them, or both."""
        scatters = collective.kind != "all_gather"
        gathers = collective.kind != "reduce_scatter"
        scatter = waves.scatter_ring if is_ring else waves.scatter_direct
        gather = waves.gather_ring if is_ring else waves.gather_direct
        parts = collective.parts(self.size)
        longest = max(each.numel() for each in parts)
        length = PIECE_BYTES // job.sent.itemsize
        mine = collective.tensor if gathers else collective.out
        if scatters and gathers:
            mine = parts[self.rank]
            # Several waves, so that one gathers while others scatter.
            length = min(length, max(longest // WAVES_MAX, PIECE_BYTES_MIN // job.sent.itemsize))
        assert mine is not None

        def wave(lease: Lease, number: int) -> Wave:
            pieces, (piece,) = pieces_of(parts, number, length), pieces_of([mine], number, length)
            at = number * self.size * (scatters + gathers)
            if scatters:
                yield from scatter(job, lease, at, pieces, piece)
            if gathers:
                yield from gather(job, lease, at + self.size * scatters, piece, pieces)

        # A scatter stages what arrives and a sum, in another type also what is sent. A gather puts
        # everything in its place, unless it arrives in another type.
        is_same = job.sent == collective.dtype
        num_buffers = scatters * self.size * (1 if is_same else 2)
        num_buffers += gathers * self.size * (0 if is_same else 1)
        in_turns = is_ring or (scatters and gathers)
        return self._run(job, wave, longest, length, in_turns=in_turns, num_buffers=num_buffers)

    def _piece_by_piece(self, job: WireOperation, collective: Collective, algo: str) -> Handle:
        """Send whole pieces: to the only other rank, to or from a root."""
        row, root = collective.whole, collective.root
        length = PIECE_BYTES // job.sent.itemsize
        reduce = waves.reduce_direct if algo == "direct" else waves.reduce_chain

        def wave(lease: Lease, number: int) -> Wave:
            piece = row[number * length : (number + 1) * length]
            if collective.kind == "all_reduce":
                return waves.reduce_pair(job, lease, number, piece)
            if collective.kind == "reduce":
                return reduce(job, lease, number, piece, root)
            return waves.broadcast_chain(job, lease, number, piece, root)

        num_buffers = 0 if collective.kind == "broadcast" else self.size
        return self._run(job, wave, row.numel(), length, num_buffers=num_buffers)

    def _exchange(self, job: WireOperation, collective: Collective) -> Handle:
        """Send a run of elements to some ranks and receive one from some."""
        pieces, outs = collective.sends(), collective.receipts()
        if self.rank in outs:
            outs.pop(self.rank).copy_(pieces.pop(self.rank))
        pieces = {peer: pieces[peer] for peer in job.others if peer in pieces}
        outs = {peer: outs[peer] for peer in reversed(job.others) if peer in outs}
        length = PIECE_BYTES // job.sent.itemsize
        longest = max((each.numel() for each in [*outs.values(), *pieces.values()]), default=0)

        def wave(lease: Lease, number: int) -> Wave:
            span = slice(number * length, (number + 1) * length)
            into = {peer: out[span] for peer, out in outs.items()}
            return waves.exchange(
                job, lease, number, into, {peer: each[span] for peer, each in pieces.items()}
            )

        return self._run(job, wave, longest, length)

    def _run(
        self,
        job: WireOperation,
        make: MakeWave,
        longest: int,
        length: int,
        *,
        in_turns: bool = False,
        num_buffers: int = 0,
    ) -> Handle:
        """Begin the waves of an operation, each with `length` elements of every part.

        Args:
            job: the operation.
            make: how a wave is made.
            longest: elements of the longest part.
            length: elements of a piece.
            in_turns: whether waves take turns, as those with several exchanges do.
            num_buffers: pieces that a wave stages.
        """
        wave_bytes = num_buffers * min(longest, length) * job.sent.itemsize
        # Neighbours may be a window apart, and a wave has two messages a rank at most.
        window = max(1, min(WAVES_MAX, MESSAGES_MAX // (4 * self.size)))
        steps = waves.waves_in_flight(
            make,
            -(-longest // length),
            self._staging,
            wave_bytes=wave_bytes,
            in_turns=in_turns,
            window=window,
        )
        return self._completion.start(job.name, steps)

    def _native_all_reduce(self, job: WireOperation, collective: Collective) -> Iterator[Pending]:
        row, op = collective.whole, collective.op
        kind = {"max": distributed.ReduceOp.MAX, "min": distributed.ReduceOp.MIN}
        options = distributed.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp(kind.get(op, distributed.ReduceOp.SUM))
        yield job.native(lambda: self._wire.group.allreduce([row], options))
        if op == "mean":
            row.div_(self.size)
        self._wire.count(
            payload_bytes("all_reduce", row.numel(), row.itemsize, size=self.size, rank=self.rank)
        )
