"""Gradients on their way from autograd into arenas: brought by hooks, completed by `step`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.errors import OptionError, StateError
from penstock.step.attached.fit import changed
from penstock.step.attached.flow import Flow
from penstock.step.attached.word import StepWord, exchange
from penstock.step.comms.comm import Comm

__all__ = ["Grads", "numbers_in"]


class Grads:
    """The gradients of all parameters, by number, and what is known of them in this step."""

    def __init__(
        self, params: Sequence[torch.Tensor], views: Sequence[torch.Tensor], flow: Flow
    ) -> None:
        self.params, self.views = params, views
        self.flow = flow
        self.filled: set[int] = set()
        self._zeros = set(range(len(params)))
        """Parameters whose place for gradients has nothing but zeros."""
        self._versions = [-1] * len(params)
        self._clipped: set[int] = set()
        """Parameters whose gradients were clipped since they were sent."""

    def before(self, number: int) -> None:
        """Have a gradient wait before it changes: backward adds in place to what may be sent."""
        if self.params[number].grad is not None:
            self.flow.hold(number)

    def after(self, number: int, *, is_accumulating: bool) -> None:
        """Take note of a gradient that has changed."""
        if not is_accumulating or self.is_home(number):
            self.bring(number)

    def is_home(self, number: int) -> bool:
        """Whether a gradient is in its arena."""
        grad, view = self.params[number].grad, self.views[number]
        if grad is None or grad.layout != torch.strided:
            return False
        return grad.data_ptr() == view.data_ptr()

    def bring(self, number: int) -> None:
        """Put a gradient into its arena, and say so."""
        param, view = self.params[number], self.views[number]
        assert param.grad is not None
        if param.grad.layout != torch.strided:
            raise OptionError(
                f"parameter {number} of shape {tuple(param.shape)} has a sparse gradient; "
                "slices need dense ones (sparse=False)"
            )
        if not self.is_home(number):
            self.flow.hold(number)
            self.make_room(number)
            with torch.no_grad():
                view.copy_(param.grad)
            param.grad = view
            self._clipped.discard(number)
        self._versions[number] = view._version
        self.filled.add(number)
        self._zeros.discard(number)
        self.flow.filled(number)

    def make_room(self, number: int) -> None:
        """Have memory for a gradient; here there always is."""

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
        param = self.params[number]
        assert param.grad is not None
        if param.grad._version != self._versions[number]:
            raise changed(number, param)

    def agree(self, word: Comm, mine: StepWord) -> set[int]:
        """Return the parameters with a gradient on any rank; send again what has changed."""
        numbers, flow = range(len(self.params)), self.flow
        rows = [
            [float(param.grad is not None) for param in self.params],
            [float(number in flow.dirty) for number in numbers],
        ]
        used, dirty = map(numbers_in, exchange(word, mine, rows).rows)
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
        self._clipped = {
            number for number, param in enumerate(self.params) if param.grad is not None
        }

    def _refuse_clipped(self, dirty: set[int]) -> None:
        parcels = {parcel for number in dirty for parcel in self.flow.of_param[number]}
        found = sorted(self._clipped & {n for parcel in parcels for n in parcel.params})
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
        for param in self.params:
            param.grad = None


def numbers_in(flags: Sequence[float]) -> set[int]:
    """Return the places of all flags that are set."""
    return {number for number, is_set in enumerate(flags) if is_set}
