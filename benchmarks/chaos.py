"""What goes wrong when everything may go wrong? Thousands of seeded schedules on small clusters.

    python -m benchmarks.chaos [--schedules 5000] [--first 0] [--nodes N] [--faults K]

Each schedule is a whole job in virtual time, over the flow, the membership and the homes of a real
one (`testkit.virtual_cluster`), with nodes killed, frozen, cut off, slow, corrupt or full, and a
store that refuses or lags. The limits are those of `testkit.virtual_cluster.check`: no sample
lost or doubled, one time-out for each fault, the inequality of bytes, agreement in the end. Every
schedule that fails is a line that plays it again.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from testkit.virtual_cluster import (
    ClusterJob,
    ClusterVerdict,
    ClusterWorld,
    judged,
    replay_line,
)

Outcome = tuple[int, list[str], bool, ClusterVerdict]


def played(seed: int, nodes: int | None, faults: int | None) -> Outcome:
    """Play one schedule: its faults, whether the store was among them, and what came of it."""
    job = ClusterJob.drawn(seed, nodes=nodes, faults=faults)
    verdict = judged(ClusterWorld(job))
    kinds = [fault.kind for fault in job.faults]
    return seed, kinds, any(fault.node < 0 for fault in job.faults), verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, help="the seed to begin with")
    parser.add_argument("--nodes", type=int, help="2 to 8; else drawn")
    parser.add_argument("--faults", type=int, help="drawn for each schedule; else 0 to 5")
    options = parser.parse_args()
    play = partial(played, nodes=options.nodes, faults=options.faults)
    seeds = range(options.first, options.first + options.schedules)
    began_s = time.monotonic()
    outcomes: list[Outcome] = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for outcome in pool.map(play, seeds, chunksize=20):
            outcomes.append(outcome)
            for failure in outcome[3].failures:
                line = replay_line(outcome[0], nodes=options.nodes, faults=options.faults)
                print(f"{line}\n    {failure}", flush=True)
    report(outcomes, time.monotonic() - began_s)
    return 1 if any(verdict.failures for *_, verdict in outcomes) else 0


def report(outcomes: list[Outcome], seconds: float) -> None:
    """Print how many there were, and the worst of them."""
    bad = sum(bool(verdict.failures) for *_, verdict in outcomes)
    kinds = Counter(kind for _, found, _, _ in outcomes for kind in found)
    hours = sum(verdict.time_s for *_, verdict in outcomes) / 3600
    print(
        f"{len(outcomes)} schedules, {hours:.1f} hours of cluster time in {seconds:.0f} s: "
        f"{bad} failed"
    )
    print("faults: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    struck = [(v.store_ratio, seed) for seed, found, _, v in outcomes if found]
    if struck:
        ratio, seed = max(struck)
        print(f"store bytes over what the inequality allows: {ratio:.3f} at worst (seed {seed})")
    for is_store, name in ((False, "without"), (True, "with")):
        some = [(v.wait_max_s, v.extra_share, s) for s, _, had, v in outcomes if had == is_store]
        if some:
            wait_s, _, seed = max(some)
            extra = max(share for _, share, _ in some)
            print(
                f"{name} a failing store: the longest wait for a batch {wait_s:.2f} s "
                f"(seed {seed}), at most {extra:.2f} data sets beyond the bound"
            )


if __name__ == "__main__":
    raise SystemExit(main())
