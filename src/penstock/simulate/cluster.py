"""Whole clusters under fault, in virtual time: the real flow, the real membership, the real homes.

Everything that decides is the code that runs in a job; only what carries is played: links, a store,
servers that park what they do not have yet, clients that give up what falls silent. Faults come
from a seeded schedule, so whatever goes wrong can be played again, to the last event:

    python -m penstock.simulate.cluster --seed 123 --nodes 4 --faults 3

`cluster_job` says what is to be done, `cluster_faults` what goes wrong, `cluster_world` plays it,
`cluster_check` says what must be true all the same.
"""

from __future__ import annotations

import argparse
import sys

from penstock.simulate.cluster_check import ClusterVerdict, judged
from penstock.simulate.cluster_job import ClusterJob
from penstock.simulate.cluster_world import ClusterWorld


def play(seed: int, *, nodes: int | None = None, faults: int | None = None) -> ClusterVerdict:
    """Play one schedule; everything about it follows from these numbers.

    >>> play(7, nodes=2, faults=0).failures
    ()
    """
    return judged(ClusterWorld(ClusterJob.drawn(seed, nodes=nodes, faults=faults)))


def replay_line(seed: int, *, nodes: int | None = None, faults: int | None = None) -> str:
    """Return the command that plays a schedule again.

    >>> replay_line(7, faults=2)
    'python -m penstock.simulate.cluster --seed 7 --faults 2'
    """
    options = {"nodes": nodes, "faults": faults}
    given = "".join(f" --{name} {value}" for name, value in options.items() if value is not None)
    return f"python -m penstock.simulate.cluster --seed {seed}{given}"


def main() -> int:
    """Play one schedule and say what came of it."""
    parser = argparse.ArgumentParser(description="Play one schedule of faults on a cluster.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--faults", type=int)
    options = parser.parse_args()
    job = ClusterJob.drawn(options.seed, nodes=options.nodes, faults=options.faults)
    world = ClusterWorld(job)
    verdict = judged(world)
    lines = [
        f"{job.nodes} nodes with {job.ranks} ranks each, {job.epochs} epochs of {job.steps} steps, "
        f"tiers for {job.capacity:g} data sets",
        *(f"  {fault}" for fault in job.faults),
        f"done after {verdict.time_s:.1f} s; the longest wait {verdict.wait_max_s:.2f} s; "
        f"{verdict.extra_share:.3f} data sets beyond the bound, {verdict.store_ratio:.2f} of what "
        "is explained",
        *(
            f"rank {rank.number}: {line}"
            for rank in world.ranks.values()
            for line in rank.members.log
        ),
        *(f"FAILED: {failure}" for failure in verdict.failures),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if verdict.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
