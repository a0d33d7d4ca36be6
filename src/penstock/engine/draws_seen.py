"""What a summary says about draws by importance."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from penstock.order.importance import WindowDraws

_WINDOWS_KEPT = 64
"""Windows that a summary looks back on."""


@dataclass(slots=True)
class WindowSeen:
    """What a summary says about one window."""

    window: int
    reason: str
    """Why it was plain; empty where it was drawn by importance."""
    num_draws: int
    num_distinct: int
    effective_share: float


@dataclass(slots=True)
class DrawsSeen:
    """What was drawn so far."""

    num_windows: int = 0
    num_plain: int = 0
    windows: list[WindowSeen] = field(default_factory=list)
    """The latest ones."""

    def add(self, draws: WindowDraws) -> None:
        """Take note of a window, if it is a new one."""
        if self.windows and draws.window <= self.windows[-1].window:
            return
        self.num_windows += 1
        self.num_plain += bool(draws.reason)
        seen = WindowSeen(
            window=draws.window,
            reason=draws.reason,
            num_draws=len(draws.ids),
            num_distinct=len(np.unique(draws.ids)),
            effective_share=draws.effective_share,
        )
        self.windows = [*self.windows[1 - _WINDOWS_KEPT :], seen]
