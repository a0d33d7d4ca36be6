"""A race: who is fastest, of a few that look fast and the one that is there already.

All run in turns, so that what disturbs one disturbs the others. After a few rounds the slower half
leaves; the baseline and two others stay to the end. The winner takes its place only if it is faster
by more than `GAIN_MIN`, and by more than what the same run differs from itself: otherwise nothing
changes. A step takes as long as its slowest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["GAIN_MIN", "Race", "Result", "race"]

GAIN_MIN = 0.03
"""Share of the baseline's time that a schedule must save."""
ROUNDS_LAST = 12
"""Of the baseline and the finalists, which decide, where there is time."""
_ROUNDS_FIRST = 3
_FINALISTS = 2
"""That run against the baseline to the end."""
_BAND = 3.0
"""Standard errors by which the winner must be ahead."""
_PAIRS_SHARE = 0.8
"""Of the pairs, in which it must be."""

Run = Callable[[int], float]
"""Runs one of them once and returns how long it took on this rank."""


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
    """Who won."""

    winner: int
    """0: the baseline stays."""
    best: int
    """The fastest of the others, whether it won or not; 0 where there were none."""
    seconds: tuple[float, ...]
    """By number: the median of what was measured."""
    ratio: float
    """Time of the best over that of the baseline, in pairs."""
    band: float
    """By how much that may be off."""
    num_runs: int


def race(count: int, how: Race) -> Result:
    """Return who of so many wins, and by how much."""
    times: dict[int, list[float]] = {number: [] for number in range(count)}
    left = list(range(1, count))
    num_runs = 0
    for number in range(count):
        # The first run warms caches and compiles; it says nothing.
        how.run(number)
    has_time = True
    while len(left) > _FINALISTS:
        for number in range(_ROUNDS_FIRST):
            if number == 0 or has_time:
                num_runs += _round([0, *left], times, how)
                has_time = how.has_time()
        left.sort(key=lambda number: median(times[number]))
        left = left[: max(_FINALISTS, len(left) // 2) if has_time else 1]
    start = len(times[0])
    rounds = 0
    while left and (rounds < _ROUNDS_FIRST or (rounds < ROUNDS_LAST and how.has_time())):
        num_runs += _round([0, *left], times, how)
        rounds += 1
    pairs = {
        number: list(zip(times[0][start:], times[number][-rounds:], strict=True)) for number in left
    }
    best = min(left, key=lambda number: _judged(pairs[number])[0], default=0)
    last = pairs.get(best, [])
    ratio, band = _judged(last)
    ahead = sum(other < base for base, other in last) >= _PAIRS_SHARE * len(last)
    wins = ratio <= 1.0 - GAIN_MIN and ratio + band < 1.0 and ahead
    return Result(
        winner=best if wins else 0,
        best=best,
        seconds=tuple(median(t) if t else float("nan") for t in times.values()),
        ratio=ratio,
        band=band,
        num_runs=num_runs,
    )


def _round(numbers: list[int], times: dict[int, list[float]], how: Race) -> int:
    # Nobody always comes after the same one.
    turn = len(times[0]) % len(numbers)
    order = numbers[turn:] + numbers[:turn]
    taken = how.slowest([how.run(number) for number in order])
    for number, seconds in zip(order, taken, strict=True):
        times[number].append(seconds)
    return len(numbers)


def _judged(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the middle of what one took over the other, and how far off that may be."""
    if not pairs:
        return 1.0, 0.0
    ratios = [other / base for base, other in pairs]
    middle = median(ratios)
    spread = 1.4826 * median(abs(ratio - middle) for ratio in ratios)
    return middle, _BAND * 1.2533 * spread / len(ratios) ** 0.5
