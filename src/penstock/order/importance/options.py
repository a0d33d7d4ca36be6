"""What a user asks of importance sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.arguments import count_of, number_of
from penstock.errors import OptionError

Floats: TypeAlias = npt.NDArray[np.float32]
ScoreFunction: TypeAlias = Callable[[Floats], npt.ArrayLike]
"""Returns a score from 0 on for each loss of one global batch; the same on every rank."""

SCORES = ("loss-rank", "loss", "cost-aware")


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """Draw hard samples more often, and weight their losses so that the gradient stays unbiased.

    Give it as `shuffle=`, call `loader.observe(batch, losses)` after each step, and multiply each
    loss by `batch.weights`.

    >>> Importance(window=0.25, floor=0.3).num_windows(50_000)
    4
    """

    window: float | int = 0.25
    """Draws that are made at a time: a share of the epoch, or a whole number above 1. Scores are up
    to two windows old when they are used."""
    floor: float = 0.2
    """Share of the draws that is uniform. No weight exceeds 1 / floor."""
    score: str | ScoreFunction = "loss-rank"
    """"loss-rank": the logarithm of a loss's rank in its global batch, a mild preference that no
    scale of losses can spoil. "loss": a moving average of the loss. "cost-aware": the same, divided
    by the square root of what it costs to read the sample; it prefers samples that are cached. A
    function is called with the losses of a global batch and returns its scores."""
    warmup: int = 1
    """Plain epochs before the first window that goes by scores."""
    miss_cost: float = 10.0
    """For "cost-aware": time to read a sample that is not cached, in times of one that is."""
    cached: float = 0.2
    """For "cost-aware": share of the samples that the caches of all nodes hold together."""

    def __post_init__(self) -> None:
        if isinstance(self.window, bool) or not _is_window(self.window):
            raise OptionError(
                "window must be a share of the epoch above 0 and up to 1, or a whole number of "
                f"draws from 2 on (1 is the whole epoch), got {self.window!r}"
            )
        if not 0 < number_of("floor", self.floor) <= 1:
            raise OptionError(
                f"floor must lie above 0 and at most at 1, got {self.floor!r}: without it a sample "
                "that was easy once would never be seen again"
            )
        if not callable(self.score) and self.score not in SCORES:
            raise OptionError(
                f"score={self.score!r}: there are {', '.join(map(repr, SCORES))}, or a function of "
                "the losses of a batch"
            )
        object.__setattr__(self, "warmup", count_of("warmup", self.warmup, least=0))
        if number_of("miss_cost", self.miss_cost) < 1:
            raise OptionError(f"miss_cost must be at least 1, got {self.miss_cost!r}")
        if number_of("cached", self.cached) > 1:
            raise OptionError(f"cached must lie between 0 and 1, got {self.cached!r}")

    def num_windows(self, num_samples: int) -> int:
        """Return how many windows an epoch has."""
        share = float(self.window) if self.window <= 1 else self.window / num_samples
        return max(1, min(num_samples, round(1 / share)))

    def describe(self) -> str:
        """Return the options as one text; equal options describe themselves equally."""
        score = self.score if isinstance(self.score, str) else _name_of(self.score)
        text = f"floor={float(self.floor)!r} score={score} warmup={self.warmup}"
        if self.score == "cost-aware":
            text += f" miss_cost={float(self.miss_cost)!r} cached={float(self.cached)!r}"
        return text


def _is_window(window: Any) -> bool:
    if isinstance(window, int | np.integer):
        return bool(window >= 1)
    return isinstance(window, float | np.floating) and bool(0 < window <= 1)


def _name_of(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
