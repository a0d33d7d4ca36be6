"""`penstock compare`: two traced runs side by side."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from penstock.cli.options import add_json
from penstock.cli.report import write_page
from penstock.cli.screen import Screen, cut, print_json
from penstock.errors import OptionError

_EXAMPLE = """\
Examples
  penstock compare runs/before runs/after
  penstock compare runs/before runs/after --html compared.html
"""

_BEFORE = 3
"""Characters that two texts share, and that are shown before those in which they differ."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Compare two traced runs: which settings differ, how much faster the second is,\n"
        "whether that is more than steps vary anyway, and which part of a step changed."
    )
    parser.epilog = _EXAMPLE
    parser.add_argument("first", metavar="RUN", type=Path, help="the folder of a trace")
    parser.add_argument("second", metavar="RUN", type=Path, help="another one")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page as well")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the comparison."""
    from penstock.report.analysis.analyze import analyze
    from penstock.report.analysis.compare import compare, compare_page
    from penstock.trace import read_trace

    if args.first.resolve() == args.second.resolve():
        raise OptionError(f"{args.first} is compared with itself; name two runs")
    first, second = (analyze(read_trace(folder)) for folder in (args.first, args.second))
    names = _names(args.first.resolve(), args.second.resolve())
    found = compare(first, second, names)
    if args.html is not None:
        write_page(compare_page(first, second, found), args.html)
    if args.json:
        print_json(found.as_json)
        return 0
    screen = Screen()
    for line in textwrap.wrap(found.sentence, screen.width):
        screen.line(line)
    screen.heading("Figures")
    rows = [[f.name, f.text(f.first), f.text(f.second), f.change] for f in found.figures]
    screen.table(["", *names, "change"], rows, right=(1, 2, 3))
    if found.settings:
        screen.heading("Settings that differ")
        label = max(len(name) for name, *_ in found.settings)
        wide = (screen.width - label - 6) // 2
        rows = [[name, *_cut_where_they_differ(a, b, wide)] for name, a, b in found.settings]
        screen.table(["", *(cut(name, wide) for name in names)], rows)
    return 0


def _cut_where_they_differ(first: str, second: str, width: int) -> tuple[str, str]:
    """Return two texts that are not wider than `width` and show where they begin to differ.

    >>> _cut_where_they_differ("python train.py --lr 1", "python train.py --lr 2", 10)
    ('…py --lr 1', '…py --lr 2')
    """
    longest = max(len(first), len(second))
    pairs = enumerate(zip(first, second, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
    skipped = min(same - _BEFORE, longest - width + 1)
    if longest <= width or skipped <= 0:
        return cut(first, width), cut(second, width)
    return cut(f"…{first[skipped:]}", width), cut(f"…{second[skipped:]}", width)


def _names(first: Path, second: Path) -> tuple[str, str]:
    """Return the shortest names that tell two folders apart."""
    if first.name != second.name:
        return first.name, second.name
    return str(first), str(second)
