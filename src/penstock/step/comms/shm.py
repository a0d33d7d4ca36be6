"""Communication through shared memory, between ranks of one host.

    with HostArena(meeting(), rank=rank, size=2, size_bytes="256MB") as arena:
        with ShmComm(arena, axis="dp") as comm:
            comm.all_reduce(grad).wait()

Any tensor will do: what is not in the arena passes through stages there, in small chunks
(`shm_moves`). Tensors that live in the arena on all ranks are not copied: a reduction reads the
peers' memory and writes its result into it.

Every collective starts with all ranks publishing what they call, and with what (`shm_calls`): if
sizes, types or operations differ, all ranks raise an error that names both calls, instead of
hanging or computing nonsense. Collectives are carried out one after the other by a thread of the
communicator's own, or by a caller that waits for one (`shm_lane`).

Reductions add in the order of the ranks; results are the same bits on all of them. With
`wire="bf16"` what passes the stages is rounded to bf16, and an all_reduce rounds once more on the
way back, as it would over a network. `algo` is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from penstock.errors import OptionError
from penstock.step.comms.comm import Collective, Comm
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
"""Of each of the two stages: half of a common second-level cache."""
_ANY_LENGTH = -1
"""What a rank says that neither gives nor gets anything."""


class ShmComm(Comm):
    """A `Comm` for ranks of one host. All ranks make it, and call it, in the same order.

    Args:
        arena: what the ranks share; all of them take the stages from it here.
        axis: the mesh axis it is for.
        stage_bytes: of each of two stages.
        timeout_s: how long to wait for a rank that lives but does not come; by default as long as
            the default process group does.
    """

    def __init__(
        self,
        arena: Segments,
        *,
        axis: str = "dp",
        stage_bytes: int = STAGE_BYTES,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__(axis, rank=arena.rank, size=arena.size)
        self.arena = arena
        host = arena.host
        words = host.take(LINE_WORDS + Calls.words_of(self.size), torch.int64)
        stages = [arena.take(stage_bytes, torch.uint8) for _ in range(2)]
        offset = host.offset_of(words)
        assert offset is not None
        self.flags = self._flags(offset, timeout_s or default_timeout_s())
        self._calls = Calls(host, offset + 8 * LINE_WORDS, self.flags)
        by_turn = [self.everyones(stage) for stage in stages]
        self._moves = Moves(self.rank, by_turn, self.flags)
        self._lane = ShmLane(f"penstock-shm-{axis}", self.flags.fail)
        self._is_closed = False

    def _flags(self, offset: int, timeout_s: float) -> Flags:
        return Flags(self.arena.host, offset, timeout_s=timeout_s)

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
            # The lane first: its operations use the calls, the stages and the flags.
            self._lane.close()
            self._calls.close()
            self._moves.close()
            self.flags.close()

    def start(self, work: Callable[[], None], *tensors: Tensor | None) -> ShmTask:
        """Run something in the lane, after all that was called before; it may use `flags`.

        The tensors are those that it works on. They matter on a device, where the memory of a
        tensor that nobody holds any more may be reused before the work on it is done.
        """
        assert not self._is_closed, f"the communicator of axis {self.axis!r} is closed"
        return self._lane.start(work)

    def meet(self, text: str) -> None:
        """Wait, inside the lane, until all ranks have come with the same text."""
        self._calls.agree(ShmCall(text=text))

    def everyones(self, tensor: Tensor) -> list[Tensor]:
        """Return what each rank took from the arena in the place of this tensor, by rank."""
        return [self.arena.of(tensor, rank=rank) for rank in range(self.size)]

    def barrier(self) -> None:
        """Return when all ranks have come here and everything begun on this lane is done."""
        self.start(lambda: self.meet("barrier")).wait()

    def begin(self, collective: Collective) -> ShmTask:
        """Begin a collective: say what it is to all ranks, then move what belongs to this one."""
        call = self._call(collective)
        move = _MOVES[collective.kind]
        self._sent_bytes += collective.sent_bytes(self.rank, self.size)

        def work() -> None:
            move(self, collective, self._calls.agree(call))

        return self.start(work, collective.out, collective.tensor)

    def _call(self, collective: Collective) -> ShmCall:
        """Return what this rank says of a collective to the others."""
        kind, op, sent = collective.kind, collective.op, collective.sent
        # The row that peers read, or for an all_gather write; they find it by its offset.
        row = collective.out if kind == "all_gather" else collective.tensor
        counts = tuple(collective.counts)
        if kind == "all_to_all":
            text = f"all_to_all of {sent}"
        elif kind in ("broadcast", "shift"):
            text = f"broadcast from {collective.root}" if kind == "broadcast" else f"shift {op}"
            rows = [one for one in (collective.tensor, collective.out) if one is not None]
            counts = (rows[0].nbytes if rows else _ANY_LENGTH,) * self.size
            row = None if kind == "broadcast" and self.rank != collective.root else row
        else:
            op = f"{op} to {collective.root}" if kind == "reduce" else op
            text = f"{kind} {op} of {collective.length} {collective.dtype} as {sent}"
        # Where the wire rounds, stages are used. A rank that gives nothing is not read from: any
        # place will do.
        offset = 0 if row is None else self.arena.offset_of(row)
        is_rounded = sent != collective.dtype
        return ShmCall(text=text, offset=None if is_rounded else offset, counts=counts)

    # -- one method for each kind, run in the lane -------------------------------------------

    def _all_reduce(self, collective: Collective, calls: Sequence[ShmCall]) -> None:
        row, sent = collective.whole, collective.sent
        reducer = Reducer(collective.op, row.dtype)
        if _are_in_arena(calls):
            self._moves.reduce_direct(self._views(calls, row), reducer)
        elif self.size == 2 and sent == row.dtype:
            self._moves.reduce_whole(row, reducer)
        else:
            self._moves.reduce_staged(row, reducer, sent)

    def _reduce_scatter(self, collective: Collective, calls: Sequence[ShmCall]) -> None:
        row, out = collective.whole, collective.out
        assert out is not None
        reducer = Reducer(collective.op, row.dtype)
        if _are_in_arena(calls):
            self._moves.scatter_direct(out, self._views(calls, row), reducer)
        else:
            self._moves.scatter_staged(out, row, reducer, collective.sent)

    def _all_gather(self, collective: Collective, calls: Sequence[ShmCall]) -> None:
        row, mine = collective.whole, collective.tensor
        assert mine is not None
        if _are_in_arena(calls):
            self._moves.give_direct(self._views(calls, row), mine)
        else:
            self._moves.gather_staged(row, mine, collective.sent)

    def _reduce(self, collective: Collective, calls: Sequence[ShmCall]) -> None:
        row, root = collective.whole, collective.root
        reducer = Reducer(collective.op, row.dtype)
        if not _are_in_arena(calls):
            self._moves.reduce_whole(row, reducer, root)
            return
        if self.rank == root:
            reducer(row, self._views(calls, row))
        self.flags.sync()

    def _all_to_all(self, collective: Collective, calls: Sequence[ShmCall]) -> None:
        tensor, out, out_counts = collective.tensor, collective.out, collective.out_counts
        assert tensor is not None
        assert out is not None
        self._check_pairs(calls, out_counts)
        if _are_in_arena(calls):
            views = []
            for rank, call in enumerate(calls):
                whole = self.arena.at(rank, call.offset or 0, sum(call.counts), tensor.dtype)
                start, stop = spans_of(call.counts)[self.rank]
                views.append(whole[start:stop])
            self._moves.take_direct(list(collective.receipts().values()), views)
        else:
            most = max(max(call.counts) for call in calls)
            counts = collective.counts
            self._moves.exchange_staged(
                out, tensor, counts=counts, out_counts=out_counts, most=most
            )

    def _broadcast(self, collective: Collective, calls: Sequence[ShmCall]) -> None:
        row, root = collective.whole.view(torch.uint8), collective.root
        if self.rank == root:
            self._pass(calls, gift=row, taken=None, text=collective.kind)
        else:
            self._pass(calls, gift=None, taken=(row, root), text=collective.kind)

    def _shift(self, collective: Collective, calls: Sequence[ShmCall]) -> None:
        gift = next(iter(collective.sends().values()), None)
        taken = [(out.view(torch.uint8), peer) for peer, out in collective.receipts().items()]
        self._pass(
            calls,
            gift=None if gift is None else gift.view(torch.uint8),
            taken=taken[0] if taken else None,
            text=f"shift {collective.op}",
        )

    def _pass(
        self,
        calls: Sequence[ShmCall],
        *,
        gift: Tensor | None,
        taken: tuple[Tensor, int] | None,
        text: str,
    ) -> None:
        """Give a row of bytes and take that of another rank, either of which may be nothing.

        A rank that has neither goes along with the others all the same: each chunk is a meeting.
        """
        total = _common_length(text, calls)
        if not _are_in_arena(calls):
            self._moves.pass_staged(taken, gift, total)
        elif taken is not None:
            into, source = taken
            view = self.arena.at(source, calls[source].offset or 0, total, torch.uint8)
            self._moves.take_direct([into], [view])
        else:
            self.flags.sync()

    def _views(self, calls: Sequence[ShmCall], row: Tensor) -> list[Tensor]:
        """Return the rows of all ranks where their calls say that they are."""
        return [
            self.arena.at(rank, call.offset or 0, row.numel(), row.dtype)
            for rank, call in enumerate(calls)
        ]

    def _check_pairs(self, calls: Sequence[ShmCall], out_counts: Sequence[int]) -> None:
        for peer, call in enumerate(calls):
            if call.counts[self.rank] != out_counts[peer]:
                raise OptionError(
                    f"all_to_all: rank {peer} gives {call.counts[self.rank]} elements to rank "
                    f"{self.rank}, which waits for {out_counts[peer]}; both must say the same"
                )


_MOVES: dict[str, Callable[[ShmComm, Collective, Sequence[ShmCall]], None]] = {
    "all_reduce": ShmComm._all_reduce,
    "reduce_scatter": ShmComm._reduce_scatter,
    "all_gather": ShmComm._all_gather,
    "all_to_all": ShmComm._all_to_all,
    "reduce": ShmComm._reduce,
    "broadcast": ShmComm._broadcast,
    "shift": ShmComm._shift,
}


def _are_in_arena(calls: Sequence[ShmCall]) -> bool:
    return all(call.offset is not None for call in calls)


def _common_length(text: str, calls: Sequence[ShmCall]) -> int:
    lengths = {call.counts[0]: rank for rank, call in enumerate(calls) if call.counts[0] >= 0}
    if len(lengths) > 1:
        (first, rank), (second, other) = list(lengths.items())[:2]
        raise OptionError(f"{text}: rank {rank} has {first} bytes, rank {other} {second}")
    return next(iter(lengths), 0)
