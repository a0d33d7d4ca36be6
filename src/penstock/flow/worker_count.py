"""How many worker processes there should be: decided by measuring, round by round.

More workers help in one situation only: the training loop waits, the workers are busy, and the
machine has idle cores. If the workers are idle while the loop waits, fetches are the limit. If no
core is idle, another worker only takes turns with the others.

The policy looks at *rounds* of a few intervals. Each change is a *trial* that the next round
judges by what it brought.

* Raise: by as many workers as the loop's wait asks for and idle cores can run. The raise is kept if
  the loop waits no more, or if a fair share of the added workers shows as added throughput.
  Otherwise the old number comes back, and the next trial waits longer each time. A raise that
  brought only part of what it promised (memory bandwidth, a lock inside the transform) is followed
  by trials of fewer, which bisect the added workers.
* Lower: after several rounds in which two or more workers had nothing to do. One spare worker is
  kept. If the loop begins to wait and throughput falls, the old number comes back.

What makes it stand still: a raise needs busy workers and a lowering idle ones, so no number invites
both; and a trial that failed is not repeated for a while. Nothing is concluded from intervals in
which the loop asked for nothing (validation, a checkpoint), nor while workers are still starting.

Pure: the same intervals give the same numbers.

>>> count = WorkerCount(WorkerLimits(most=8, start=6))
>>> seen = WorkInterval(
...     num_workers=6, seconds=1.0, wait_share=0.2, busy_share=1.0, idle_cores=2.0, num_batches=16.0
... )
>>> [count.on(seen) for _ in range(6)]
[6, 6, 6, 7, 7, 7]
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

import msgspec

from penstock.errors import OptionError

_WAIT_MIN = 0.02
"""The loop waits if it spends at least this share of its time in `next`."""
_BUSY_MIN = 0.8
"""Workers are busy if they work for this share of their time: some of the rest is their hand-over,
of which more workers have more."""
_SPARE_MIN = 0.25
"""One more worker is added if the idle cores can run this much of it."""
_IDLE_MIN = 2.0
"""Workers with nothing to do that invite a lowering: one is kept for uneven samples."""
_IDLE_ROUNDS = 3
"""Rounds in a row with idle workers before the number is lowered: the first fetches of a run, or a
store's bad moment, leave workers idle too."""
_GAIN_MIN = 0.2
"""Share of the added workers that must show as added throughput. Low, because a second hardware
thread of a core adds only a third of a core."""
_GAIN_FULL = 0.75
"""Above this share a raise brought what it promised, and nobody looks for fewer."""
_ROUND_INTERVALS, _ROUND_INTERVALS_MAX, _ROUND_BATCHES = 4, 16, 32
"""Least intervals, most intervals and least batches of a round. The most wins over the batches; few
batches are a coarse measure of throughput."""
_STARTING_MAX = 120
"""Intervals to wait for workers to start or end. After that the number that exists counts."""
_PAUSE_ROUNDS, _PAUSE_ROUNDS_MAX = 8, 128
"""Rounds without trials after one that failed; doubled while they fail."""


class WorkInterval(msgspec.Struct, frozen=True, kw_only=True):
    """What was observed in one of the regular intervals (about a second) of a run."""

    num_workers: int
    """Workers that were ready for work during the interval."""
    seconds: float
    wait_share: float
    """Share of the time that the training loop waited in `next`."""
    busy_share: float
    """Share of the workers' time in which they had work, averaged over the workers."""
    idle_cores: float
    """Cores of the machine that were idle, on average."""
    num_batches: float
    """Batches that the workers finished; parts of batches count as such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Bounds of the number of workers, and the number to start with."""

    least: int = 1
    most: int
    """This rank's share of the cores: beyond it workers only take turns."""
    start: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.start <= self.most:
            raise OptionError(
                "worker limits must satisfy 1 <= least <= start <= most, got "
                f"least={self.least}, start={self.start}, most={self.most}"
            )

    @classmethod
    def of_cores(cls, num_cores: int) -> WorkerLimits:
        """Return the limits for a rank with so many cores to itself.

        All of them from the start: workers run at low priority, so one too many costs memory and
        no time, while one too few delays the first batches.

        >>> [WorkerLimits.of_cores(n).start for n in (1, 2, 16)]
        [1, 2, 16]
        """
        most = max(1, num_cores)
        return cls(most=most, start=most)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """The average of a few intervals with one number of workers."""

    batches_s: float
    wait_share: float
    busy_share: float
    idle_cores: float

    @property
    def is_waiting(self) -> bool:
        return self.wait_share >= _WAIT_MIN


@dataclass(frozen=True, slots=True, kw_only=True)
class _CountTrial:
    """A change that the next round judges: the number before it, and what that one brought."""

    num_before: int
    batches_s: float


class WorkerCount:
    """The number of workers of one rank."""

    def __init__(self, limits: WorkerLimits) -> None:
        self._limits = limits
        self._target = limits.start
        self._trial: _CountTrial | None = None
        self._known_worse: int | None = None
        """A lower number that brings less, while the workers above it are still in doubt."""
        self._intervals: list[WorkInterval] = []
        self._num_starting = 0
        self._skip_next = False
        self._idle_rounds = 0
        self._pause_rounds = 0
        self._next_pause_rounds = _PAUSE_ROUNDS

    @property
    def target(self) -> int:
        """How many workers there should be."""
        return self._target

    def on(self, seen: WorkInterval) -> int:
        """Take note of an interval; return how many workers there should be from now on."""
        if self._says_something(seen):
            self._intervals.append(seen)
            count = len(self._intervals)
            num_batches = sum(interval.num_batches for interval in self._intervals)
            if count >= _ROUND_INTERVALS and (
                num_batches >= _ROUND_BATCHES or count >= _ROUND_INTERVALS_MAX
            ):
                found = _mean(self._intervals)
                self._intervals = []
                self._decide(found)
        return self._target

    def _says_something(self, seen: WorkInterval) -> bool:
        """Whether an interval shows what the present number of workers can do."""
        if seen.num_workers != self._target:
            self._num_starting += 1
            if self._num_starting > _STARTING_MAX:
                self._move(self._clamp(seen.num_workers), trial=None)
            return False
        self._num_starting = 0
        if self._skip_next:
            # Part of its work was begun under the old number.
            self._skip_next = False
            return False
        is_paused = seen.num_batches == 0 and seen.wait_share < _WAIT_MIN
        return not is_paused and seen.seconds > 0

    # -- decisions -----------------------------------------------------------------------------

    def _decide(self, found: _Round) -> None:
        trial, self._trial = self._trial, None
        self._pause_rounds = max(0, self._pause_rounds - 1)
        if trial is not None and not self._is_good(trial, found):
            self._take_back(trial)
            return
        if self._may_bisect(found):
            assert self._known_worse is not None
            self._try((self._known_worse + self._target) // 2, found)
        elif self._may_raise(found):
            self._try(self._target + self._num_more(found), found)
        else:
            self._lower_idle(found)

    def _is_good(self, trial: _CountTrial, found: _Round) -> bool:
        """Judge a trial: whether the number that was tried is to stay."""
        if not found.is_waiting:
            self._next_pause_rounds = _PAUSE_ROUNDS
            self._known_worse = None
            return True
        gain = _gain(trial, found, self._target)
        if self._target < trial.num_before:
            return gain <= _GAIN_MIN
        if gain < _GAIN_MIN:
            return False
        self._next_pause_rounds = _PAUSE_ROUNDS
        is_in_doubt = gain < _GAIN_FULL and self._target - trial.num_before > 1
        self._known_worse = trial.num_before if is_in_doubt else None
        return True

    def _take_back(self, trial: _CountTrial) -> None:
        """Return to the number before a trial, and stay there for a while."""
        if self._known_worse is not None:
            # A step of the bisection: not a failure, the limit lies above the number tried.
            self._known_worse = self._target
        else:
            self._pause_rounds = self._next_pause_rounds
            self._next_pause_rounds = min(2 * self._next_pause_rounds, _PAUSE_ROUNDS_MAX)
        self._move(trial.num_before, trial=None)

    def _may_bisect(self, found: _Round) -> bool:
        if self._known_worse is None or self._target - self._known_worse < 2:
            self._known_worse = None
            return False
        return found.is_waiting and found.busy_share >= _BUSY_MIN

    def _may_raise(self, found: _Round) -> bool:
        return (
            found.is_waiting
            and found.busy_share >= _BUSY_MIN
            and self._num_room(found) >= _SPARE_MIN
            and self._target < self._limits.most
            and not self._pause_rounds
        )

    def _num_more(self, found: _Round) -> int:
        """Return how many workers to add: what the loop asks for, as far as cores are idle."""
        if self._next_pause_rounds > _PAUSE_ROUNDS:
            return 1  # The last raise failed: a large one would disturb for nothing.
        num_busy = self._target * found.busy_share
        # The loop would take 1 / (1 - wait) times as many batches; at most twice as many at once.
        num_needed = ceil(min(num_busy / max(1 - found.wait_share, 0.01), 2.0 * self._target))
        return max(1, min(num_needed - self._target, int(self._num_room(found))))

    def _num_room(self, found: _Round) -> float:
        """Return how many more workers the idle cores can run.

        The loop uses its core for all of its time but its wait, and more with each worker added:
        a core that is idle because the loop waits is not to be given away twice.
        """
        loop_cores = (1 - found.wait_share) / self._target
        return found.idle_cores / (1 + loop_cores)

    def _lower_idle(self, found: _Round) -> None:
        num_busy = self._target * found.busy_share
        if num_busy > self._target - _IDLE_MIN or self._pause_rounds:
            self._idle_rounds = 0
            return
        self._idle_rounds += 1
        if self._idle_rounds >= _IDLE_ROUNDS:
            # The margin keeps rounding and a little noise from counting as a whole worker.
            self._try(ceil(num_busy - 0.1) + 1, found)

    def _try(self, number: int, found: _Round) -> None:
        number = self._clamp(number)
        if number != self._target:
            trial = _CountTrial(num_before=self._target, batches_s=found.batches_s)
            self._move(number, trial=trial)

    def _move(self, number: int, *, trial: _CountTrial | None) -> None:
        self._target, self._trial = number, trial
        self._intervals = []
        self._idle_rounds = self._num_starting = 0
        self._skip_next = True

    def _clamp(self, number: int) -> int:
        return min(max(number, self._limits.least), self._limits.most)


def _mean(intervals: list[WorkInterval]) -> _Round:
    """Return the average of some intervals, by their length."""
    seconds = sum(interval.seconds for interval in intervals)
    return _Round(
        batches_s=sum(interval.num_batches for interval in intervals) / seconds,
        wait_share=sum(i.wait_share * i.seconds for i in intervals) / seconds,
        busy_share=sum(i.busy_share * i.seconds for i in intervals) / seconds,
        idle_cores=sum(i.idle_cores * i.seconds for i in intervals) / seconds,
    )


def _gain(trial: _CountTrial, found: _Round, number: int) -> float:
    """Return the share of a change of number that shows as a change of throughput."""
    if not trial.batches_s:
        return inf if found.batches_s else 0.0
    return (found.batches_s / trial.batches_s - 1) / (number / trial.num_before - 1)
