"""`penstock report`: a traced run as a page, or in the terminal."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.options import add_json
from penstock.cli.screen import Screen, print_json
from penstock.errors import OptionError

if TYPE_CHECKING:
    from penstock.report.charts import Page

_EXAMPLE = """\
Examples
  penstock report runs/a                       (writes runs/a/report.html)
  penstock report runs/a --html a.html
  penstock report runs/a --text
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Explain a traced run: what limits it, what to change and what that would gain,\n"
        "where the time of a step goes, which rank and which source is late, how the data\n"
        "is read, how it scales. Writes one HTML page that needs no network."
    )
    parser.epilog = _EXAMPLE
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of the trace")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write the page here")
    parser.add_argument("--text", action="store_true", help="print the report instead")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write or print the report."""
    from penstock.report.analysis.analyze import analyze
    from penstock.report.pages.page import report_page
    from penstock.report.pages.text import report_text, verdict_text
    from penstock.trace import read_trace

    trace = read_trace(args.run)
    analysis = analyze(trace)
    if args.json:
        print_json(analysis.as_json())
    elif args.text:
        Screen().line(report_text(analysis))
    else:
        from penstock.report.analysis.outlook import outlook_sections

        target = args.html or args.run / "report.html"
        write_page(report_page(analysis, trace, outlook_sections(trace)), target)
        screen = Screen()
        screen.line(verdict_text(analysis, width=screen.width))
        screen.line(f"The report is in {target}")
    return 0


def write_page(page: Page, target: Path) -> None:
    """Write a page to a file."""
    from penstock.report.charts import page_html

    try:
        target.write_text(page_html(page), encoding="utf-8")
    except OSError as error:
        raise OptionError(
            f"the page cannot be written to {target}: {error.strerror}; name another file with "
            "--html"
        ) from None
