"""What a summary says about draws by importance."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.order.importance import WindowDraws
from penstock.order.importance.order import DELAY
from penstock.units import show_count

_WINDOWS_KEPT = 64
"""Windows that a summary looks back on."""


@dataclass(slots=True)
class WindowSeen:
    """What a summary says about one window."""

    window: int
    epoch: int
    reason: str
    """Why it was plain; empty where it was drawn by importance."""
    num_draws: int
    num_distinct: int
    num_distinct_so_far: int
    """Samples that its epoch has drawn, with this window."""
    effective_share: float


@dataclass(slots=True)
class DrawsSeen:
    """What was drawn so far."""

    num_windows: int = 0
    plain: Counter[str] = field(default_factory=Counter)
    """Plain windows by reason, without numbers."""
    windows: list[WindowSeen] = field(default_factory=list)
    """The latest ones."""
    _is_drawn: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool), repr=False)
    """By id, whether a sample was drawn in the latest epoch."""

    @property
    def num_plain(self) -> int:
        """Windows that were not drawn by importance."""
        return self.plain.total()

    def add(self, draws: WindowDraws) -> None:
        """Take note of a window, unless it is known already."""
        # An iteration that goes on draws the latest two again; one that begins again draws others.
        if draws.window in [seen.window for seen in self.windows[-DELAY:]]:
            return
        self.num_windows += 1
        if draws.reason:
            self.plain[_kind(draws.reason)] += 1
        seen = WindowSeen(
            window=draws.window,
            epoch=draws.epoch,
            reason=draws.reason,
            num_draws=len(draws.ids),
            num_distinct=len(np.unique(draws.ids)),
            num_distinct_so_far=self._distinct_with(draws),
            effective_share=draws.effective_share,
        )
        self.windows = [*self.windows[1 - _WINDOWS_KEPT :], seen]

    def _distinct_with(self, draws: WindowDraws) -> int:
        goes_on = bool(self.windows) and (
            self.windows[-1].epoch == draws.epoch and self.windows[-1].window < draws.window
        )
        if not goes_on:
            self._is_drawn[:] = False
        missing = int(draws.ids.max()) + 1 - len(self._is_drawn)
        if missing > 0:
            self._is_drawn = np.concatenate([self._is_drawn, np.zeros(missing, bool)])
        self._is_drawn[draws.ids] = True
        return int(np.count_nonzero(self._is_drawn))

    def __reduce__(self) -> Any:
        """A copy in another process is read and not added to; it needs no column of samples."""
        return DrawsSeen, (self.num_windows, self.plain, self.windows)

    def until(self, window: int) -> DrawsSeen:
        """Return what was drawn without the windows that nobody has trained on yet."""
        windows, num_ahead, plain = list(self.windows), 0, Counter(self.plain)
        while windows and windows[-1].window > window and num_ahead < DELAY:
            ahead = windows.pop()
            num_ahead += 1
            plain -= Counter([_kind(ahead.reason)] if ahead.reason else [])
        return DrawsSeen(self.num_windows - num_ahead, plain, windows)

    def lines(self, num_samples: int, num_observed: int) -> list[str]:
        """Return sentences for people."""
        if not self.windows:
            return []
        windows = show_count(self.num_windows)
        if not num_observed and self.num_plain == self.num_windows:
            return [
                f"importance: no losses were observed, so all {windows} windows were plain; call "
                "loader.observe(batch, losses) after each step"
            ]
        why = ", ".join(f"{show_count(n)}: {kind}" for kind, n in self.plain.most_common())
        latest = self.windows[-1]
        shares = [w.effective_share for w in self.windows if w.epoch == latest.epoch]
        return [
            f"importance: {show_count(self.num_windows - self.num_plain)} of {windows} windows "
            "were drawn by importance"
            + f", {show_count(self.num_plain)} plain ({why})"
            * bool(why),
            f"epoch {latest.epoch} has drawn {show_count(latest.num_distinct_so_far)} of "
            f"{show_count(num_samples)} samples so far; its draws are worth "
            f"{sum(shares) / len(shares):.0%} of as many uniform ones (effective sample size)",
        ]


def _kind(reason: str) -> str:
    return reason.partition(":")[0]
