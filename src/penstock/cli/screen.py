"""Output with styles on a terminal, and plain text everywhere else.

A line is made of spans: texts, with or without the name of a style. Verbs need not know where their
output goes: styles vanish when it is no terminal, when NO_COLOR is set, or when `rich` is not
installed. Widths are computed here and not by rich, so that both kinds of output look the same.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TextIO

Span = str | tuple[str, str]
"""A text, or a text and a style: bold, dim, green, red, cyan, …"""

WIDTH_MAX = 80


def can_move_cursor(stream: TextIO) -> bool:
    """Return whether bars and live views work on a stream."""
    return (
        stream.isatty()
        and os.environ.get("TERM", "dumb") != "dumb"
        and importlib.util.find_spec("rich") is not None
    )


def can_style(stream: TextIO) -> bool:
    """Return whether bold and colours work on a stream."""
    return can_move_cursor(stream) and not os.environ.get("NO_COLOR")


class Screen:
    """Prints lines, pairs and tables to one stream."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream if stream is not None else sys.stdout
        self._console: Any = None
        if can_style(self.stream):
            from rich.console import Console

            self._console = Console(file=self.stream, highlight=False)

    @property
    def width(self) -> int:
        """Columns to use: the terminal's, at most 80; 80 where there is no terminal."""
        if not self.stream.isatty():
            return WIDTH_MAX
        return max(40, min(WIDTH_MAX, shutil.get_terminal_size().columns))

    def line(self, *spans: Span) -> None:
        """Print one line."""
        if self._console is None:
            self.stream.write(plain(spans) + "\n")
            self.stream.flush()
            return
        from rich.text import Text

        self._console.print(Text.assemble(*spans), soft_wrap=True)

    def heading(self, text: str) -> None:
        """Print a title with an empty line before it."""
        self.line()
        self.line((text, "bold"))

    def pairs(self, rows: Mapping[str, str]) -> None:
        """Print names and values in two columns."""
        wide = max(map(len, rows), default=0)
        for name, value in rows.items():
            self.line("  ", (f"{name:<{wide}}", "dim"), f"  {value}")

    def table(
        self, header: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[int] = ()
    ) -> None:
        """Print rows under a header; columns whose number is in `right` are flush right."""
        cells = [list(header), *map(list, rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
        for number, row in enumerate(cells):
            shown = [
                f"{cell:>{w}}" if i in right else f"{cell:<{w}}"
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ]
            text = cut("  " + "  ".join(shown).rstrip(), self.width)
            self.line((text, "dim") if number == 0 else text)


def plain(spans: Iterable[Span]) -> str:
    """Return the text of some spans.

    >>> plain(["a ", ("b", "bold")])
    'a b'
    """
    return "".join(span if isinstance(span, str) else span[0] for span in spans)


def cut(text: str, width: int) -> str:
    """Return a text cut to `width`, with a mark at the end if it was cut.

    >>> cut("abcdef", 4), cut("abc", 4)
    ('abc…', 'abc')
    """
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def print_json(value: Any) -> None:
    """Print a result as JSON; nothing else goes to stdout then."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    sys.stdout.flush()
