"""A tuned step that watches itself: the schedule was the best for what was measured then.

Networks and machines change. Where steps take longer or shorter than they did at tuning, by more
than `DRIFT_MAX`, over many steps, the step says so once; `retune`, at a place in the training where
all ranks come together, tunes again if one of them has seen it.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Mapping
from statistics import median
from types import TracebackType
from typing import Any, Self

import torch

from penstock.step.execute import compile as compile_step
from penstock.step.groups import Groups
from penstock.step.tune_trial import Carried, gathered
from penstock.step.tuning import Tuned, tune

__all__ = ["DRIFT_MAX", "WatchedStep"]

DRIFT_MAX = 0.2
"""Share of the time of a step by which it may differ from what was measured at tuning."""
_STEPS = 32
"""That tell: one may be late for many reasons."""


class WatchedStep:
    """A step of a tuned program; made by `Tuned.compile`."""

    def __init__(self, tuned: Tuned, groups: Groups, options: Mapping[str, Any]) -> None:
        self.tuned = tuned
        self._groups, self._options = groups, dict(options)
        self._step = compile_step(tuned.program, groups, **self._options)
        self._on_host = torch.device(self._options.get("device", "cpu")).type == "cpu"
        self._taken_s: deque[float] = deque(maxlen=_STEPS)
        self._has_warned = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the step."""
        self._step.close()

    def __call__(self, **given: Any) -> list[torch.Tensor]:
        """Do one iteration, and look how long it takes; on a device that nobody can tell."""
        start_s = time.perf_counter()
        made = self._step(**given)
        if self._on_host:
            self._taken_s.append(time.perf_counter() - start_s)
            self._warn()
        return made

    @property
    def drift(self) -> float:
        """By what share steps take longer (shorter: below 0) than when they were tuned."""
        was_s = self.tuned.seconds
        if len(self._taken_s) < _STEPS or not math.isfinite(was_s):
            return 0.0
        return median(self._taken_s) / was_s - 1.0

    @property
    def has_drifted(self) -> bool:
        """Whether that is so much that another schedule may be better."""
        return abs(self.drift) > DRIFT_MAX

    def retune(self, inputs: Mapping[str, Any], *, budget_s: float = 30.0) -> bool:
        """Tune again if some rank has drifted; return whether. All ranks come together.

        The inputs are those of a step; copies of them are used. They keep their layouts, so a
        program whose states are in slices keeps that.
        """
        if not any(gathered(self._groups, self.has_drifted)):
            return False
        tuned = self.tuned
        kept = {node.name: node.type for node in tuned.program.inputs}
        is_same = kept == {node.name: node.type for node in tuned.baseline.inputs}
        self.tuned = tune(
            tuned.baseline if is_same else tuned.program,
            self._groups,
            inputs,
            budget_s=budget_s,
            allow=[word for word in tuned.allow if word != "sliced"],
            measure=Carried(self._groups, inputs, **self._options),
            cache=None,
        )
        if self.tuned.program.digest != tuned.program.digest:
            self._step.close()
            self._step = compile_step(self.tuned.program, self._groups, **self._options)
        self._taken_s.clear()
        self._has_warned = False
        return True

    def _warn(self) -> None:
        if not self._has_warned and self.has_drifted:
            self._has_warned = True
            warnings.warn(
                f"steps of {self.tuned.program.name} take {1e3 * median(self._taken_s):.3g} ms, "
                f"{self.drift:+.0%} of the {1e3 * self.tuned.seconds:.3g} ms when they were tuned; "
                "another schedule may be faster now: call retune() on all ranks",
                stacklevel=3,
            )
