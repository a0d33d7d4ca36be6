"""Gradients on their way from autograd into arenas: brought by hooks, completed by `step`.

What lies in an arena after backward is this rank's own gradient. Who reads `param.grad` wants what
DDP has there: the mean over ranks. So the first read has all ranks put their means there
(`means_came`); what is done to them from then on is what `step` updates with (`take_means`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from penstock.errors import OptionError, StateError
from penstock.step.attached.fit import changed, moved
from penstock.step.attached.flow import BucketFlow
from penstock.step.attached.guarded_grads import own_grad
from penstock.step.attached.step_exchange import StepMessage, exchange
from penstock.step.comms.comm import Comm

__all__ = ["Grads"]


class Grads:
    """The gradients of all parameters, by number, and what is known of them in this step."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        views: Sequence[torch.Tensor],
        flow: BucketFlow,
        read: Callable[[int], None],
    ) -> None:
        """Bring gradients to these places; `read` is called before anybody reads one."""
        self.params, self.views = params, views
        self._shown = [own_grad(view, partial(read, n)) for n, view in enumerate(views)]
        """The same memory, for users."""
        self.are_means = False
        """Whether arenas have the means of all ranks, as far as this rank knows."""
        self._may_be_changed = False
        """Whether users have seen the means, and may have changed them."""
        self.flow = flow
        self.filled: set[int] = set()
        self._zeros = set(range(len(params)))
        """Parameters whose place for gradients has nothing but zeros."""
        self._versions = [-1] * len(params)
        self._clipped: set[int] = set()
        """Parameters whose gradients were clipped since they were sent."""

    def before(self, number: int) -> None:
        """Wait before a gradient changes: backward adds in place to what may be in flight."""
        if self.params[number].grad is not None:
            self.flow.hold(number)

    def after(self, number: int, *, is_accumulating: bool) -> None:
        """Take note of a gradient that has changed."""
        if not is_accumulating or self.is_home(number):
            self.bring(number)

    def is_home(self, number: int) -> bool:
        """Whether a gradient is in its arena."""
        grad = self.params[number].grad
        if grad is None or grad is self._shown[number]:
            return grad is not None
        with torch._C.DisableTorchFunctionSubclass():
            is_dense = grad.layout == torch.strided
            return is_dense and grad.data_ptr() == self.views[number].data_ptr()

    def bring(self, number: int) -> None:
        """Put a gradient into its arena, and say so."""
        param, view = self.params[number], self.views[number]
        self.are_means = False
        if not self.is_home(number):
            self._check_kind(number)
            self.flow.hold(number)
            self.make_room(number)
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                assert param.grad is not None
                view.copy_(param.grad)
            param.grad = self._shown[number]
            self._clipped.discard(number)
        self._versions[number] = view._version
        self.filled.add(number)
        self._zeros.discard(number)
        self.flow.filled(number)

    def _check_kind(self, number: int) -> None:
        """Raise if a gradient cannot lie in its arena."""
        param, view = self.params[number], self.views[number]
        assert param.grad is not None
        if param.grad.layout != torch.strided:
            raise OptionError(
                f"parameter {number} of shape {tuple(param.shape)} has a sparse gradient; "
                "slices need dense ones (sparse=False)"
            )
        if (param.dtype, param.device) != (view.dtype, view.device):
            raise moved(view, param)

    def make_room(self, number: int) -> None:
        """Take memory for a gradient; here there always is some."""

    def bring_the_rest(self) -> None:
        """Put into arenas what no hook has; where there is no gradient, zeros."""
        for number, param in enumerate(self.params):
            if param.grad is None:
                self.bring_nothing(number)
            elif not self.is_home(number):
                self.bring(number)
            else:
                self.check(number)

    def bring_nothing(self, number: int) -> None:
        """Put zeros where a gradient would be."""
        if number not in self._zeros:
            self.flow.hold(number)
            self.views[number].zero_()
            self._zeros.add(number)
        if number in self.filled:  # and thrown away since
            self.filled.discard(number)
            self._clipped.discard(number)
            self.flow.filled(number)

    def check(self, number: int) -> None:
        """Raise if a gradient has changed after it was brought."""
        if not self._may_be_changed and self.views[number]._version != self._versions[number]:
            raise changed(number, self.params[number])

    @torch.no_grad()
    def means_came(self, used: Collection[int], before: Sequence[torch.Tensor | None]) -> None:
        """Show users the means of all ranks, which lie in the arenas now.

        Gradients `before` are what users hold: those of the first step did not lie in arenas yet.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for number, grad in enumerate(before):
                if grad is not None:
                    grad.data = self.views[number]
        for number in used:  # where others had one, this rank has it as well
            self.params[number].grad = self._shown[number]
        self.filled.update(used)
        self._zeros.clear()
        self._clipped.clear()
        self.are_means = self._may_be_changed = True

    def take_means(self) -> bool:
        """Whether sums are to be what users have made of the means; until they come again."""
        may_be_changed, self._may_be_changed = self._may_be_changed, False
        if may_be_changed:
            self._versions = [view._version for view in self.views]
        return may_be_changed

    def agree(self, control: Comm, mine: StepMessage) -> set[int]:
        """Return the parameters with a gradient on any rank; send again what has changed."""
        numbers, flow = range(len(self.params)), self.flow
        rows = [
            [param.grad is not None for param in self.params],
            [number in flow.dirty for number in numbers],
        ]
        used, dirty = exchange(control, mine, rows)
        if dirty:
            self.send_again(dirty)
        return used

    def send_again(self, dirty: set[int]) -> None:
        """Send gradients that have changed since they were sent, on any rank."""
        self._refuse_clipped(dirty)
        self.flow.send_again(dirty)
        self.flow.dirty.clear()

    def clipped(self) -> None:
        """Take note that sums were clipped: what was sent is not what they are made of."""
        self.are_means = False
        self._clipped = {
            number for number, param in enumerate(self.params) if param.grad is not None
        }

    def _refuse_clipped(self, dirty: set[int]) -> None:
        buckets = {bucket for number in dirty for bucket in self.flow.of_param[number]}
        found = sorted(self._clipped & {n for bucket in buckets for n in bucket.params})
        if found:
            raise StateError(
                f"a gradient of parameter {min(dirty)} has come after gradients were clipped, and "
                f"parameter {found[0]}, which is sent with it, would be as before; clip after the "
                "last backward, just before optimizer.step()"
            )

    def clear(self) -> None:
        """Forget the gradients of a step that is over."""
        self.filled.clear()
        self._clipped.clear()
        self.are_means = self._may_be_changed = False
        for param in self.params:
            param.grad = None
