"""A summary of draws by importance."""

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
"""Windows that a summary keeps."""
_EPOCHS_KEPT = 64


@dataclass(slots=True)
class WindowSummary:
    """A window in the summary."""

    window: int
    reason: str
    """Why it was plain; empty where it was drawn by importance."""
    num_draws: int
    num_distinct: int
    effective_share: float
    epoch: int = 0
    num_distinct_so_far: int = 0
    """Samples that its epoch has drawn, this window included."""
    drift: float | None = None
    """Drift of the scores that it was drawn from; see `ScoreTable.learn`."""


@dataclass(slots=True)
class EpochSummary:
    """The draws of one epoch so far."""

    epoch: int
    num_draws: int = 0
    num_distinct: int = 0


@dataclass(slots=True)
class DrawSummary:
    """The draws of a run so far."""

    num_windows: int = 0
    num_plain: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Plain windows by reason, without numbers."""
    windows: list[WindowSummary] = field(default_factory=list)
    """The latest ones."""
    epochs: list[EpochSummary] = field(default_factory=list)
    """The latest ones."""
    _is_drawn: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool), repr=False)
    """By sample, in the latest epoch."""

    def add(self, draws: WindowDraws) -> None:
        """Add a window, unless it is known already."""
        # An iteration that goes on draws the latest two again; one that begins again draws others.
        if draws.window in [seen.window for seen in self.windows[-DELAY:]]:
            return
        self.num_windows += 1
        self.num_plain += bool(draws.reason)
        self.reasons.update(_kinds(draws.reason))
        distinct = np.unique(draws.ids)
        seen = WindowSummary(
            window=draws.window,
            reason=draws.reason,
            num_draws=len(draws.ids),
            num_distinct=len(distinct),
            effective_share=draws.effective_share,
            epoch=draws.epoch,
            drift=draws.drift,
        )
        self._cover(draws, distinct)
        seen.num_distinct_so_far = self.epochs[-1].num_distinct
        self.windows = [*self.windows[1 - _WINDOWS_KEPT :], seen]

    def _cover(self, draws: WindowDraws, distinct: npt.NDArray[np.int64]) -> None:
        begins_again = bool(self.windows) and draws.window <= self.windows[-1].window
        if not self.epochs or self.epochs[-1].epoch != draws.epoch or begins_again:
            self.epochs = [*self.epochs[1 - _EPOCHS_KEPT :], EpochSummary(draws.epoch)]
            self._is_drawn[:] = False
        if len(self._is_drawn) <= distinct[-1]:
            missing = int(distinct[-1]) + 1 - len(self._is_drawn)
            self._is_drawn = np.append(self._is_drawn, np.zeros(missing, bool))
        epoch = self.epochs[-1]
        epoch.num_draws += len(draws.ids)
        epoch.num_distinct += len(distinct) - int(self._is_drawn[distinct].sum())
        self._is_drawn[distinct] = True

    def until(self, window: int, epoch: int) -> DrawSummary:
        """Return the draws up to a window; later windows are known, but not used yet."""
        used = list(self.windows)
        while used and used[-1].window > window and len(self.windows) - len(used) < DELAY:
            used.pop()
        later = self.windows[len(used) :]
        return DrawSummary(
            num_windows=self.num_windows - len(later),
            num_plain=self.num_plain - sum(bool(w.reason) for w in later),
            reasons=self.reasons - Counter(kind for w in later for kind in _kinds(w.reason)),
            windows=used,
            epochs=[e for e in self.epochs if e.epoch <= epoch],
        )

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
        why = ", ".join(f"{show_count(n)}: {kind}" for kind, n in self.reasons.most_common())
        plain = f", {show_count(self.num_plain)} plain ({why})" if why else ""
        latest = self.windows[-1]
        shares = [w.effective_share for w in self.windows if w.epoch == latest.epoch]
        return [
            f"importance: {show_count(self.num_windows - self.num_plain)} of {windows} windows "
            f"were drawn by importance{plain}",
            f"epoch {latest.epoch} has drawn {show_count(latest.num_distinct_so_far)} of "
            f"{show_count(num_samples)} samples so far; its draws are worth "
            f"{sum(shares) / len(shares):.0%} of as many uniform ones (effective sample size)",
        ]

    def __getstate__(self) -> Any:
        # The training process gets a copy for each summary, and does not need the samples.
        kept = {name: getattr(self, name) for name in self.__slots__ if name != "_is_drawn"}
        return None, {**kept, "_is_drawn": np.zeros(0, bool)}


def _kinds(reason: str) -> list[str]:
    return [reason.partition(":")[0]] if reason else []
