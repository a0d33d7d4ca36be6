"""Does any sequence of legal rewrites change what a program means? For as long as one likes.

    python -m benchmarks.program_fuzz --seconds 600
    python -m benchmarks.program_fuzz --seed 4711 --programs 1      # the one that failed, again
    python -m benchmarks.program_fuzz --ranks 3                     # carried out by three processes

Random programs and random rewrites, carried out by the interpreter before and after; those that
have a plan must have one after each rewrite, too. Prints how many of each rewrite were legal; at
the first difference it prints the program, the schedule and the seed that makes both again, and
fails. With `--ranks` schedules are carried out by real processes, which `program_fuzz_ranks`
explains.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from random import Random

from testkit.programs import random_program
from testkit.rewrites import ARGUMENTS, applied, differences, random_rewrite, refused

from penstock.step.program.nodes import Program
from penstock.step.program.passes import PASSES


def fuzzed(seed: int, legal: Counter[str], tried: Counter[str], only: list[str]) -> list[str]:
    """Return what a program of this seed does differently after some rewrites."""
    rng = Random(seed)
    sample = random_program(rng, num_ops=rng.randint(4, 24))
    program: Program = sample.program
    has_plan = not refused(program)
    for _ in range(12):
        step = random_rewrite(rng, program, only)
        if step is None:
            continue
        tried[step.name] += 1
        after = applied(program, step)
        if after is None:
            continue
        legal[step.name] += 1
        program = after
        found = differences(sample, program)
        if has_plan and (why := refused(program)):
            found.append(f"there is no plan any more: {why}")
        if found:
            return [str(sample.program), str(program), program.script(), *found]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", type=int, default=1 << 30)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", nargs="*", default=[], help="rewrites to draw from")
    parser.add_argument("--go-on", action="store_true", help="count what fails, do not stop")
    parser.add_argument("--ranks", type=int, help="carry schedules out on so many processes")
    args = parser.parse_args()
    if args.ranks:
        from benchmarks import program_fuzz_ranks as on_ranks

        return (
            on_ranks.be_rank(args) if "RANK" in os.environ else on_ranks.launch(args, sys.argv[1:])
        )
    return in_one_process(args)


def in_one_process(args: argparse.Namespace) -> int:
    """Try programs with the interpreter alone."""
    legal: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    failed: list[int] = []
    begun, seed = time.monotonic(), args.seed
    while seed < args.seed + args.programs and time.monotonic() - begun < args.seconds:
        try:
            found = fuzzed(seed, legal, tried, args.only)
        except Exception as error:
            if not args.go_on:
                print(f"seed {seed}")
                raise
            found = [f"{type(error).__name__}: {error}"]
        if found:
            failed.append(seed)
            print(f"seed {seed}:", "\n".join(found[-1:] if args.go_on else found))
            if not args.go_on:
                return 1
        seed += 1
    print(f"{seed - args.seed} programs, {sum(tried.values())} rewrites, {len(failed)} differ")
    for name in (n for n in ARGUMENTS if n in PASSES):
        print(f"  {name:15} {legal[name]:6} legal of {tried[name]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
