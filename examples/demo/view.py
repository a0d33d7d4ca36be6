"""The view of a training run: a few numbers and their course. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from examples.demo.messages import Event, RankReady, StepDone

from penstock.cli.screen import Span
from penstock.units import show_bytes, show_count, show_seconds

_HEIGHTS = "▁▂▃▄▅▆▇█"
_RECENT = 16
"""The accuracy is the mean over this many steps."""
_SPARK_WIDTH = 34


class DemoView:
    """Turns the events of training processes into lines."""

    def __init__(self) -> None:
        self.ready: RankReady | None = None
        self.losses: list[float] = []
        self.rates: list[float] = []
        """Share of samples recognised, by step."""
        self._steps: dict[int, deque[StepDone]] = {}
        """The latest steps of each rank."""

    def add(self, event: Event) -> None:
        """Record an event of a process."""
        if isinstance(event, RankReady) and event.rank == 0:
            self.ready = event
        elif isinstance(event, StepDone):
            recent = self._steps.setdefault(event.rank, deque(maxlen=_RECENT))
            recent.append(event)
            if event.rank == 0:
                self.losses.append(event.loss)
                self.rates.append(event.right / max(1, event.samples))

    @property
    def step(self) -> int:
        """Steps done, with those of the checkpoint."""
        if 0 in self._steps:
            return self._steps[0][-1].step
        return self.ready.first_step if self.ready else 0

    @property
    def num_steps(self) -> int:
        """Steps of the whole training."""
        return self.ready.num_steps if self.ready else 1

    @property
    def speed(self) -> float:
        """Samples a second in the latest steps, of all ranks."""
        total = 0.0
        for steps in self._steps.values():
            samples = steps[-1].samples_total - steps[0].samples_total
            total += samples / max(1e-9, steps[-1].elapsed_s - steps[0].elapsed_s)
        return total

    @property
    def _latest(self) -> list[StepDone]:
        return [steps[-1] for steps in self._steps.values()]

    @property
    def stall_share(self) -> float:
        """The share of the time in which ranks waited for data."""
        elapsed_s = sum(s.elapsed_s for s in self._latest)
        return sum(s.stall_s for s in self._latest) / elapsed_s if elapsed_s else 0.0

    @property
    def accuracy(self) -> float:
        """Share of samples recognised in the latest steps."""
        recent = self.rates[-_RECENT:]
        return sum(recent) / len(recent) if recent else 0.0

    def lines(self, width: int) -> list[list[Span]]:
        """Return the view as it is now."""
        if not self._steps:
            return [["     ", ("starting …", "dim")]]
        recent = self.losses[-_RECENT:]
        speed = f"{show_count(round(self.speed))} samples/s, " if self.speed else ""
        waits = f"waited {self.stall_share:.1%} of the time for data"
        return [
            self._bar(width),
            _line(
                "loss", f"{sum(recent) / len(recent):<8.3f}", sparkline(self.losses, _SPARK_WIDTH)
            ),
            _line("accuracy", f"{self.accuracy:<8.1%}", sparkline(self.rates, _SPARK_WIDTH)),
            _line("speed", speed + waits),
            _line("read", self._reads()),
        ]

    def _bar(self, width: int) -> list[Span]:
        text = f"  step {self.step} of {self.num_steps}"
        room = width - 6 - len(text)
        full = min(room, round(room * self.step / self.num_steps))
        return ["     ", ("━" * full, "green"), ("─" * (room - full), "bright_black"), text]

    def _reads(self) -> str:
        totals: dict[str, tuple[int, int]] = {}
        for step in self._latest:
            for name, (size, reads) in step.sources.items():
                before = totals.get(name, (0, 0))
                totals[name] = (before[0] + size, before[1] + reads)
        parts = [
            f"{show_bytes(size)} from {name} in {show_count(reads)} reads"
            for name, (size, reads) in totals.items()
        ]
        decode_s = sum(s.decode_s for s in self._latest)
        return ", ".join([*parts, f"{show_seconds(decode_s)} of decoding"])

    def summary(self) -> str:
        """Return the view in one line, for a log and for what stays on the screen."""
        return (
            f"step {self.step} of {self.num_steps}: loss {self.losses[-1]:.3f}, accuracy "
            f"{self.accuracy:.1%}, {show_count(round(self.speed))} samples/s, "
            f"waited {self.stall_share:.1%}"
        )


def _line(name: str, value: str, drawn: str = "") -> list[Span]:
    spans: list[Span] = ["     ", (f"{name:<9}", "dim"), value]
    return [*spans, ("  " + drawn, "cyan")] if drawn else spans


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the course of some values in one line; many are averaged to fit.

    >>> sparkline([1, 2, 3, 4], 4), sparkline([2, 2], 4), sparkline([], 4)
    ('▁▃▆█', '▁▁', '')
    """
    if not values:
        return ""
    means = [float(part.mean()) for part in np.array_split(values, min(width, len(values)))]
    low, high = min(means), max(means)
    scale = (len(_HEIGHTS) - 1) / (high - low) if high > low else 0.0
    return "".join(_HEIGHTS[round((m - low) * scale)] for m in means)
