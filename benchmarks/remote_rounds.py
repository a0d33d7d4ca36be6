"""Rounds of runs against the store: everybody takes turns, and each number is a median.

A question says which rows it has, how one is measured and which columns it prints.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.compare import conditions
from benchmarks.peers.setup import ROOT
from benchmarks.peers_remote import REMOTE
from benchmarks.remote import SAMPLE_BYTES, WORK, folder_of
from benchmarks.remote_run import EPOCHS, Row, ensure_written

Columns = dict[str, Callable[[Row, dict], str]]
FLAGS = {
    "quick": "one round, few cache sizes: does it work?",
    "check": "compare every byte of every sample with its source, which takes time and memory",
}


def options_of(doc: str, *, rounds: int, timeout_s: float) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    for name, meaning in FLAGS.items():
        parser.add_argument(f"--{name}", action="store_true", help=meaning)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--timeout", type=float, default=timeout_s, help="seconds for one run")
    for name, default in (("peers", ",".join(REMOTE)), ("variants", ""), ("shares", "")):
        parser.add_argument(f"--{name}", default=default, help="only these, between commas")
    parser.add_argument("--json", type=Path, help="a file for all numbers of all rounds")
    parser.add_argument("--root", type=Path, default=ROOT / ".peers", help="data and environments")
    options = parser.parse_args()
    options.root = options.root.resolve()
    options.rounds = 1 if options.quick else options.rounds
    return options


def rows_of(question: str, options: argparse.Namespace, shares: tuple[float, ...]) -> list[Row]:
    """Return who is asked about which cache; those named in the options if any are."""
    if options.shares:
        shares = tuple(float(percent) / 100 for percent in options.shares.split(","))
    rows = []
    for peer in filter(REMOTE.get, options.peers.split(",")):
        given = options.variants.split(",") if options.variants else []
        variants = REMOTE[peer].variants[question]
        chosen = [v for v in given if fits(peer, v, variants)] if given else variants
        rows += [Row(peer=peer, variant=v, share=share) for share in shares for v in chosen]
    return without_repeats(rows) or sys.exit(f"there are {', '.join(REMOTE)}; none was chosen")


def fits(peer: str, variant: str, variants: tuple[str, ...]) -> bool:
    """Tell whether a variant is one of a peer's, be it one that only runs when asked for."""
    workers, _, how = variant.partition("-")
    own = {known.partition("-")[0][:1] for known in variants}
    return variant in variants or (workers[:1] in own and how in ("", *REMOTE[peer].notes))


def without_repeats(rows: list[Row]) -> list[Row]:
    """Leave out what would be measured twice: loaders without a cache, tiers of nothing."""
    kept: dict[tuple, Row] = {}
    for row in rows:
        if row.peer == "torch":
            kept.setdefault(
                (row.peer, row.variant), Row(peer="torch", variant=row.variant, share=0)
            )
        elif row.peer == "ours" and row.share == 0:
            kept.setdefault((row.peer, 0), Row(peer="ours", variant="none", share=0))
        else:
            kept[row.peer, row.variant, row.share] = row
    return list(kept.values())


def take_turns(
    options: argparse.Namespace, rows: list[Row], measured: Callable[[Row], dict]
) -> dict[Row, list[dict]]:
    """Return the results of each row, round by round."""
    broken = {peer: ensure_written(options.root, peer) for peer in {row.peer for row in rows}}
    results: dict[Row, list[dict]] = {row: [] for row in rows}
    for number in range(options.rounds):
        for row in rows:
            print(f"round {number + 1}: {row}", file=sys.stderr, flush=True)
            why = broken[row.peer]
            result = {"failed": why} if why else measured(row)
            results[row].append(result)
            if "failed" in result:
                print(f"  {result['failed']}", file=sys.stderr, flush=True)
    return results


def middle(results: list[dict]) -> dict:
    """Return medians, those of lists place by place; what is not a number is the last one's."""
    good = [result for result in results if "failed" not in result]
    if not good:
        return results[-1]
    medians = dict(good[-1])
    for name, value in good[-1].items():
        every = [result[name] for result in good]
        if isinstance(value, int | float):
            medians[name] = median(every)
        elif isinstance(value, list) and value and isinstance(value[0], int | float):
            medians[name] = [median(at) for at in zip(*every, strict=True)]
    return medians | {"runs": len(good), "failures": len(results) - len(good)}


def report(
    question: str, options: argparse.Namespace, results: dict[Row, list[dict]], columns: Columns
) -> None:
    """Print the table, say how each loader was set up, and write all numbers down if asked to."""
    middles = {row: middle(of) for row, of in results.items()}
    said = ", ".join(f"{name} {value}" for name, value in conditions().items())
    print(f"{question}\n{WORK.num_samples:,} samples of {SAMPLE_BYTES:,} bytes, ", end="")
    print(f"batch {WORK.batch_size}, {EPOCHS} epochs; median of {options.rounds}; {said}")
    print("checked: every byte of every sample\n" if options.check else "")
    print(f"| loader | cache | {' | '.join(columns)} |\n|---|---:|{'---:|' * len(columns)}")
    for row, result in middles.items():
        name = f"{row.peer} {row.variant} {result.get('version', '')}".strip()
        cells = [show(row, result) for show in columns.values()] if "version" in result else None
        print(f"| {name} | {row.share:.0%} | {' | '.join(cells or [result['failed']])} |")
    print()
    for peer in dict.fromkeys(row.peer for row in results):
        variants = {row.variant.partition("-")[2] for row in results if row.peer == peer}
        notes = [f"{name}: {text}" for name, text in REMOTE[peer].notes.items() if name in variants]
        print(
            "- " + "; ".join([f"{peer}: {REMOTE[peer].shuffle}", REMOTE[peer].notes["all"], *notes])
        )
    print(f"- ours: {index_cost(options.root)}")
    if options.json:
        listed = [
            {"row": str(row), "median": middles[row], "rounds": of} for row, of in results.items()
        ]
        options.json.write_text(
            json.dumps({"question": question, "conditions": conditions(), "rows": listed})
        )


def index_cost(root: Path) -> str:
    """Say what making the index of the shards took, which is done once and not part of a run."""
    cost = folder_of(root, "index") / "cost.json"
    if not cost.exists():
        return "no index was made"
    made = json.loads(cost.read_text())
    return f"the index was made before: {made['body_bytes']:,} bytes, {made['requests']:,} requests"


# -- cells -----------------------------------------------------------------------------------


def above(name: str, base: str) -> Callable[[Row, dict], str]:
    """Return what shows how many megabytes one number of bytes is above another."""
    return lambda _, result: f"{(result[name] - result[base]) / 1e6:,.0f}"


def megabytes(name: str) -> Callable[[Row, dict], str]:
    return number(name, ",.0f", per=1e6)


def number(name: str, form: str, *, per: float = 1) -> Callable[[Row, dict], str]:
    """Return what shows a number, or a list of them, in some unit."""

    def show(_: Row, result: dict) -> str:
        values = result[name] if isinstance(result[name], list) else [result[name]]
        return " ".join(format(value / per, form) for value in values)

    return show


def samples_cell(_: Row, result: dict) -> str:
    """Say "all", or the epoch with the fewest distinct samples."""
    counts = result["epoch_samples"] + result["epoch_distinct"]
    return "all" if set(counts) == {WORK.num_samples} else f"{min(counts):,.0f}"
