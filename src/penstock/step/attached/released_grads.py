"""Gradients whose memory is given back when they have been scattered.

What is left of one is its part of a sum, on the rank that has its slice. A gradient that comes
later in the same step has memory of its own until `step`, where it is sent and added: nobody waits
in backward for ranks that may be waiting for a round. One that is thrown away after it was sent
takes its sum along, if all ranks that had one do the same: nobody can take a part out again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from penstock.errors import StateError
from penstock.step.attached.blocks import ParameterBlock
from penstock.step.attached.flow import FlowBucket
from penstock.step.attached.grads import Grads
from penstock.step.attached.guarded_grads import ReleasedGrad, released_grad
from penstock.step.attached.reshard import Rounds
from penstock.step.attached.step_exchange import StepMessage, exchange
from penstock.step.comms.comm import Comm

__all__ = ["ReleasedGrads"]

Part = tuple[FlowBucket, int]
"""The part of a parameter, by number, that lies in a bucket."""


class ReleasedGrads(Grads):
    """Gradients with memory from backward until they are scattered."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        views: Sequence[torch.Tensor],
        flow: Rounds,
        read: Callable[[int], None],
    ) -> None:
        super().__init__(params, views, flow, read)
        self._rounds = flow
        pairs = [(each, number) for each in flow.buckets for number in each.params]
        self._places = {pair: place for place, pair in enumerate(pairs)}
        self._void: set[Part] = set()
        """Thrown away after they were sent."""
        self._later: set[int] = set()
        """Come again after they were sent."""
        self._with_room: dict[ParameterBlock, None] = {}
        self._over: set[ParameterBlock] = set()
        """With room for gradients of a step that is over."""
        self._gone = [released_grad(param) for param in params]
        flow.also_reap = self._reap

    def before(self, number: int) -> None:
        """See what becomes of a gradient that was sent when another comes."""
        if not self._rounds.is_sent(number):
            super().before(number)
            return
        param = self.params[number]
        if not _will_change(param):
            return
        if param.grad is None:
            self._throw_away(number)
        elif isinstance(param.grad, ReleasedGrad):
            if param.grad.is_zero:
                self._throw_away(number)
            param.grad = None
        elif self._is_changed(number):  # as by setting it to zero; it holds, not what was sent
            self._throw_away(number)
            with torch._C.DisableTorchFunctionSubclass():
                param.grad = param.grad.clone(memory_format=torch.preserve_format)
        elif self.is_home(number):
            param.grad = None
        elif number not in self._later:  # one that the user has put there
            self._throw_away(number)
        self._later.add(number)

    def after(self, number: int, *, is_accumulating: bool) -> None:
        """Take note of a gradient; where it was the last of a block, its weights go."""
        if number not in self._later:
            super().after(number, is_accumulating=is_accumulating)
        self._rounds.graded(number)
        self._rounds.reap()

    def is_home(self, number: int) -> bool:
        """Whether a gradient is in its arena."""
        return not isinstance(self.params[number].grad, ReleasedGrad) and super().is_home(number)

    def make_room(self, number: int) -> None:
        """Take memory for a gradient."""
        block = self._rounds.block_of[number]
        self._over.discard(block)
        self._with_room.setdefault(block)
        block.make_room()

    def bring_the_rest(self) -> None:
        """Put into arenas what no hook has; where there is no gradient, zeros."""
        for number, param in enumerate(self.params):
            if isinstance(param.grad, ReleasedGrad):
                if param.grad.is_zero:
                    param.grad.is_zero = False
                    self._throw_away(number)
                    self.flow.dirty.add(number)
            elif param.grad is None:
                self.bring_nothing(number)
            elif self.is_home(number):
                self.check(number)
            elif not self._rounds.is_sent(number):
                self.bring(number)
            elif number not in self._later:
                self._throw_away(number)
                self._later.add(number)

    def bring_nothing(self, number: int) -> None:
        """Put zeros where a gradient would be, unless one is on its way already."""
        if self._rounds.is_sent(number) and number in self.filled:
            self.filled.discard(number)
            self._throw_away(number)
            self.flow.dirty.add(number)
        if not self._rounds.is_sent(number):
            self.make_room(number)
            self.flow.hold(number)
            self.views[number].zero_()

    def _bring_later(self) -> None:
        """Put into arenas what has come after it was sent; all ranks have sent by now."""
        for number in sorted(self._later):
            grad = self.params[number].grad
            if grad is not None and not isinstance(grad, ReleasedGrad):
                self._with_room.setdefault(self._rounds.block_of[number])
                self._rounds.clear_sent(self._rounds.block_of[number])
                self.bring(number)
        self._later.clear()

    def agree(self, control: Comm, mine: StepMessage) -> set[int]:
        """Return the parameters with a gradient on any rank; send what has come later."""
        self._rounds.meet("step")
        self._bring_later()
        kept = {
            self._places[bucket, number]
            for number in self.filled
            for bucket in self.flow.of_param[number]
            if (bucket, number) not in self._void
        }
        void = {self._places[part] for part in self._void}
        numbers, places, dirty = range(len(self.params)), range(len(self._places)), self.flow.dirty
        rows = [
            [param.grad is not None for param in self.params],
            [number in dirty for number in numbers],
            [place in void for place in places],
            [place in kept for place in places],
        ]
        used, dirty, void, kept = exchange(control, mine, rows)
        parts = list(self._places)
        for place in sorted(void & kept):
            self._refuse(parts[place][1])
        self._rounds.void = {parts[place] for place in void}
        if dirty:
            self.send_again(dirty)
        return used

    def clipped(self) -> None:
        """Leave it: what comes later is added to sums as they are."""

    def _refuse(self, number: int) -> None:
        raise StateError(
            f"the gradient of parameter {number} of shape {tuple(self.params[number].shape)} "
            "was sent and then thrown away on some ranks and not on others; with reshard=True "
            "no rank can take its own back: throw gradients away on all ranks, or run backward "
            "in attached.accumulate()"
        )

    def clear(self) -> None:
        """Forget the gradients of a step that is over."""
        super().clear()
        self._void.clear()
        self._later.clear()
        # Also those with room for what other ranks have sent again.
        self._with_room = {block: None for block in self._rounds.blocks if block.has_room}
        self._over.update(self._with_room)
        self._reap()

    def _is_changed(self, number: int) -> bool:
        return self.is_home(number) and self.views[number]._version != self._versions[number]

    def _throw_away(self, number: int) -> None:
        for bucket in self.flow.of_param[number]:
            if bucket.is_issued:
                self._void.add((bucket, number))
            elif self._rounds.block_of[number].has_room:
                bucket.grads[slice(*bucket.places[number])].zero_()

    def _reap(self) -> None:
        """Give memory back of what has been scattered."""
        over = [block for block in self._with_room if block in self._over]
        sent = [block for block in self._with_room if block not in self._over]
        sent = [block for block in sent if self._is_sent(block)]
        spare = sent[: max(0, len(sent) - self._rounds.num_rooms_kept)]
        for blocks, is_over in ((over, True), (spare, False)):
            for block in blocks:
                if self._rounds.is_scattered(block, is_over=is_over) and not any(
                    self._is_changed(number) for number in block.numbers
                ):
                    self._give_back(block)

    def _is_sent(self, block: ParameterBlock) -> bool:
        is_sent = all(bucket.is_issued for bucket in block.buckets)
        return is_sent and not self._rounds.is_cleared(block)

    def _give_back(self, block: ParameterBlock) -> None:
        for number in block.numbers:
            if self.is_home(number):
                self._gone[number].is_zero = False
                self.params[number].grad = self._gone[number]
        self._over.discard(block)
        del self._with_room[block]
        block.give_room_back()


def _will_change(param: torch.Tensor) -> bool:
    """Whether autograd will add to a parameter's gradient, and not only return one."""
    with torch._C.DisableTorchFunctionSubclass():
        node = torch.autograd.graph.get_gradient_edge(param).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # what torch says of parameters in torch.autograd.grad
        return False
