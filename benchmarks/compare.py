"""Comparing: limit, Penstock and peers take turns, and each number is a median over rounds.

The machine may be shared and uneven, so nobody is measured in a block: a round measures everyone
once and the limits several times, and a rate is divided by the limit of its own round.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import table
from benchmarks.peers import EVERYONE, PEERS
from benchmarks.peers.setup import ROOT
from benchmarks.process import ask, ensure_written, folder_of, task_for, warm
from benchmarks.works import WORKS, Work

WINDOW_SLACK_S = 90
CHECK_TIMEOUT_S = 600
QUICK_SECONDS = 0.5
LIMITS_EVERY = 6
TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asks for."""

    root: Path
    rounds: int
    seconds: float
    peers: tuple[str, ...]
    variants: tuple[str, ...]
    check: bool
    json: Path | None
    others: float
    """The share of the machine that other programs may take during a window."""


def compare(name: str, question: str) -> None:
    """Answer the question of one work on the command line."""
    work, options = WORKS[name], options_of(question)
    rows = {row: [] for peer in ("limit", *options.peers) for row in rows_of(peer, work, options)}
    broken = {row: why for row in rows if (why := prepare(options, work, row))}
    for number in range(options.rounds):
        for row in turns(rows, broken):
            print(f"round {number + 1}: {' '.join(row)}", file=sys.stderr, flush=True)
            result = measure_in_peace(options, work, row)
            rows[row].append(result | {"round": number})
    summary = table.summarize(rows, broken)
    print(table.text(question, work, summary, conditions()))
    if options.json:
        report = {"work": name, "conditions": conditions(), "rows": summary}
        options.json.write_text(json.dumps(report, indent=1))


def options_of(question: str) -> Options:
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--root", type=Path, default=ROOT / ".peers", help="work folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a window")
    parser.add_argument("--peers", default=",".join(["ours", *PEERS]))
    parser.add_argument("--variants", default="", help="only these variants, as w0,t2")
    parser.add_argument("--quick", action="store_true", help="one round of short windows")
    parser.add_argument("--check", action="store_true", help="first, a whole epoch of each")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--others", type=float, default=1.0, help="repeat a turn if others took more"
    )
    given = parser.parse_args()
    return Options(
        root=given.root.resolve(),
        rounds=1 if given.quick else given.rounds,
        seconds=QUICK_SECONDS if given.quick else given.seconds,
        peers=tuple(given.peers.split(",")),
        variants=tuple(filter(None, given.variants.split(","))),
        check=given.check,
        json=given.json,
        others=given.others,
    )


def rows_of(peer: str, work: Work, options: Options) -> list[tuple[str, str]]:
    chosen = EVERYONE[peer].variants[work.name]
    if options.variants and peer in PEERS:
        chosen = [variant for variant in chosen if variant in options.variants]
    return [(peer, variant) for variant in chosen]


def turns(rows: dict, broken: dict) -> list[tuple[str, str]]:
    """Return the order within a round: the limits come again and again, because load drifts."""
    well = [row for row in rows if row not in broken]
    limits = [row for row in well if row[0] == "limit"]
    others = [row for row in well if row[0] != "limit"]
    order = []
    for at in range(0, len(others), LIMITS_EVERY):
        order += [*limits, *others[at : at + LIMITS_EVERY]]
    return [*order, *limits]


def prepare(options: Options, work: Work, row: tuple[str, str]) -> str | None:
    """Write what a row reads and, where asked, check an epoch; return why it cannot be measured."""
    peer, variant = row
    result = ensure_written(options.root, peer, work)
    if "failed" not in result and options.check:
        task = task_for(options.root, peer, work, variant, "check")
        result = ask(options.root, task, timeout_s=CHECK_TIMEOUT_S)
        print(f"checked {peer} {variant}: {result}", file=sys.stderr, flush=True)
        faults = [f"{result[name]} {name}" for name in FAULTS if result.get(name)]
        if faults:
            return f"an epoch of {work.num_samples} has {', '.join(faults)}"
    return result.get("failed")


FAULTS = ("missing", "repeated", "wrong")


def measure_in_peace(options: Options, work: Work, row: tuple[str, str]) -> dict:
    """Return a window that other programs left alone, else the best of a few."""
    tries = []
    for _ in range(TRIES):
        tries.append(measure(options, work, row))
        if tries[-1].get("others", 0) <= options.others:
            return tries[-1]
    return min(tries, key=lambda result: result.get("others", 1))


def measure(options: Options, work: Work, row: tuple[str, str]) -> dict:
    """Return one window of one row; a failed one is a result too."""
    peer, variant = row
    warm(folder_of(options.root, work, EVERYONE[peer].formats[work.name]))
    task = task_for(options.root, peer, work, variant, "measure", seconds=options.seconds)
    result = ask(options.root, task, timeout_s=options.seconds + WINDOW_SLACK_S)
    if result.get("wrong"):
        return {"failed": f"{result['wrong']} samples differ from the source"}
    return result


def conditions() -> dict:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "load": round(statistics.mean(os.getloadavg()), 1),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
