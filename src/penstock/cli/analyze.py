"""`penstock analyze`: the method, step by step: from the parameters of a run to what to change."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.cli.options import add_json
from penstock.cli.screen import Screen, print_json
from penstock.errors import OptionError
from penstock.report.analysis.analyze import Analysis, analyze
from penstock.report.analysis.differential import DifferentialSplit, differential_split
from penstock.report.pages.text import (
    advice_lines,
    completeness_lines,
    parameter_lines,
    pattern_lines,
    phase_lines,
    scaling_lines,
    step_lines,
    verdict_lines,
)
from penstock.trace.reading import Trace, read_trace
from penstock.trace.schema import Kind
from penstock.units import show_seconds

_EXAMPLE = """\
Examples
  penstock analyze runs/today
  penstock analyze runs/today --against runs/differential
  penstock analyze -- python train.py --epochs 2
  penstock analyze runs/today --json | jq .verdict.sentence
"""
_WINDOW_MAX = 20
_APART_MAX = 0.2
"""Where the parts leave more of a step unexplained, the runs say little about each other."""
_WINDOWS = 4
"""Windows that a job with few steps should have: two of each kind."""


_RUNS = {
    "real": "as it is",
    "cached": "again, with files in the page cache",
    "differential": "with resident windows",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Explain a traced run: its parameters, phases and access pattern, where the time\n"
        "of a step goes, how it scales, what limits it, and what to change.\n"
        "With a command instead of a run, trace it three times: as it is, with cached\n"
        "data, and with resident windows, and split its waits by comparing them."
    )
    parser.epilog = _EXAMPLE
    parser.add_argument(
        "words", metavar="RUN | -- COMMAND", nargs="+", help="folder of a trace, or a job behind --"
    )
    parser.add_argument("--against", metavar="RUN", help="a differential run of the same job")
    parser.add_argument("--out", metavar="FOLDER", help="where traces of COMMAND go")
    parser.add_argument(
        "--window",
        metavar="K",
        type=int,
        default=0,
        help=f"steps of a resident window (default: {_WINDOW_MAX}, fewer in a short job)",
    )
    parser.add_argument("--tables", action="store_true", help="with --json: a row for each step")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Analyse a run, or run a job and analyse it."""
    folder = Path(args.words[0])
    if len(args.words) == 1 and not folder.is_dir() and shutil.which(args.words[0]) is None:
        raise OptionError(
            f"there is no folder {folder}; name the folder of a trace, or write a job behind --: "
            "penstock analyze -- python train.py"
        )
    if len(args.words) == 1 and folder.is_dir():
        against = None if args.against is None else read_trace(args.against)
        trace, cached = read_trace(folder), None
    else:
        trace, cached, against = _runs(args)
    analysis = analyze(trace, baseline=against)
    split = _split(analysis, against, cached)
    if against is not None and split is None:
        print(
            f"penstock: {against.folder} has no resident window, so waits are not split by "
            "comparison; take a longer job, or a smaller --window",
            file=sys.stderr,
        )
    if args.json:
        found = analysis.as_json(tables=args.tables)
        print_json(found | ({} if split is None else {"differential": asdict(split)}))
    else:
        _show(Screen(), analysis, split)
    return 0


def _runs(args: argparse.Namespace) -> tuple[Trace, Trace | None, Trace | None]:
    """Run the job as it is, again with its files cached, and with resident windows."""
    from penstock.trace.foreign.launch import TracedJob, run_job

    if args.window < 0:
        raise OptionError(f"--window takes a number of steps, not {args.window}")
    out = Path(args.out or time.strftime("penstock-analysis-%Y%m%d-%H%M%S")).absolute()
    command = tuple(args.words)
    traces: list[Trace] = []
    for name, what in _RUNS.items():
        print(f"penstock: run {len(traces) + 1} of 3: {what}", file=sys.stderr)
        window = (args.window or _window(traces[0])) if name == "differential" else 0
        job = TracedJob(
            command=command, folder=out / name, differential=window, prints_to_stderr=True
        )
        status = run_job(job)
        if status:
            raise OptionError(
                f"the command ended with status {status} in run {len(traces) + 1} ({what}); its "
                f"trace is in {out / name}"
            )
        traces.append(read_trace(out / name))
    print(f"penstock: the traces are in {out}", file=sys.stderr)
    real, cached, differential = traces
    return real, cached, differential


def _window(trace: Trace) -> int:
    """Return how many steps a window may have so that a job like this one has several."""
    steps = len(trace.of(Kind.NEXT)) // max(1, len(trace.ranks))
    return max(1, min(_WINDOW_MAX, steps // _WINDOWS))


def _split(
    analysis: Analysis, against: Trace | None, cached: Trace | None
) -> DifferentialSplit | None:
    if against is None:
        return None
    other = analyze(against)
    if other.interference.method != "differential":
        return None
    return differential_split(analysis, other, None if cached is None else analyze(cached))


def _show(screen: Screen, analysis: Analysis, split: DifferentialSplit | None) -> None:
    width = screen.width
    sections: list[tuple[str, list[str]]] = [
        ("Question: what limits this run, and what should change?", _question(analysis)),
        ("1. Parameters", parameter_lines(analysis, width)[1:]),
        ("2. Phases", phase_lines(analysis, width)[1:]),
        ("3. Access pattern", pattern_lines(analysis, width)[1:]),
        ("4. Where the time of a step goes", step_lines(analysis, width)[1:]),
    ]
    if split is not None:
        sections.append(("   By differential runs", _split_lines(split)))
    sections += [
        ("5. Scaling", scaling_lines(analysis, width)),
        ("6. Completeness", completeness_lines(analysis, width)[1:]),
        ("7. Verdict", verdict_lines(analysis, width)),
        ("8. Advice", advice_lines(analysis, width)[1:]),
    ]
    for title, lines in sections:
        screen.heading(title)
        for line in lines:
            screen.line(line)


def _question(analysis: Analysis) -> list[str]:
    return [
        f"  {analysis.folder}: {analysis.loader}, {_count(analysis.num_ranks, 'rank')}, "
        f"{_count(analysis.num_steps, 'step')} in {show_seconds(analysis.wall_s)}, "
        f"{analysis.samples_s:,.0f} samples/s"
    ]


def _count(number: int, of: str) -> str:
    return f"{number:,} {of}{'' if number == 1 else 's'}"


def _split_lines(split: DifferentialSplit) -> list[str]:
    values: dict[str, Any] = {
        "real data": split.real_s,
        "cached data": split.cached_s,
        "resident batch": split.resident_s,
        "  fetch": split.fetch_s,
        "  decode": split.decode_s,
        "  hand-over": split.hand_over_s,
        "  other waits": split.other_wait_s,
        "  interference": split.interference_s,
        "  copy": split.copy_s,
        "  communication": split.communicate_s,
        "  unexplained": split.unexplained_s,
    }
    lines = [f"  {name:<18}{show_seconds(value):>10} a step" for name, value in values.items()]
    if abs(split.unexplained_s) > _APART_MAX * split.real_s:
        lines += [
            "  The runs differ by more than these parts: other programs, or steps that are not",
            "  alike. Repeat it on a machine that does nothing else, and with more steps.",
        ]
    return lines
