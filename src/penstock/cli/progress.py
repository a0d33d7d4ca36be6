"""Progress of a task: a bar on a terminal, a line now and then in a log.

It goes to stderr, because stdout belongs to the result. A log gets a line every ten seconds,
because a job that prints nothing for an hour looks like one that hangs.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from penstock.cli.screen import can_move_cursor, can_style
from penstock.units import show_bytes, show_count

_LINE_EVERY_S = 10.0


class ProgressBar:
    """A bar for one task. Nothing is drawn before the first `update`."""

    def __init__(self, title: str, unit: str) -> None:
        self._title, self._unit = title, unit
        self._began_s = self._line_s = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int, *, samples: int = 0, size_bytes: int = 0) -> None:
        """Show the progress: `done` of `total` units."""
        # A first update at once must not divide by zero.
        now_s = time.monotonic()
        elapsed_s = max(now_s - self._began_s, 1e-9)
        facts = [f"{show_count(samples)} samples"] if samples else []
        if size_bytes:
            facts += [show_bytes(size_bytes), f"{show_bytes(size_bytes / elapsed_s)}/s"]
        if can_move_cursor(sys.stderr):
            self._draw(done, total, "  ".join(facts))
        elif now_s - self._line_s >= _LINE_EVERY_S:
            self._line_s = now_s
            counted = f"{show_count(done)} of {show_count(total)} {self._unit}"
            print(f"{self._title}: {', '.join([counted, *facts])}", file=sys.stderr, flush=True)

    def _draw(self, done: int, total: int, facts: str) -> None:
        if self._bar is None:
            self._bar = _make_bar(self._unit)
            self._task = self._bar.add_task(self._title, total=total, facts=facts)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total, facts=facts)


def _make_bar(unit: str) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    return Bar(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn(f"{unit}  {{task.fields[facts]}}"),
        TimeElapsedColumn(),
        console=Console(stderr=True, no_color=not can_style(sys.stderr)),
        transient=True,
    )
