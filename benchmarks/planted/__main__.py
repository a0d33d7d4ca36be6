"""Does a verdict name the bottleneck that was planted, and does its first advice gain as predicted?

    python -m benchmarks.planted [--cases 30] [--seed 0] [--only KIND ...] [--rounds 3]
                                 [--json FILE] [--keep FOLDER] [--data FOLDER]

Cases go through the kinds in turns, each with parameters of its own. A case takes one traced run
and three runs (`--rounds`) of each of: the planted job, the job without the bottleneck, the job
that follows the first advice. A slow disk and a slow network need root.
"""

import argparse
import random
import tempfile
from pathlib import Path

from benchmarks.planted.data import Sets
from benchmarks.planted.kinds import KINDS
from benchmarks.planted.run import as_json, scored, table, totals


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.planted", description=__doc__)
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=sorted(KINDS), default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=3, help="0: verdicts only")
    parser.add_argument("--json", type=Path, help="write rows here, after every case")
    parser.add_argument("--keep", type=Path, help="keep traces below this folder")
    parser.add_argument("--data", type=Path, help="keep data sets here for the next time")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="planted-sets-") as scratch:
        sets = Sets(args.data or Path(scratch))
        for number in range(args.cases):
            kind = args.only[number % len(args.only)]
            # A number of its own: a case stays the same when others are left out.
            seed = f"{args.seed} {kind} {number // len(args.only)}"
            case = KINDS[kind](random.Random(seed), sets)
            keep = args.keep / f"{number:03}-{kind}" if args.keep else None
            rows.append(scored(case, sets, rounds=args.rounds, keep=keep))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            if args.json:
                args.json.write_text(as_json(rows))
    print(f"\n{table(rows)}\n\n{totals(rows)}")


if __name__ == "__main__":
    main()
