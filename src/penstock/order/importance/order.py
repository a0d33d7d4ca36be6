"""The order of importance sampling: windows of draws, each made from scores that are known.

An epoch is cut into windows. Window w is drawn from the scores as they were at the end of window
w - 2. So while window w - 1 is trained on, all of window w is known on every rank: it can be
prefetched, and the cache knows when each sample is used next.

Windows without scores are plain: they take their part of the plain order of the same epoch. These
are the warm-up, and windows that would gain nothing from their scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from penstock.errors import OptionError
from penstock.order.importance.draws import Probabilities, Whole, draw, probabilities
from penstock.order.importance.options import Floats, Importance
from penstock.order.importance.scores import ScoreTable
from penstock.order.keys import Ids
from penstock.order.mixture import MixtureOrder
from penstock.order.orders import Description, GlobalOrder

DELAY = 2
"""Windows between the last score that is used and the window that is drawn from it."""
EFFECTIVE_MIN = 0.25
"""A window whose draws are worth fewer, as a share of their number, is plain."""
GAIN_MIN = 1.005
"""A window whose scores differ so little that the gradient varies no less is plain."""
_COST_BITS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowDraws:
    """What is used in one window, in order."""

    window: int
    """Its number, counted through all epochs."""
    ids: Ids
    weights: Floats
    """Factor of each draw's loss."""
    chances: Probabilities | None
    """What it was drawn by; None where it is plain."""
    reason: str = ""
    """Why it is plain: in general, a colon, and numbers."""
    digest: int = 0
    """Of the scores that it was drawn from."""
    epoch: int = 0
    """The epoch that it is a part of."""
    drift: float | None = None
    """How far samples had moved when they were scored two windows before: see `ScoreTable.learn`.
    None where that is not known."""

    @property
    def effective_share(self) -> float:
        """Effective sample size of its draws as a share of their number."""
        total = float(self.weights.sum(dtype=np.float64))
        squares = float(np.square(self.weights, dtype=np.float64).sum())
        return total * total / (len(self.weights) * squares)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceOrder:
    """Draws by importance over a plain order, which says what an epoch is.

    >>> plain = GlobalOrder(num_samples=1000, seed=7)
    >>> order = ImportanceOrder(plain=plain, options=Importance(window=0.25))
    >>> order.num_windows, order.span(5)
    (4, (1, 250, 500))
    """

    mode: ClassVar[str] = "importance"
    plain: GlobalOrder | MixtureOrder
    options: Importance

    @property
    def num_samples(self) -> int:
        """Positions in one epoch."""
        return self.plain.num_samples

    @property
    def seed(self) -> int:
        """What plain windows and draws come from."""
        return self.plain.seed

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each source."""
        if isinstance(self.plain, MixtureOrder):
            return self.plain.sizes
        return (self.plain.num_samples,)

    @property
    def shares(self) -> tuple[int, ...]:
        """Parts of the draws that each source has."""
        return self.plain.shares if isinstance(self.plain, MixtureOrder) else (1,)

    @property
    def num_ids(self) -> int:
        """Samples that there are."""
        return sum(self.sizes)

    @property
    def num_windows(self) -> int:
        """Windows in an epoch."""
        return self.options.num_windows(self.num_samples)

    def window_at(self, epoch: int, position: int) -> int:
        """Return the window that a position lies in."""
        inside = (position * self.num_windows + self.num_windows - 1) // self.num_samples
        while self._edge(inside) > position:
            inside -= 1
        while inside + 1 < self.num_windows and self._edge(inside + 1) <= position:
            inside += 1
        return epoch * self.num_windows + inside

    def span(self, window: int) -> tuple[int, int, int]:
        """Return a window's epoch, its first position and the one behind its last."""
        epoch, inside = divmod(window, self.num_windows)
        return epoch, self._edge(inside), self._edge(inside + 1)

    def _edge(self, number: int) -> int:
        return number * self.num_samples // self.num_windows

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Refuse: what is drawn depends on losses, see `ImportanceCourse`."""
        raise OptionError("an importance order is known a window at a time, while training runs")

    def positions(self, epoch: int, ids: npt.ArrayLike) -> Ids:
        """Refuse: what is drawn depends on losses, see `ImportanceCourse`."""
        raise OptionError("an importance order is known a window at a time, while training runs")

    def describe(self) -> Description:
        """Return mode and parameters."""
        return {
            **self.plain.describe(),
            "mode": f"{self.mode}-{self.plain.mode}",
            "windows": self.num_windows,
            "options": self.options.describe(),
        }

    # -- drawing -----------------------------------------------------------------------------

    def draws(self, window: int, table: ScoreTable) -> WindowDraws:
        """Return what is used in a window, from the scores of two windows before."""
        epoch, start, stop = self.span(window)
        if epoch < self.options.warmup:
            return self._plain(window, "warm-up")
        if window < DELAY or not table.num_seen.any():
            return self._plain(window, "nothing is scored yet")
        points = _points_of(table)
        chances = probabilities(
            self._cost_aware(points) if self.options.score == "cost-aware" else points,
            sizes=self.sizes,
            shares=self.shares,
            floor=self.options.floor,
            draws=stop - start,
        )
        reason = self._reason(chances, points)
        if reason:
            return self._plain(window, reason)
        ids = draw(chances, stop - start, seed=self.seed, window=window)
        return WindowDraws(
            window=window,
            ids=ids,
            weights=chances.weights_of(ids),
            chances=chances,
            digest=table.digest(),
        )

    def _plain(self, window: int, reason: str) -> WindowDraws:
        epoch, start, stop = self.span(window)
        ids = self.plain.ids(epoch, start, stop)
        weights = np.ones(len(ids), np.float32)
        return WindowDraws(window=window, ids=ids, weights=weights, chances=None, reason=reason)

    def _cost_aware(self, points: Whole) -> Whole:
        """Return points over the square root of what a read costs.

        That minimises variance times cost. The best set to cache for such draws is the one with the
        highest points, so these samples count as cached: all ranks derive the same set.
        """
        far = np.ones(len(points), bool)
        num_cached = round(self.options.cached * len(points))
        far[np.argsort(-points, kind="stable")[:num_cached]] = False
        root = round(2**_COST_BITS * self.options.miss_cost**0.5)
        return np.where(far, (points << _COST_BITS) // root, points)

    def _reason(self, chances: Probabilities, points: Whole) -> str:
        """Return why a window had better be plain; empty where it had not."""
        effective = chances.effective_share
        if effective < EFFECTIVE_MIN:
            return f"its draws would be worth too little: {effective:.0%} of uniform ones"
        gain = chances.gain(points.astype(np.float64))
        if self.options.score != "cost-aware" and gain < GAIN_MIN:
            return f"its scores are alike: the gradient would vary {gain:.3f} times less"
        return ""


def _points_of(table: ScoreTable) -> Whole:
    """Return the scores; unseen samples come first, as if each were the hardest.

    Samples that never had a finite loss count as average: to draw them more often helps nobody.
    """
    points = table.score.astype(np.int64)
    has_score = points > 0
    if has_score.any():
        points[~has_score] = int(points.sum()) // int(has_score.sum())
    points[table.num_seen == 0] = points.max()
    return points
