"""Differential windows: the same training loop with and without its loader, in turns.

`PENSTOCK_DIFFERENTIAL=K` makes a loader switch every K steps between *real* batches and a
*resident* one: the last real batch is handed back at once, and nobody is asked for another. What a
step takes in a resident window, it takes without the loader's work beside it; the difference to a
real window is waiting and interference. The rule is pure, so that Penstock's own front and the hook
for other loaders switch alike, on every rank at the same step.
"""

from __future__ import annotations

import os
from typing import Any

from penstock.errors import OptionError

DIFFERENTIAL_VARIABLE = "PENSTOCK_DIFFERENTIAL"


def is_resident(step_index: int, window: int) -> bool:
    """Return whether a step gets the resident batch; windows of `window` steps, real ones first."""
    return window > 0 and step_index // window % 2 == 1


def window_asked_for() -> int:
    """Return how many steps the environment wants in a window; 0 where it wants none."""
    text = os.environ.get(DIFFERENTIAL_VARIABLE, "").strip()
    if not text:
        return 0
    if not text.isdecimal():
        raise OptionError(
            f"{DIFFERENTIAL_VARIABLE} is {text!r}; it takes the number of steps in a window, for "
            "example 20, or 0 for none"
        )
    return int(text)


class ResidentWindows:
    """Where one training loop stands in its windows, over all of its iterations."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._num_steps = 0
        self._batch: Any = None

    def again(self) -> Any:
        """Return the resident batch if this step gets it; None: the loader is to be asked.

        Counts a step only when it returns a batch; `took` counts the others.
        """
        if self._batch is None or not is_resident(self._num_steps, self.window):
            return None
        self._num_steps += 1
        return self._batch

    def took(self, batch: Any) -> None:
        """Take note of a real batch that the loop got."""
        self._num_steps += 1
        # Kept no longer than it may be needed: until the next real one.
        self._batch = batch
