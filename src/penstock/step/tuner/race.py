"""A race: which of a few promising schedules is fastest, and whether it beats the baseline.

All run in turns with the baseline, so that a disturbance hits both, and only the ratio of their
times counts. Heats are short and choose the finalists; more schedules may join between heats. The
winner replaces the baseline only if it is faster by more than `GAIN_MIN` and by more than the noise
of the ratio; otherwise nothing changes. A step takes as long as its slowest rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["GAIN_MIN", "Heats", "Race", "Result"]

GAIN_MIN = 0.03
"""Share of the baseline's time that a schedule must save."""
ROUNDS_LAST = 12
"""Rounds of the final, where there is time."""
_ROUNDS_FIRST = 3
_SEMIFINALISTS = 4
_FINALISTS = 2
"""Schedules that run against the baseline to the end."""
_BAND = 3.0
"""Standard errors by which the winner must be ahead."""
_PAIRS_SHARE = 0.8
"""Share of the pairs in which the winner must be ahead."""

Run = Callable[[int], float]
"""Runs one schedule once, by its number, and returns its seconds on this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """How a race is run."""

    run: Run
    """By number: 0 is the baseline."""
    slowest: Callable[[Sequence[float]], list[float]]
    """Of times on this rank: the longest of all ranks, for each."""
    has_time: Callable[[], bool]
    """Whether there is time for another round; the same on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The winner, and the times of all."""

    winner: int
    """0: the baseline stays."""
    best: int
    """The fastest of the others, whether it won or not; 0 where there were none."""
    seconds: tuple[float, ...]
    """By number: the median of its runs; of finalists, of their runs in the final."""
    ratio: float
    """Time of the best over that of the baseline, in pairs."""
    band: float
    """The uncertainty of the ratio."""
    num_runs: int


class Heats:
    """A race under way."""

    def __init__(self, how: Race) -> None:
        self._how = how
        self._times: dict[int, list[float]] = {0: []}
        self._ratios: dict[int, list[float]] = {}
        self._has_time = True
        self.num_runs = 0
        # The first run warms caches and compiles; its time does not count.
        how.run(0)

    def run(self, numbers: Iterable[int]) -> None:
        """Run some new schedules against the baseline, a few times."""
        new = list(numbers)
        for number in new:
            self._times[number], self._ratios[number] = [], []
            self._how.run(number)
        for turn in range(_ROUNDS_FIRST if new else 0):
            if turn == 0 or self._has_time:
                self._round(new)

    def ratio(self, number: int) -> float:
        """Return the time of one over that of the baseline, so far."""
        return median(self._ratios[number]) if number else 1.0

    def seconds(self, number: int) -> float:
        """Return the time of one, so far."""
        return median(self._times[number]) if self._times[number] else math.nan

    def final(self) -> Result:
        """Return the winner, and by how much it wins."""
        left = sorted(self._ratios, key=self.ratio)
        if len(left) > _FINALISTS and self._has_time:
            left = left[:_SEMIFINALISTS]
            for _ in range(_ROUNDS_FIRST):
                self._round(left)
            left = sorted(left, key=self.ratio)[:_FINALISTS]
        elif len(left) > _FINALISTS:
            left = left[:1]
        rounds = 0
        for _ in range(0 if self._times[0] else _ROUNDS_FIRST):
            # No schedule to race with: the time of a step is reported all the same.
            self._round([])
        while left and (rounds < _ROUNDS_FIRST or (rounds < ROUNDS_LAST and self._how.has_time())):
            self._round(left)
            rounds += 1
        # Runs of the final were side by side, so only their times are compared.
        for number in (0, *left) if left else ():
            self._times[number] = self._times[number][-rounds:]
        return self._result({number: self._ratios[number][-rounds:] for number in left})

    def _result(self, last: dict[int, list[float]]) -> Result:
        best = min(last, key=lambda number: _judged(last[number])[0], default=0)
        ratios = last.get(best, [])
        ratio, band = _judged(ratios)
        ahead = sum(each < 1.0 for each in ratios) >= _PAIRS_SHARE * len(ratios)
        wins = ratio <= 1.0 - GAIN_MIN and ratio + band < 1.0 and ahead
        return Result(
            winner=best if wins else 0,
            best=best,
            seconds=tuple(self.seconds(number) for number in sorted(self._times)),
            ratio=ratio,
            band=band,
            num_runs=self.num_runs,
        )

    def _round(self, others: list[int]) -> None:
        # The order rotates: a run may profit or suffer from the one before it.
        numbers = [0, *others]
        turn = len(self._times[0]) % len(numbers)
        order = numbers[turn:] + numbers[:turn]
        taken = self._how.slowest([self._how.run(number) for number in order])
        found = dict(zip(order, taken, strict=True))
        for number, seconds in found.items():
            self._times[number].append(seconds)
            if number:
                self._ratios[number].append(seconds / found[0])
        self.num_runs += len(order)
        self._has_time = self._how.has_time()


def _judged(ratios: list[float]) -> tuple[float, float]:
    """Return the median of some ratios and its uncertainty."""
    if not ratios:
        return 1.0, 0.0
    middle = median(ratios)
    if not math.isfinite(middle):
        return middle, 0.0
    spread = 1.4826 * median(abs(ratio - middle) for ratio in ratios)
    return middle, _BAND * 1.2533 * spread / len(ratios) ** 0.5
