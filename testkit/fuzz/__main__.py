"""The command line of the fuzzer; see the package."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from testkit.fuzz.campaign import Finding, Tally, campaign
from testkit.fuzz.subjects import all_subjects
from testkit.fuzz.worker import Subjects, random_of


def main() -> int:
    """Try inputs and print what became of them; 1 if there is a finding."""
    names = list(all_subjects())
    parser = argparse.ArgumentParser(prog="python -m testkit.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="inputs in all; 10000")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--subject", action="append", choices=names, help="default: all")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one input, in this process")
    options = parser.parse_args()
    chosen = options.subject or names
    if options.only is not None:
        return _only(chosen[0], options.seed, options.only)
    print(
        f"{'subject':22}{'inputs':>8}{'read':>8}{'refused':>9}{'findings':>10}{'most MB':>9}"
        f"{'parsers ended':>15}"
    )
    tallies = campaign(chosen, count=options.count, seed=options.seed, num_workers=options.workers)
    for tally in tallies:
        print(_row(tally))
    findings = [finding for tally in tallies for finding in tally.findings]
    for finding in _distinct(findings):
        print(f"\n{finding}\n{finding.trace}")
    print(f"{sum(t.num_inputs for t in tallies)} inputs, {len(findings)} findings")
    return 1 if findings else 0


def _row(tally: Tally) -> str:
    counts = tally.counts
    return (
        f"{tally.subject:22}{tally.num_inputs:8}{counts['read']:8}{counts['refused']:9}"
        f"{len(tally.findings):10}{tally.memory_bytes / 1e6:9.0f}{tally.parser_deaths:15}"
    )


def _distinct(findings: list[Finding]) -> list[Finding]:
    """Return one finding of each kind and place."""
    return list({(f.subject, f.kind, f.place, f.text[:40]): f for f in findings}.values())


def _only(name: str, seed: int, number: int) -> int:
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as text:
        tried = Path(text) / "tried"
        tried.mkdir()
        subject = Subjects(Path(text)).named(name)
        subject.try_one(random_of(name, seed, number), tried)
    print("read")
    return 0


if __name__ == "__main__":
    sys.exit(main())
