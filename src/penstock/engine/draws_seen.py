"""What a summary says about draws by importance."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.order.importance import WindowDraws

_WINDOWS_KEPT = 64
"""Windows that a summary looks back on."""
_EPOCHS_KEPT = 64


@dataclass(slots=True)
class WindowSeen:
    """What a summary says about one window."""

    window: int
    reason: str
    """Why it was plain; empty where it was drawn by importance."""
    num_draws: int
    num_distinct: int
    effective_share: float
    epoch: int = 0
    drift: float | None = None
    """Of the scores that it was drawn from: see `ScoreTable.learn`."""


@dataclass(slots=True)
class EpochSeen:
    """What was drawn of one epoch so far."""

    epoch: int
    num_draws: int = 0
    num_distinct: int = 0


@dataclass(slots=True)
class DrawsSeen:
    """What was drawn so far."""

    num_windows: int = 0
    num_plain: int = 0
    windows: list[WindowSeen] = field(default_factory=list)
    """The latest ones."""
    epochs: list[EpochSeen] = field(default_factory=list)
    """The latest ones."""
    _is_drawn: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool), repr=False)
    """By sample, in the latest epoch."""

    def add(self, draws: WindowDraws) -> None:
        """Take note of a window, if it is a new one."""
        if self.windows and draws.window <= self.windows[-1].window:
            return
        self.num_windows += 1
        self.num_plain += bool(draws.reason)
        distinct = np.unique(draws.ids)
        seen = WindowSeen(
            window=draws.window,
            reason=draws.reason,
            num_draws=len(draws.ids),
            num_distinct=len(distinct),
            effective_share=draws.effective_share,
            epoch=draws.epoch,
            drift=draws.drift,
        )
        self.windows = [*self.windows[1 - _WINDOWS_KEPT :], seen]
        self._cover(draws, distinct)

    def _cover(self, draws: WindowDraws, distinct: npt.NDArray[np.int64]) -> None:
        if not self.epochs or self.epochs[-1].epoch != draws.epoch:
            self.epochs = [*self.epochs[1 - _EPOCHS_KEPT :], EpochSeen(draws.epoch)]
            self._is_drawn[:] = False
        if len(self._is_drawn) <= distinct[-1]:
            missing = int(distinct[-1]) + 1 - len(self._is_drawn)
            self._is_drawn = np.append(self._is_drawn, np.zeros(missing, bool))
        epoch = self.epochs[-1]
        epoch.num_draws += len(draws.ids)
        epoch.num_distinct += len(distinct) - int(self._is_drawn[distinct].sum())
        self._is_drawn[distinct] = True

    def until(self, window: int, epoch: int) -> DrawsSeen:
        """Return what was drawn up to a window; later ones are known, but not used yet."""
        used = [w for w in self.windows if w.window <= window]
        later = self.windows[len(used) :]
        return DrawsSeen(
            num_windows=self.num_windows - len(later),
            num_plain=self.num_plain - sum(bool(w.reason) for w in later),
            windows=used,
            epochs=[e for e in self.epochs if e.epoch <= epoch],
        )

    def __getstate__(self) -> Any:
        # The training process gets a copy for each summary, and does not need the samples.
        kept = {name: getattr(self, name) for name in self.__slots__ if name != "_is_drawn"}
        return None, {**kept, "_is_drawn": np.zeros(0, bool)}
