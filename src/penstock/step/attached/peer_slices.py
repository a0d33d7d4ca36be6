"""Slices of other ranks, for a rank that saves alone.

`if rank == 0: torch.save(optimizer.state_dict(), ...)` is how people save, and the others go on
meanwhile, to the next forward or to a barrier. So the rank that saves asks for slices, and a thread
of each other rank answers. Between two steps slices stay as they are: no update begins before the
gradients of all ranks have come, and the rank that asks has not made its own. `changes` counts the
changes of slices, on all ranks alike, so an answer waits until its rank has come as far.

A process that ends stays until no other rank can want its slices any more: the others have ended
as well, or gone on to their next step, which then fails at once because a rank is gone.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch

from penstock.errors import PeerError, PenstockError, StateError
from penstock.step.attached.flow import BucketFlow
from penstock.step.attached.share import Share
from penstock.step.attached.streams import StreamFlow
from penstock.step.comms.answers import Answers, AskedRank
from penstock.step.comms.comm import Comm
from penstock.step.comms.shm_memory import Meet

__all__ = ["Gather", "PeerSlices"]

STAY_S = 30.0
"""How long a process that ends stays for others that may save."""
_LEAVE = -1
"""Asked for instead of a share by a rank that wants to leave."""
Gather = Callable[[Share, str | None], torch.Tensor]
"""Returns all ranks' slices of a state, or of the weights, in a row as they lie in the arena."""


class PeerSlices:
    """The slices of all ranks; each opens it, and any may gather.

    Args:
        shares: of this rank; others have the same, with other values.
        flow: what updates them.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        flow: BucketFlow,
        comm: Comm,
        *,
        timeout_s: float,
    ) -> None:
        self._shares, self._rank, self._size = shares, comm.rank, comm.size
        self._flow, self._timeout_s = flow, timeout_s
        self._changes = 0
        self._is_going_on = self._is_over = False
        """Whether this rank makes for a step, or for the end of its program."""
        self._changed = threading.Condition()
        # The thread must not keep a model alive that nobody has any more.
        answer = weakref.WeakMethod(self._answer)
        self._answers = Answers(partial(_answered, answer), rank=comm.rank, timeout_s=timeout_s)
        self._end = weakref.finalize(self, self._answers.close)
        self._end.atexit = False  # `leave` comes first

    def open(self, meet: Meet) -> None:
        """Begin to answer; all ranks come here together."""
        if self._size > 1:
            self._answers.open(meet)

    def close(self) -> None:
        """Answer no more."""
        self._end()

    def count_change(self) -> None:
        """Say that slices have changed, or will have when the last step's update is over."""
        with self._changed:
            self._changes += 1
            self._is_going_on = False
            self._changed.notify_all()

    def go_on(self) -> None:
        """Say that this rank saves no more before the next change."""
        with self._changed:
            self._is_going_on = True
            self._changed.notify_all()

    def leave(self) -> None:
        """Return when no other rank needs slices of this one, or some time later."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        question = (self._changes, _LEAVE, 0, self._rank)
        end_s = time.monotonic() + STAY_S
        for rank in range(self._size):
            left_s = end_s - time.monotonic()
            if rank != self._rank and left_s > 0:
                with suppress(PenstockError), self._answers.asking(rank, left_s) as peer:
                    peer.ask(question, torch.empty(0))

    @contextmanager
    def gathering(self) -> Iterator[Gather]:
        """Give what gathers slices as they are now.

        Raises:
            PeerError: another rank does not answer.
        """
        with _advised(), ExitStack() as stack:
            # Each begins with its neighbour, so that not all ask the same one.
            order = [(self._rank + by) % self._size for by in range(1, self._size)]
            peers: dict[int, AskedRank] = {}

            def gather(share: Share, name: str | None) -> torch.Tensor:
                place = self._shares.index(share)
                number = -1 if name is None else sorted(share.states).index(name)
                mine = self._slices_of(share, number)
                question = (self._changes, place, number, self._rank)
                parts = {self._rank: mine}
                for rank in order:
                    if rank not in peers:
                        peers[rank] = stack.enter_context(self._answers.asking(rank))
                    theirs = torch.empty_like(mine, device="cpu")
                    peers[rank].ask(question, theirs)
                    parts[rank] = theirs.to(mine.device)
                return share.put_together([parts[rank] for rank in range(self._size)])

            yield gather

    @torch.no_grad()
    def _answer(self, question: Sequence[int]) -> torch.Tensor:
        changes, place, number, asks = question
        if place == _LEAVE:
            with self._changed:
                self._changed.wait_for(lambda: self._may_leave(changes), STAY_S)
            return torch.empty(0)
        with self._changed:
            self._changed.wait_for(lambda: self._changes >= changes, self._timeout_s)
            if self._changes != changes:
                raise StateError(
                    f"slices of this rank have changed {self._changes} times, those of rank "
                    f"{asks}, which saves, {changes} times: some ranks have loaded a state and "
                    "others have not; load on all ranks before one of them saves"
                )
        share = self._shares[place]
        if not isinstance(self._flow, StreamFlow):
            return self._slices_of(share, number)
        device = share.arena.data.device
        # A stream of its own: the host has to wait for it, and for nothing that came later.
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            return self._slices_of(share, number).cpu()

    def _slices_of(self, share: Share, number: int) -> torch.Tensor:
        """Return slices of this rank after the update of the last step."""
        if isinstance(self._flow, StreamFlow):
            self._flow.follow(share.reduced)
        else:
            # Not what rounds gather as well: that may be waiting for ranks that are elsewhere.
            self._flow.wait(self._flow.buckets)
        # By now all ranks have the same states: the first step makes them.
        return share.slices_of(None if number < 0 else sorted(share.states)[number])

    def _may_leave(self, changes: int) -> bool:
        if self._changes == changes:
            return self._is_going_on or self._is_over
        return self._changes > changes


@contextmanager
def _advised() -> Iterator[None]:
    """Say what to do where a rank has gone."""
    try:
        yield
    except PeerError as error:
        error.add_note(
            "what is saved is in slices on all ranks, and each gives its own as long as its "
            "program runs and it is attached: have the others wait until it is saved, as in "
            "torch.distributed.barrier(), before they end or call attached.close()"
        )
        raise


def _answered(answer: weakref.WeakMethod[Any], question: Sequence[int]) -> torch.Tensor:
    here = answer()
    if here is None:
        raise StateError("its model is gone")
    found: torch.Tensor = here(question)
    return found
