"""Shows the demo: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from examples.demo.view import DemoView

from penstock.cli.screen import Screen, Span, can_move_cursor, can_style
from penstock.units import show_seconds

_REFRESH_PER_S = 8
_LOG_LINES = 8
"""How many lines the whole training writes into a log."""
_NAME_WIDTH = 8


class DemoScreen:
    """Prints the scenes of the story, one under the other."""

    def __init__(self, num_scenes: int) -> None:
        self.screen = Screen()
        self._num_scenes = num_scenes
        self._scene = 0
        self._began_s = time.monotonic()

    def scene(self, name: str, *spans: Span) -> None:
        """Begin the next scene."""
        self._scene += 1
        number = f"{self._scene}/{self._num_scenes}"
        self.screen.line((f"{number}  ", "dim"), (f"{name:<{_NAME_WIDTH}}", "bold"), *spans)

    def note(self, *spans: Span) -> None:
        """Print a line that belongs to the scene."""
        self.screen.line("     ", *spans)

    @contextmanager
    def counting(self, title: str) -> Iterator[Callable[[int, int], None]]:
        """Give a function that shows `done` of `total` on a terminal, and nothing elsewhere."""
        stream = self.screen.stream
        if not can_move_cursor(stream):
            yield lambda done, total: None
            return
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        console = Console(file=stream, no_color=not can_style(stream), highlight=False)
        with Live(
            Text(""), console=console, refresh_per_second=_REFRESH_PER_S, transient=True
        ) as live:
            yield lambda done, total: live.update(Text(f"     {title} {done:,} of {total:,}"))

    @contextmanager
    def showing(self, view: DemoView) -> Iterator[Callable[[], None]]:
        """Give a function to call when the view has changed."""
        stream = self.screen.stream
        if not can_move_cursor(stream):
            yield _ProgressLines(self.screen, view).changed
            return
        from rich.console import Console, Group
        from rich.live import Live
        from rich.text import Text

        def drawn() -> Group:
            return Group(*(Text.assemble(*spans) for spans in view.lines(self.screen.width)))

        console = Console(file=stream, no_color=not can_style(stream), highlight=False)
        with Live(
            get_renderable=drawn,
            console=console,
            refresh_per_second=_REFRESH_PER_S,
            transient=True,
        ):
            yield lambda: None  # rich draws it by the clock, not at events.

    def elapsed(self) -> str:
        """Return the time since the story began."""
        return show_seconds(time.monotonic() - self._began_s)


class _ProgressLines:
    """Writes the view as a line when another eighth of the steps is done."""

    def __init__(self, screen: Screen, view: DemoView) -> None:
        self._screen, self._view = screen, view
        self._written: int | None = None

    def changed(self) -> None:
        if not self._view.losses:
            return
        part = self._view.step * _LOG_LINES // self._view.num_steps
        if self._written is not None and part > self._written:
            self._screen.line("     ", self._view.summary())
        self._written = part
