"""`penstock top`: the ranks of a run, live."""

from __future__ import annotations

import argparse
import contextlib
import select
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from penstock.cli.options import add_json
from penstock.cli.screen import Screen, can_move_cursor, print_json
from penstock.engine.snapshot import LiveRank
from penstock.errors import OptionError
from penstock.report.live.following import FollowedRun
from penstock.report.live.scraping import ScrapedRun
from penstock.report.live.screen import PageLine, page_of_ranks

_ONCE_S = 1.0
"""Between the two looks at endpoints that a rate needs."""
_EXAMPLE = """\
Examples
  penstock top runs/a
  penstock top runs/a --once
  penstock top http://node1:9400 http://node1:9401
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Show the ranks of a run while it goes on: samples a second, how long they wait,\n"
        "where they read from, which rank is the slowest. A run is the folder of its\n"
        "trace (trace= of a loader, or penstock trace), or the endpoints of its ranks\n"
        "(PENSTOCK_METRICS_PORT). Figures are those of the last 10 s. q ends it."
    )
    parser.epilog = _EXAMPLE
    parser.add_argument("run", metavar="RUN", nargs="+", help="folder of a trace, or URLs")
    parser.add_argument("--once", action="store_true", help="look once, and end")
    parser.add_argument(
        "--interval", metavar="S", type=float, default=1.0, help="seconds between looks (1)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Show the run."""
    if args.interval <= 0:
        raise OptionError(f"--interval must be more than 0 seconds, got {args.interval:g}")
    source = _source(args.run)
    title = args.run[0] if len(args.run) == 1 else f"{len(args.run)} endpoints"
    if args.json or args.once or not sys.stdout.isatty():
        ranks = _looked_once(source)
        if args.json:
            print_json({"ranks": [_as_json(rank) for rank in ranks]})
        else:
            _print(page_of_ranks(title, ranks, width=_width()))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        _live(source, title, args.interval)
    return 0


def _source(words: Sequence[str]) -> FollowedRun | ScrapedRun:
    are_urls = [word.startswith(("http://", "https://")) for word in words]
    if all(are_urls):
        return ScrapedRun(words)
    if len(words) > 1:
        raise OptionError(
            f"top shows one folder or some URLs, got {' '.join(words)}; a folder holds all ranks "
            "of a run"
        )
    return FollowedRun(words[0])


def _looked_once(source: FollowedRun | ScrapedRun) -> list[LiveRank]:
    ranks = source.look()
    if isinstance(source, ScrapedRun):
        time.sleep(_ONCE_S)
        ranks = source.look()
    return ranks


def _width() -> int:
    """Return all columns of the terminal: ranks have many figures."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 80


def _print(lines: Sequence[PageLine]) -> None:
    screen = Screen()
    for line in lines:
        screen.line(*line)


def _live(source: FollowedRun | ScrapedRun, title: str, interval_s: float) -> None:
    """Show it until q or Ctrl-C; on a terminal that cannot move its cursor, page after page."""

    def page() -> list[PageLine]:
        size = shutil.get_terminal_size()
        try:
            ranks = source.look()
        except OptionError as error:
            return [[("penstock top", "bold"), f"  waiting: {error}"]]  # It may begin later.
        return page_of_ranks(title, ranks, width=size.columns, height=size.lines - 1)

    if not can_move_cursor(sys.stdout):
        while True:
            _print([*page(), []])
            time.sleep(interval_s)
    from rich.console import Console
    from rich.live import Live

    shown: list[PageLine] = []
    try:
        with (
            _keys() as has_key,
            Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live,
        ):
            while True:
                shown = page()
                live.update(_rich(shown), refresh=True)
                if has_key(interval_s):
                    return
    finally:
        _print(shown)  # What was seen last stays to be read.


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Give a function that waits for `q` so many seconds; keys come one by one meanwhile."""
    if not sys.stdin.isatty():
        yield time.sleep
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)

    def has_q(seconds: float) -> bool:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return bool(ready) and sys.stdin.read(1) in ("q", "Q", "")

    try:
        tty.setcbreak(sys.stdin)
        yield has_q
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _rich(lines: Sequence[PageLine]) -> Any:
    from rich.text import Text

    return Text("\n").join(Text.assemble(*line) for line in lines)


def _as_json(rank: LiveRank) -> dict[str, Any]:
    now = msgspec.to_builtins(rank.now)
    return {
        **now,
        "stall_share": rank.now.counts.stall_share,
        "recent": {
            **msgspec.to_builtins(rank.recent),
            "samples_per_s": rank.samples_per_s,
            "stall_share": rank.recent.stall_share,
            "reads_in_flight": rank.recent.reads_in_flight,
            "decodes_at_a_time": rank.recent.decodes_at_a_time,
        },
    }
