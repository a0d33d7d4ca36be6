"""A tuned step that watches itself: its schedule was the best for the machine as it was.

Networks and machines change. Where steps take longer or shorter than they did at tuning, by more
than `DRIFT_MAX`, over many steps, the step warns once; `retune`, which all ranks call at one place
of the training, tunes again if one of them has seen a drift.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from penstock.step.execute import Calls, Step, planned, whole_device
from penstock.step.groups import Groups
from penstock.step.loads.sources import Source
from penstock.step.tuner.agree import Team
from penstock.step.tuner.trial import MeasuredTrials
from penstock.step.tuner.tune import Tuned, tune_again

__all__ = ["DRIFT_MAX", "WatchedStep"]

DRIFT_MAX = 0.2
"""Share of the time of a step by which it may differ from what was measured at tuning."""
_STEPS = 32
"""Whose median counts: a single step may be late for many reasons."""


class WatchedStep(Step):
    """A step of a tuned program; made by `Tuned.compile`."""

    def __init__(self, tuned: Tuned, groups: Groups, options: Mapping[str, Any]) -> None:
        self.tuned = tuned
        self._options = dict(options)
        self._begin(groups, **self._options)
        self._taken_s: deque[float] = deque(maxlen=_STEPS)
        self._has_warned = False

    def _begin(
        self,
        groups: Groups,
        *,
        backend: str = "auto",
        calls: Calls | None = None,
        sources: Mapping[str, Iterable[Any]] | None = None,
        donate: Sequence[str] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        """Become the step of the tuned program; options as `compile`."""
        where = whole_device(device)
        plan = planned(self.tuned.program, sources or {}, donate, where)
        options: dict[str, Any] = {"calls": calls or {}, "sources": sources or {}}
        super().__init__(plan, groups, **options, backend=backend, device=where)

    def __call__(self, **given: Any) -> list[torch.Tensor]:
        """Do one iteration and time it; on a device the call returns before the work is done."""
        start_s = time.perf_counter()
        made = super().__call__(**given)
        if self._device.type == "cpu":
            self._taken_s.append(time.perf_counter() - start_s)
            self._warn()
        return made

    @property
    def drift(self) -> float:
        """The share by which steps take longer (below 0: shorter) than when they were tuned."""
        was_s = self.tuned.seconds
        if len(self._taken_s) < _STEPS or not math.isfinite(was_s):
            return 0.0
        return median(self._taken_s) / was_s - 1.0

    @property
    def has_drifted(self) -> bool:
        """Whether the drift is so large that another schedule may be better."""
        return abs(self.drift) > DRIFT_MAX

    def retune(self, inputs: Mapping[str, Any], *, budget_s: float = 30.0) -> bool:
        """Tune again if some rank has drifted; return whether. All ranks come together.

        The inputs are those of a step; copies of them are used. They keep their layouts, so a
        program whose states are in slices keeps that. Sources go on with their next batch.
        """
        if not any(Team(self._groups).gathered(self.has_drifted)):
            return False
        tuned = self.tuned
        measure = MeasuredTrials(self._groups, inputs, **self._with_sources(self.sources))
        self.tuned = tune_again(tuned, self._groups, measure, budget_s=budget_s)
        if self.tuned.program.digest != tuned.program.digest:
            self._change()
        self._taken_s.clear()
        self._has_warned = False
        return True

    def _with_sources(self, sources: Mapping[str, Source]) -> dict[str, Any]:
        return {**self._options, "sources": dict(sources)} if sources else self._options

    def _change(self) -> None:
        """Go on with another program, and with the batch that would have come next."""
        keeps_times = self.keeps_times
        # The old program's sources go on in the new one; if that fails, nobody else closes them.
        sources = self.hand_over()
        try:
            self._begin(self._groups, **self._with_sources(sources))
        except BaseException:
            for source in sources.values():
                source.close()
            raise
        self.keeps_times = keeps_times

    def _warn(self) -> None:
        if not self._has_warned and self.has_drifted:
            self._has_warned = True
            warnings.warn(
                f"steps of {self.tuned.program.name} take {1e3 * median(self._taken_s):.3g} ms, "
                f"{self.drift:+.0%} of the {1e3 * self.tuned.seconds:.3g} ms when they were tuned; "
                "another schedule may be faster now: call retune() on all ranks",
                stacklevel=3,
            )
