"""Weights in slices: whole ones are there while a module runs, forward or backward.

    step ─► first blocks ─► forward: use, release, look ahead ─► backward: the same, the other way
            gathered            one gather of each block          a second gather of most blocks

Gathers are collectives, so all ranks begin them in one order, in rounds:

1. A round gathers all blocks in the order of forward and then, if any rank wants gradients, those
   that backward reads, in its order. Blocks that backward begins with stay, and are gathered once.
2. A rank that needs a block begins all gathers of the round up to it. In its `step` it begins those
   that are left.
3. A rank that needs a block whose turn is over begins another round.
4. Ranks agree on the number of rounds of a step by a small all-reduce on the control lane: a rank
   that begins a round announces it and goes on; a rank that comes to `step` asks whether others
   have begun one, joins in, and asks again. A rank that reads whole weights does so, too.

So evaluations, several backwards, and errors that only some ranks have met keep the lanes in order,
however many of them a rank makes.

Each rank decides by itself what it releases: by how often the first step has called the modules of
a block, and by which gradients have come. A wrong guess costs memory or a gather, never a value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.errors import PeerError, StateError
from penstock.step.attached.blocks import ParameterBlock
from penstock.step.attached.flow import BucketFlow, FlowBucket, FlowPlan
from penstock.step.attached.released_params import is_in_backward
from penstock.step.attached.share import Share

__all__ = ["AHEAD", "Rounds", "ordinary"]

AHEAD = 2
"""Blocks under way while one is used: the wire has work, and memory holds a few of many."""
_DONE, _FORWARD, _BOTH = 0, 1, 2
"""What a rank wants of a round. A round does the maximum over ranks."""
MEETINGS = ("whole", "state", "step")
"""Reasons to meet. A rank may ask for whole weights alone; all ranks come for the other two."""


class _Saved(NamedTuple):
    """A tensor that autograd keeps for backward; without its history, which would keep itself."""

    tensor: torch.Tensor
    version: int
    block: ParameterBlock | None


class Rounds(BucketFlow):
    """A flow whose weights are gathered when they are used, and released after that."""

    num_rooms_kept = 0
    """Blocks whose gradients keep their memory a while after they were sent."""

    def __init__(self, plan: FlowPlan) -> None:
        super().__init__(plan)
        self.blocks: list[ParameterBlock] = []
        """All blocks, in the order of forward."""
        self.block_of: dict[int, ParameterBlock] = {}
        """The block of each parameter, by number."""
        self.wanted: dict[nn.Module, frozenset[int]] = {}
        """Parameters that modules use, by number."""
        self._back: list[ParameterBlock] = []
        self._again: list[ParameterBlock] = []
        """Blocks that a round gathers a second time, in the order of backward."""
        self.also_reap: Callable[[], None] = lambda: None
        self.also_begin: Callable[[], None] = lambda: None
        """Called when a model begins to run for a step."""
        self._by_storage: dict[int, ParameterBlock] = {}
        self._at_first = self._at_again = 0
        self._want_first = self._want_again = 0
        self._wish = _DONE
        self._was_back = False
        """Whether this rank has run any backward with weights in slices."""
        self._wishes = torch.zeros(1)
        self._asked: Any = None
        self._running: list[nn.Module] = []
        self._saving: Any = None
        self._num_pins = 0
        self._cleared: set[FlowBucket] = set()
        """Sent already in this step, with room for gradients that came later."""
        self.void: set[tuple[FlowBucket, int]] = set()
        """Parts of parameters, by number, that were sent and then thrown away on all ranks."""

    def block(self, share: Share, buckets: Sequence[FlowBucket], params: Any) -> ParameterBlock:
        """Return a block of a share's buckets and parameters."""
        return ParameterBlock(share, buckets, params, self.fetch)

    def begin(self, blocks: Sequence[ParameterBlock], back: Sequence[ParameterBlock]) -> None:
        """Take these blocks, in the orders of forward and backward; release all."""
        self.blocks = list(blocks)
        for number, block in enumerate(blocks):
            block.number = number
            self._by_storage[block.data._cdata] = block
            self.block_of.update(dict.fromkeys(block.numbers, block))
        for place, block in enumerate(back):
            block.place_back = place
            # Backward would look ahead as far at once: they need no more memory than that.
            block.is_kept = place <= AHEAD
        self._back = [block for block in back if not block.is_kept]
        self._again = list(self._back)
        for block in blocks:
            block.is_here = True
            block.release()
            block.give_room_back()
        self._begin_round()

    # -- rounds ------------------------------------------------------------------------------

    def demand(self, block: ParameterBlock) -> None:
        """Return when the weights of a block are there; look ahead."""
        if self._num_pins and block.is_here:
            block.arrive()
            return
        is_back = is_in_backward()
        wish = _BOTH if is_back or torch.is_grad_enabled() else _FORWARD
        if torch.is_inference_mode_enabled():
            with ordinary():
                self._demand(block, wish, is_back=is_back)
        else:
            self._demand(block, wish, is_back=is_back)

    def _demand(self, block: ParameterBlock, wish: int, *, is_back: bool) -> None:
        if self._wish == _DONE:
            self._ask(wish)
        block.is_unwanted = False
        if not block.is_here:
            self._reach(block, wish)
        block.was_needed_back |= is_back
        self._look_ahead(block, is_back=is_back)
        try:
            block.arrive()
        except PeerError as error:
            error.add_note(
                "with reshard=True all ranks take part in every forward, or catch up in `step`; "
                "where some evaluate more often, call attached.synchronize() on all ranks before "
                "they wait for each other in a collective"
            )
            raise

    def _reach(self, block: ParameterBlock, wish: int) -> None:
        with self._gather_turn:  # a lane's thread gathers as well
            is_here, has_had_turn = block.is_here, self._at_first > block.number
        if is_here:
            return
        if has_had_turn and self._wish == _BOTH and block in self._again[self._at_again :]:
            self._go_again(self._again.index(block) + 1)
            return
        if has_had_turn:
            self._end_round()
            self._ask(wish)
        self._go_first(block.number + 1)

    def _look_ahead(self, block: ParameterBlock, *, is_back: bool) -> None:
        if is_back and self._wish == _BOTH and self._at_first == len(self.blocks):
            far = block.place_back + AHEAD
            count = sum(each.place_back <= far for each in self._again)
            self._want_again = max(self._want_again, count)
        elif not is_back:
            far = min(len(self.blocks), block.number + 1 + AHEAD)
            self._want_first = max(self._want_first, far)
        self._pump_gathers()

    def _go_first(self, count: int) -> None:
        """Gather the first `count` blocks of this round."""
        self._want_first = max(self._want_first, count)
        for block in self.blocks[self._at_first : count]:
            self.wait(block.buckets)
        self._pump_gathers()
        assert self._at_first >= count

    def _go_again(self, count: int) -> None:
        self._go_first(len(self.blocks))
        self._want_again = max(self._want_again, count)
        self._pump_gathers()
        assert self._at_again >= count

    def _pump_gathers(self) -> None:
        """Begin the gathers that are wanted and have their turn."""
        with self._gather_turn:
            while self._at_first < self._want_first:
                block = self.blocks[self._at_first]
                with self._lock:
                    is_new = all(p.is_updated or p.settled.is_set() for p in block.buckets)
                if not is_new:
                    return
                self._at_first += 1
                block.gather(self._lanes.gather, self._wire)
            while self._at_first == len(self.blocks) and self._at_again < self._want_again:
                block = self._again[self._at_again]
                self._at_again += 1
                block.gather(self._lanes.gather, self._wire)
                block.is_again = True

    def _ask(self, wish: int, meeting: str | None = None) -> None:
        """Say what this rank wants of the round; what all want is known some time later."""
        self._wish = wish
        self._wishes = torch.zeros(1 + len(MEETINGS) + len(self.blocks) + 1)
        self._wishes[0] = wish
        if meeting is not None:
            self._wishes[1 + MEETINGS.index(meeting)] = 1
        if meeting == "step":
            needed = [float(each.was_needed_back) for each in self.blocks]
            self._wishes[1 + len(MEETINGS) :] = torch.tensor([*needed, float(self._was_back)])
        self._asked = self._lanes.control.all_reduce(self._wishes, op="max")

    def _end_round(self) -> None:
        """Join in what is left of a round that any rank has begun."""
        before = [block for block in self.blocks if block.is_here and not block.is_unwanted]
        # Before any question is waited for: others may wait for these.
        self._go_first(len(self.blocks))
        if self._wish != _BOTH:
            self._asked.wait()
        if max(self._wish, int(self._wishes[0])) == _BOTH:
            self._go_again(len(self._again))
        for block in self.blocks:
            block.is_unwanted = block.is_here and block not in before
        self._begin_round()

    def _begin_round(self) -> None:
        self._at_first = self._at_again = self._want_first = self._want_again = 0
        self._wish = _DONE
        for block in self.blocks:
            block.calls_left = block.calls
            block.ungraded = set(block.graded)

    def meet(self, meeting: str) -> None:
        """End all rounds, all ranks together; a step knows better then what backward needs."""
        with ordinary():
            said = self._meet(meeting)
        if meeting == "step":
            self._running.clear()  # of a forward that an interrupt has left
            self._unwatch_saved()
            *needed, was_back = said[len(MEETINGS) :]
            if was_back:  # and read none of them, it may be, as under autocast
                self._again = [each for each in self._back if needed[each.number]]
            for block in self.blocks:
                if block.is_here:
                    block.release()
            self._begin_round()

    def end_rounds(self) -> None:
        """End rounds, with all ranks that want the same; others come to it at their step."""
        if not self._num_pins and not self._running and not is_in_backward():
            self.meet("whole")

    def _meet(self, meeting: str) -> list[float]:
        while True:
            if self._wish != _DONE:
                self._end_round()
            self._ask(_DONE, meeting)
            self._asked.wait()
            wish, *said = self._wishes.tolist()
            if wish != _DONE:
                self._wish = int(wish)
                self.reap()
                continue
            for_whole, for_state, for_step, *_ = said
            if for_state and for_step:
                raise StateError(
                    "some ranks call attached.close(), load a state, or save with "
                    "torch.distributed.checkpoint, while others make a step; all ranks do these "
                    "together"
                )
            # Who wants whole weights is about to begin a round.
            if meeting == "whole" or not for_whole:
                return said

    # -- gradients ---------------------------------------------------------------------------

    def is_sent(self, number: int) -> bool:
        """Whether any of a parameter's gradient is on its way in this step."""
        return any(bucket.is_issued for bucket in self.of_param[number])

    def clear_sent(self, block: ParameterBlock) -> None:
        """Put zeros where gradients were sent from: what comes later is added to their sums."""
        sent = [each for each in block.buckets if each.is_issued and each not in self._cleared]
        if not block.has_room:
            block.make_room()
            sent = []
        for bucket in sent:
            assert bucket.scattered is not None
            bucket.scattered.wait()
            bucket.grads.zero_()
        self._cleared.update(each for each in block.buckets if each.is_issued)

    def is_scattered(self, block: ParameterBlock, *, is_over: bool) -> bool:
        """Whether nothing reads a block's gradients any more, of this step or of one before."""
        handles = [bucket.scattered for bucket in block.buckets]
        return all(handle is None or handle.is_done() for handle in handles)

    def is_cleared(self, block: ParameterBlock) -> bool:
        """Whether gradients have come after some were sent."""
        return not self._cleared.isdisjoint(block.buckets)

    def send_again(self, params: set[int]) -> None:
        """Send what has come after the gradients of some parameters were sent, and add it."""
        again = [bucket for bucket in self._scatters if params.intersection(bucket.params)]
        self.wait_reduced(again)
        for block in {self.block_of[number] for bucket in again for number in bucket.params}:
            self.clear_sent(block)
        earlier = []
        for bucket in again:
            earlier.append(bucket.reduced.clone())
            for number, start, stop in bucket.segments:
                if (bucket, number) in self.void:
                    earlier[-1][start:stop].zero_()
        with self._scatter_turn:
            for bucket in again:
                bucket.is_reduced = False
                self._scatter(bucket)
        self.wait_reduced(again)
        for bucket, sums in zip(again, earlier, strict=True):
            bucket.reduced.add_(sums)
        self._follow(again)

    # -- step --------------------------------------------------------------------------------

    def go(self, update: Callable[[FlowBucket], None], skipped: set[int]) -> None:
        """Update each bucket as soon as it is reduced; the first blocks are gathered at once."""
        self._want_first = min(1 + AHEAD, len(self.blocks))
        self._cleared.clear()
        super().go(update, skipped)

    def _go_on_from(self, bucket: FlowBucket) -> None:
        super()._go_on_from(bucket)
        self._settle(bucket)

    def drain(self) -> None:
        """Return when nothing is under way."""
        self.wait(self.buckets)
        for bucket in self.buckets:
            if (handle := bucket.gathered) is not None:
                handle.wait()

    # -- a module runs -----------------------------------------------------------------------

    def enter(self, blocks: Sequence[ParameterBlock], module: nn.Module, *_: Any) -> None:
        """Bring the weights of a module before it runs."""
        if not self._running:
            if torch.is_grad_enabled():
                self.also_begin()
            self._watch_saved()
        self._running.append(module)
        for block in blocks:
            self.demand(block)
        if is_in_backward():
            # What a checkpoint computes once more is read until its gradients have come.
            for number in self.wanted.get(module, ()):
                self.block_of[number].ungraded.add(number)
        self.reap()

    def leave(self, blocks: Sequence[ParameterBlock], module: nn.Module, *_: Any) -> None:
        """Release what is not used again in this forward."""
        if module not in self._running:
            return
        while self._running.pop() is not module:
            pass
        if not is_in_backward():
            for block in blocks:
                block.calls_left -= 1
                stays = block.is_kept and torch.is_grad_enabled()
                if block.calls_left == 0 and not block.is_again and not stays:
                    self._let_go(block)
        if self._running:
            return
        self._unwatch_saved()
        if self._wish == _FORWARD:  # modules may have taken other ways than those recorded
            for block in self.blocks[: self._at_first]:
                self._let_go(block)

    def graded(self, number: int) -> None:
        """Take note of a gradient: where all of a block have come its weights are read no more."""
        self._was_back = True
        block = self.block_of[number]
        block.ungraded.discard(number)
        if not block.ungraded:
            self._let_go(block)

    def _let_go(self, block: ParameterBlock) -> None:
        if block.is_here and not self._num_pins:
            if block.is_under_way:
                block.is_unwanted = True
            else:
                block.release()

    def reap(self) -> None:
        """Release what has come and is not wanted."""
        for block in self.blocks:
            if block.is_unwanted and not block.is_under_way and not self._num_pins:
                block.release()
        self.also_reap()

    def fetch(self, block: ParameterBlock) -> None:
        """Bring weights that are read while a module or backward runs; elsewhere, raise."""
        if not self._running and not is_in_backward():
            raise StateError(
                "this parameter is attached with reshard=True, and its weights are on all ranks, "
                "a slice on each, unless its module runs; read or change it in "
                "`with attached.whole():`, on all ranks"
            )
        self.demand(block)
        if is_in_backward():
            block.ungraded |= block.numbers

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has memory that comes and goes."""
        return _storage(tensor) in self._by_storage

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Keep all weights whole in this block of code; changes are taken over."""
        if self._num_pins:
            yield  # as those outside have them
            return
        self._pin()
        with ordinary():
            seen = [block.snapshot() for block in self.blocks]
        try:
            yield
        finally:
            with ordinary():
                for block, before in zip(self.blocks, seen, strict=True):
                    block.take_changed(before)
            self._num_pins = 0
            for block in self.blocks:
                if not block.is_again:
                    self._let_go(block)

    def stay_whole(self) -> None:
        """Keep all weights whole for good."""
        self._pin()

    def _pin(self) -> None:
        with torch.no_grad():
            self.end_rounds()
            for block in self.blocks:
                self.demand(block)
        self._num_pins = 1

    @property
    def is_whole(self) -> bool:
        """Whether someone has all weights."""
        return self._num_pins > 0

    # -- what autograd keeps -----------------------------------------------------------------

    def _unwatch_saved(self) -> None:
        if self._saving is not None:
            self._saving.__exit__(None, None, None)
            self._saving = None

    def _watch_saved(self) -> None:
        """Let backward ask for weights, whatever way it comes to them."""
        top: Any = torch._C._autograd._top_saved_tensors_default_hooks
        outer = top(True)
        # A checkpoint that computes once more counts what is saved; its weights are here.
        if not torch.is_grad_enabled() or (outer is not None and is_in_backward()):
            return
        pack, unpack = outer or (None, None)

        def keep(tensor: torch.Tensor) -> Any:
            block = self._by_storage.get(_storage(tensor))
            if block is None and pack is not None:
                return pack(tensor)
            return _Saved(tensor.detach(), tensor._version, block)

        def bring(saved: Any) -> torch.Tensor:
            if not isinstance(saved, _Saved):
                assert unpack is not None
                made: torch.Tensor = unpack(saved)
                return made
            if saved.tensor._version != saved.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: a tensor of shape {tuple(saved.tensor.shape)} is at "
                    f"version {saved.tensor._version}, backward needs {saved.version}"
                )
            if saved.block is not None:
                self.demand(saved.block)
                if is_in_backward() and torch.is_grad_enabled() and top(True) != (keep, bring):
                    # With create_graph this node's own backward keeps weights as well. What is
                    # on the thread for a node torch takes off after it.
                    torch._C._autograd._push_saved_tensors_default_hooks(keep, bring)
            return saved.tensor

        self._saving = torch.autograd.graph.saved_tensors_hooks(keep, bring)
        self._saving.__enter__()


@contextlib.contextmanager
def ordinary() -> Iterator[None]:
    """Make tensors that may be used anywhere: those of torch.inference_mode may not."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _storage(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse ones have none
        return 0
