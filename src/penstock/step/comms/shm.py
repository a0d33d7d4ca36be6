"""Communication through shared memory, between ranks of one host.

    with Arena(meeting(), rank=rank, size=2, size_bytes="256MB") as arena:
        with ShmComm(arena, axis="dp") as comm:
            comm.all_reduce(grad).wait()

Any tensor will do: what is not in the arena passes through stages there, in small chunks
(`shm_moves`). Tensors that live in the arena on all ranks are not copied: a reduction reads the
peers' memory and writes its result into it.

Every call begins with all ranks saying what they call, and with what (`shm_calls`): other sizes,
types or another operation on one rank are an error that names both, on all ranks, instead of a hang
or of nonsense. Calls are done one after the other by a thread of the communicator's own, or by who
waits for them (`shm_lane`).

Reductions add in the order of the ranks; results are the same bits on all of them. With
`wire="bf16"` what passes the stages is rounded to bf16, and an all_reduce rounds once more on the
way back, as it would over a network. `algo` says nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from penstock.errors import OptionError
from penstock.step.comms.checks import check_op, check_parts, check_runs, flat, wire_dtype
from penstock.step.comms.comm import payload_bytes
from penstock.step.comms.shm_calls import Calls, ShmCall
from penstock.step.comms.shm_flags import LINE_WORDS, Flags
from penstock.step.comms.shm_lane import ShmLane, ShmTask
from penstock.step.comms.shm_memory import ALIGN_BYTES, Segments
from penstock.step.comms.shm_moves import Moves, spans_of
from penstock.step.comms.shm_reduce import Reducer
from penstock.step.comms.timeouts import default_timeout_s

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["STAGE_BYTES", "ShmComm"]

STAGE_BYTES = 512 * 1024
"""Of each of the two stages: half of a common second cache."""


class ShmComm:
    """A `Comm` for ranks of one host. All ranks make it, and call it, in the same order.

    Args:
        arena: what the ranks share; all of them take the stages from it here.
        axis: the mesh axis it is for.
        ranks: which ranks of the arena take part, in the order of the axis; all of them by default.
        stage_bytes: of each of two stages.
        timeout_s: how long to wait for a rank that lives but does not come; without it as long as
            the default process group does.
    """

    device_type = "cpu"

    def __init__(
        self,
        arena: Segments,
        *,
        axis: str = "dp",
        ranks: Sequence[int] | None = None,
        stage_bytes: int = STAGE_BYTES,
        timeout_s: float | None = None,
    ) -> None:
        self.ranks = tuple(range(arena.size) if ranks is None else ranks)
        if arena.rank not in self.ranks:
            raise OptionError(f"rank {arena.rank} is not one of the ranks {self.ranks}")
        self.axis, self.size, self.rank = axis, len(self.ranks), self.ranks.index(arena.rank)
        self.arena, self.sent_bytes = arena, 0
        host = arena.host
        words = host.take(LINE_WORDS + Calls.words_of(self.size), torch.int64)
        stages = [arena.take(stage_bytes, torch.uint8) for _ in range(2)]
        offset = host.offset_of(words)
        assert offset is not None
        self.flags = self._flags(offset, timeout_s or default_timeout_s())
        self._calls = Calls(host, offset + 8 * LINE_WORDS, self.ranks, self.flags)
        by_turn = [[arena.of(stage, rank=rank) for rank in self.ranks] for stage in stages]
        self._moves = Moves(self.rank, by_turn, self.flags)
        self._lane = ShmLane(f"penstock-shm-{axis}", self.flags.fail)
        self._is_closed = False

    def _flags(self, offset: int, timeout_s: float) -> Flags:
        return Flags(self.arena.host, offset, self.ranks, timeout_s=timeout_s)

    @staticmethod
    def need_bytes(size: int, stage_bytes: int = STAGE_BYTES) -> int:
        """Return what a communicator of so many ranks takes from each rank's arena."""
        words_bytes = 8 * (LINE_WORDS + Calls.words_of(size))
        return sum(-(-n // ALIGN_BYTES) * ALIGN_BYTES for n in (words_bytes, *[stage_bytes] * 2))

    def __enter__(self) -> ShmComm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish what was started; ranks that still wait for this one are told."""
        if not self._is_closed:
            self._is_closed = True
            self._lane.close()
            self._calls.close()
            self._moves.close()
            self.flags.close()

    def start(self, work: Callable[[], None], *tensors: Tensor | None) -> ShmTask:
        """Run something in the lane, after all that was called before; it may use `flags`.

        The tensors are those that it works on. They matter to a device, where the memory of
        a tensor that nobody holds any more may be given away before work on it is done.
        """
        assert not self._is_closed, f"the communicator of axis {self.axis!r} is closed"
        return self._lane.start(work)

    def meet(self, text: str) -> None:
        """Wait, inside the lane, until all ranks have come with the same text."""
        self._calls.agree(ShmCall(text=text))

    def everyones(self, tensor: Tensor) -> list[Tensor]:
        """Return what all ranks took from the arena where this rank has this tensor, by rank."""
        return [self.arena.of(tensor, rank=rank) for rank in self.ranks]

    # -- operations --------------------------------------------------------------------------

    def all_reduce(
        self, tensor: Tensor, *, op: str = "sum", wire: str | None = None, algo: str | None = None
    ) -> ShmTask:
        """Put the sum (mean, max, min) of all ranks' tensors in the place of each."""
        tensor = flat("all_reduce", tensor, self.device_type)
        check_op("all_reduce", op, tensor)
        wired = wire_dtype("all_reduce", wire, tensor)
        reducer, call = Reducer(op, tensor.dtype), self._call("all_reduce", tensor, wired, op)
        self._count("all_reduce", tensor.numel(), wired)

        def work() -> None:
            calls = self._calls.agree(call)
            if _in_arena(calls):
                self._moves.reduce_direct(
                    self._views(calls, tensor.dtype, [tensor.numel()] * self.size), reducer
                )
            elif self.size == 2 and wire is None:
                self._moves.reduce_pair(tensor, reducer)
            else:
                self._moves.reduce_staged(tensor, reducer, wired)

        return self.start(work, tensor)

    @property
    def in_parts(self) -> None:
        """Others read parts where they lie in a row."""

    def reduce_scatter(
        self,
        out: Tensor,
        tensor: Tensor,
        *,
        op: str = "sum",
        wire: str | None = None,
        algo: str | None = None,
    ) -> ShmTask:
        """Put this rank's part of the sum in `out`, which may be that part of the tensor."""
        out, tensor = (
            flat("reduce_scatter", out, self.device_type),
            flat("reduce_scatter", tensor, self.device_type),
        )
        check_op("reduce_scatter", op, tensor)
        check_parts("reduce_scatter", out, tensor, rank=self.rank, size=self.size)
        wired = wire_dtype("reduce_scatter", wire, tensor)
        reducer, call = Reducer(op, tensor.dtype), self._call("reduce_scatter", tensor, wired, op)
        self._count("reduce_scatter", tensor.numel(), wired)

        def work() -> None:
            calls = self._calls.agree(call)
            if _in_arena(calls):
                self._moves.scatter_direct(
                    out, self._views(calls, tensor.dtype, [tensor.numel()] * self.size), reducer
                )
            else:
                self._moves.scatter_staged(out, tensor, reducer, wired)

        return self.start(work, out, tensor)

    def all_gather(
        self, out: Tensor, tensor: Tensor, *, wire: str | None = None, algo: str | None = None
    ) -> ShmTask:
        """Put all ranks' parts in `out`; the tensor may be this rank's part of it."""
        out, tensor = (
            flat("all_gather", out, self.device_type),
            flat("all_gather", tensor, self.device_type),
        )
        check_parts("all_gather", tensor, out, rank=self.rank, size=self.size)
        wired = wire_dtype("all_gather", wire, tensor)
        call = self._call("all_gather", out, wired)
        self._count("all_gather", out.numel(), wired)

        def work() -> None:
            calls = self._calls.agree(call)
            if _in_arena(calls):
                self._moves.give_direct(
                    self._views(calls, out.dtype, [out.numel()] * self.size), tensor
                )
            else:
                self._moves.gather_staged(out, tensor, wired)

        return self.start(work, out, tensor)

    def all_to_all(
        self, out: Tensor, tensor: Tensor, *, out_counts: Sequence[int], counts: Sequence[int]
    ) -> ShmTask:
        """Send each rank its run of elements; put what came from each in a row."""
        out, tensor = (
            flat("all_to_all", out, self.device_type),
            flat("all_to_all", tensor, self.device_type),
        )
        check_runs("all_to_all", tensor, counts, size=self.size)
        pieces = check_runs("all_to_all", out, out_counts, size=self.size)
        text = f"all_to_all of {tensor.dtype}"
        call = ShmCall(text=text, offset=self.arena.offset_of(tensor), counts=tuple(counts))
        self.sent_bytes += (sum(counts) - counts[self.rank]) * tensor.element_size()

        def work() -> None:
            calls = self._calls.agree(call)
            self._check_pairs(calls, out_counts)
            if _in_arena(calls):
                spans = [spans_of(call.counts)[self.rank] for call in calls]
                lengths = [sum(call.counts) for call in calls]
                wholes = self._views(calls, tensor.dtype, lengths)
                views = [
                    view[start:stop] for view, (start, stop) in zip(wholes, spans, strict=True)
                ]
                self._moves.take_direct(pieces, views)
            else:
                most = max(max(call.counts) for call in calls)
                given = {"counts": counts, "out_counts": out_counts}
                self._moves.exchange_staged(out, tensor, **given, most=most)

        return self.start(work, out, tensor)

    def reduce(self, tensor: Tensor, *, root: int, op: str = "sum") -> ShmTask:
        """Put the sum of all in the root's tensor; the others keep theirs."""
        tensor = flat("reduce", tensor, self.device_type)
        check_op("reduce", op, tensor)
        self._check_rank(root)
        reducer = Reducer(op, tensor.dtype)
        call = self._call("reduce", tensor, tensor.dtype, f"{op} to {root}")
        self._count("reduce", tensor.numel(), tensor.dtype, root)

        def work() -> None:
            calls = self._calls.agree(call)
            if not _in_arena(calls):
                self._moves.reduce_to(tensor, reducer, root)
                return
            if self.rank == root:
                reducer(tensor, self._views(calls, tensor.dtype, [tensor.numel()] * self.size))
            self.flags.sync()

        return self.start(work, tensor)

    def broadcast(self, tensor: Tensor, *, root: int) -> ShmTask:
        """Put the root's tensor in all."""
        self._check_rank(root)
        self._count("broadcast", tensor.numel(), tensor.dtype, root)
        if self.rank == root:
            return self._pass(f"broadcast from {root}", None, tensor, source=None)
        return self._pass(f"broadcast from {root}", tensor, None, source=root)

    def shift(
        self, out: Tensor | None, tensor: Tensor | None, *, by: int = 1, wrap: bool = False
    ) -> ShmTask:
        """Send to the rank `by` further, receive from the one `by` before; ends are left alone."""
        source, target = self._neighbour(-by, wrap), self._neighbour(by, wrap)
        if target is None:
            tensor = None
        elif tensor is not None and target != self.rank:
            self.sent_bytes += tensor.numel() * tensor.element_size()
        return self._pass(f"shift by {by}{' around' * wrap}", out, tensor, source=source)

    def barrier(self) -> None:
        """Return when all ranks have come here and all that was asked on this lane is done."""
        self.start(lambda: self.meet("barrier")).wait()

    # -- parts of operations -----------------------------------------------------------------

    def _pass(
        self, text: str, out: Tensor | None, tensor: Tensor | None, *, source: int | None
    ) -> ShmTask:
        """Give one tensor and take that of another rank, either of which may be nothing.

        As bytes: a rank that has neither must go along with the others all the same.
        """
        into, gift = self._bytes(text, out), self._bytes(text, tensor)
        length = next((x.numel() for x in (gift, into) if x is not None), _ANY_LENGTH)
        # Who gives nothing is not read from: any place will do.
        offset = 0 if gift is None else self.arena.offset_of(gift)
        call = ShmCall(text=text, offset=offset, counts=(length,) * self.size)

        def work() -> None:
            calls = self._calls.agree(call)
            total = _common_length(text, calls)
            taken = None if into is None or source is None else (into, source)
            if not _in_arena(calls):
                self._moves.pass_staged(taken, gift, total)
            elif taken is not None:
                views = self._views(calls, torch.uint8, [total] * self.size)
                self._moves.take_direct([taken[0]], [views[taken[1]]])
            else:
                self.flags.sync()

        return self.start(work, into, gift)

    def _bytes(self, name: str, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else flat(name, tensor, self.device_type).view(torch.uint8)

    def _call(self, kind: str, tensor: Tensor, wired: torch.dtype, how: str = "") -> ShmCall:
        """Return a call about a tensor of all ranks; where the wire rounds, stages are used."""
        text = f"{kind} {how} of {tensor.numel()} {tensor.dtype} as {wired}"
        is_same = wired == tensor.dtype
        return ShmCall(text=text, offset=self.arena.offset_of(tensor) if is_same else None)

    def _count(self, kind: str, length: int, dtype: torch.dtype, root: int = 0) -> None:
        rank = (self.rank - root) % self.size
        self.sent_bytes += payload_bytes(kind, length, dtype.itemsize, size=self.size, rank=rank)

    def _views(
        self, calls: Sequence[ShmCall], dtype: torch.dtype, lengths: Sequence[int]
    ) -> list[Tensor]:
        """Return the tensors of all ranks where their calls say that they are."""
        facts = zip(self.ranks, calls, lengths, strict=True)
        return [self.arena.at(rank, call.offset or 0, n, dtype) for rank, call, n in facts]

    def _neighbour(self, by: int, wrap: bool) -> int | None:
        other = self.rank + by
        if wrap:
            return other % self.size
        return other if 0 <= other < self.size else None

    # -- what a caller can get wrong ---------------------------------------------------------

    def _check_rank(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise OptionError(f"no root {root}: axis {self.axis!r} has {self.size} ranks, from 0")

    def _check_pairs(self, calls: Sequence[ShmCall], out_counts: Sequence[int]) -> None:
        for peer, call in enumerate(calls):
            if call.counts[self.rank] != out_counts[peer]:
                raise OptionError(
                    f"all_to_all: rank {peer} gives {call.counts[self.rank]} elements to rank "
                    f"{self.rank}, which waits for {out_counts[peer]}; both must say the same"
                )


_ANY_LENGTH = -1


def _in_arena(calls: Sequence[ShmCall]) -> bool:
    return all(call.offset is not None for call in calls)


def _common_length(text: str, calls: Sequence[ShmCall]) -> int:
    said = {call.counts[0]: rank for rank, call in enumerate(calls) if call.counts[0] >= 0}
    if len(said) > 1:
        (first, rank), (second, other) = list(said.items())[:2]
        raise OptionError(f"{text}: rank {rank} has {first} bytes, rank {other} {second}")
    return next(iter(said), 0)
