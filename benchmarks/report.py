"""Small comparisons: tasks that are run once a round and print the round of median time."""

import argparse
import json
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from benchmarks import many
from benchmarks.compare import conditions
from benchmarks.peers import PEERS
from benchmarks.peers.setup import ROOT
from benchmarks.process import DATA, ask, ensure_written, folder_of, task_for
from benchmarks.works import WORKS

Key = tuple[str, str, str]
"""Peer, variant, and the case of it that is asked about."""


def options_of(doc: str) -> Namespace:
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--root", type=lambda path: Path(path).resolve(), default=ROOT / ".peers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", type=lambda names: names.split(","), default=["ours", *PEERS])
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.rounds = 1 if options.quick else options.rounds
    return options


def many_folder(root: Path, format_name: str, peer: str) -> Path:
    """Return the folder of the large set in one format, written unless it is there."""
    folder = root / DATA / "many" / format_name
    if not folder.exists():
        ensure_written(root, peer, WORKS["tokens"])
        shutil.rmtree(partial := folder.with_name(f"{format_name}.partial"), ignore_errors=True)
        partial.mkdir(parents=True)
        many.write(format_name, folder_of(root, WORKS["tokens"], format_name), partial)
        partial.rename(folder)
    return folder


def run(
    doc: str,
    options: Namespace,
    tasks: dict[Key, tuple],
    columns: dict[str, Callable[[dict], str]],
    *,
    known: dict[Key, dict] | None = None,
    timeout_s: float,
) -> None:
    """Take turns for some rounds, then print each task's round of median first-batch time."""
    results: dict[Key, list[dict]] = {key: [] for key in tasks}
    for number in range(options.rounds):
        for (peer, variant, case), (mode, work, more) in tasks.items():
            print(f"round {number + 1}: {peer} {variant} {case}", file=sys.stderr, flush=True)
            task = task_for(options.root, peer, work, variant, mode) | more
            results[peer, variant, case].append(ask(options.root, task, timeout_s=timeout_s))
    rows = {key: middle(of) | (known or {}).get(key, {}) for key, of in results.items()}
    print(f"{doc.splitlines()[0]}\n{conditions()}\n")
    print(f"| loader | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    for key, row in rows.items():
        name = " ".join(filter(None, (*key[:2], row.get("version", ""), key[2])))
        cells = [show(row) for show in columns.values()] if "failed" not in row else None
        print(f"| {name} | {' | '.join(cells or ['failed: ' + row.get('failed', '')])} |")
    if options.json:
        listed = [{"key": key, "median": rows[key], "rounds": results[key]} for key in rows]
        report = {"question": doc.splitlines()[0], "conditions": conditions(), "rows": listed}
        options.json.write_text(json.dumps(report, indent=1))


def middle(results: list[dict]) -> dict:
    """Return the result of median time among those that came to one."""
    good = sorted((r for r in results if "failed" not in r), key=lambda r: r["first_batch_s"])
    return good[len(good) // 2] if good else results[-1]
