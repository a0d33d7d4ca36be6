"""`penstock verify`: reads all samples and names every problem."""

from __future__ import annotations

import argparse
import dataclasses
import time

from penstock.cli.opened import open_named, show_place
from penstock.cli.options import add_dataset, add_json
from penstock.cli.progress import ProgressBar
from penstock.cli.screen import Screen, print_json
from penstock.dataset.dataset import Dataset
from penstock.dataset.verify import VerifyProgress, VerifyReport, verify
from penstock.units import show_bytes, show_count, show_seconds

_EXAMPLE = """\
Examples
  penstock verify s3://bucket/train/
  penstock verify shards/ --no-decode          (bytes and checksums only)
  penstock verify shards/ --json | jq '.problems[].message'
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Check the index, the objects and every sample: sizes, checksums, decoding.\n"
        "The first problem stops nothing; all are named. Exit code 1 if there is any."
    )
    parser.epilog = _EXAMPLE
    add_dataset(parser, version=True)
    parser.add_argument("--no-decode", action="store_true", help="do not decode the fields")
    parser.add_argument(
        "--problems", type=int, default=20, metavar="N", help="problems to show (default: 20)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Verify, show the progress, and print all problems."""
    dataset = open_named(args, check=False).dataset
    began_s = time.monotonic()
    report = _verify(dataset, args)
    seconds = time.monotonic() - began_s
    if args.json:
        result = {"uri": dataset.uri, "version": dataset.version, "ok": report.ok}
        print_json(result | dataclasses.asdict(report) | {"seconds": round(seconds, 3)})
    else:
        _show(dataset, report, seconds)
    return 0 if report.ok else 1


def _verify(dataset: Dataset, args: argparse.Namespace) -> VerifyReport:
    with ProgressBar("verifying", "samples") as progress:

        def report(state: VerifyProgress) -> None:
            progress.update(state.samples_done, state.num_samples, size_bytes=state.size_bytes)

        return verify(dataset, decode=not args.no_decode, problems_max=args.problems, report=report)


def _show(dataset: Dataset, report: VerifyReport, seconds: float) -> None:
    screen = Screen()
    for problem in report.problems:
        screen.line((f"{problem.kind}: ", "red"), problem.message)
    if report.num_problems > len(report.problems):
        rest = report.num_problems - len(report.problems)
        screen.line((f"… and {show_count(rest)} more", "red"))
    if report.ok:
        screen.line(("sound", "bold green"), f"  {show_place(dataset.uri)}")
    else:
        what = "1 problem" if report.num_problems == 1 else f"{report.num_problems:,} problems"
        screen.line((what, "bold red"), f"  {show_place(dataset.uri)}")
    sums = show_count(report.num_checksums) if report.num_checksums else "none in this index"
    screen.pairs(
        {
            "version": str(dataset.version),
            "samples": f"{show_count(report.num_samples)}, {show_bytes(report.size_bytes)}",
            "objects": show_count(report.num_objects),
            "checksums": sums,
            "time": f"{show_seconds(seconds)}, {show_bytes(report.size_bytes / seconds)}/s",
        }
    )
