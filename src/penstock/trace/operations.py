"""How many operations torch carries out in a step, from a few steps of a run on the CPU.

Many small operations mean that a step is spent on issuing work. torch's own recording of operations
counts them. It makes a step take a few times as long, so only some early steps are counted.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

_STEPS = (7, 23, 61)
"""Steps that are counted: the first ones compile and allocate, later ones are all alike."""


class OperationCount:
    """Counts operations of a training loop on the CPU, and records the fact `ops_per_step`."""

    def __init__(self, to: Any) -> None:
        self._recorder = to
        self._counts: list[int] = []
        self._thread = 0
        """The thread that is counted; 0: none. torch records by thread."""
        self._restore: Callable[[], None] | None = None

    @property
    def is_counting(self) -> bool:
        """Whether a step is being counted."""
        return self._thread != 0

    def got(self, number: int) -> None:
        """Note that the loop has got a batch; begin to count if it is one of some.

        `number`: how many it has got before, as far as the loop counts.
        """
        torch: Any = sys.modules.get("torch")
        if number not in _STEPS or torch is None or torch.cuda.is_initialized():
            return
        # A job that records its own operations keeps its recording: there is one at a time.
        if torch._C._autograd._profiler_enabled():
            return
        kinds = torch._C._profiler
        options = kinds.ProfilerConfig(
            kinds.ProfilerState.CPU, False, False, False, False, False, kinds._ExperimentalConfig()
        )
        self._give_way(torch.autograd.profiler)
        torch._C._autograd._enable_profiler_legacy(options)
        self._thread = threading.get_ident()

    def _give_way(self, profiler: Any) -> None:
        """Stop counting as soon as the job begins to record: for two it would be an error."""
        start = profiler._run_on_profiler_start

        def started() -> None:
            self._stop()
            start()

        def restore() -> None:
            profiler._run_on_profiler_start = start

        profiler._run_on_profiler_start, self._restore = started, restore

    def _stop(self) -> Any:
        """Return what was recorded; None if nothing was, or another thread was counted."""
        if self._thread != threading.get_ident():
            return None
        self._thread = 0
        if self._restore is not None:
            self._restore()
            self._restore = None
        torch: Any = sys.modules["torch"]
        return torch._C._autograd._disable_profiler_legacy()

    def ended(self) -> None:
        """Note that the work of a step is over."""
        events = self._stop()
        if events is None:
            return
        self._counts.append(sum(_num_outermost(of_thread) for of_thread in events))
        self._recorder.facts({"ops_per_step": sorted(self._counts)[len(self._counts) // 2]})


def _num_outermost(events: Any) -> int:
    """Return how many operations were called that no other operation called."""
    depth = count = 0
    for event in events:
        kind = event.kind()
        if kind == "push":
            count += depth == 0
            depth += 1
        elif kind == "pop":
            depth -= 1
    return count
