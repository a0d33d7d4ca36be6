"""Plays one schedule of faults on a cluster and prints how it ended."""

from __future__ import annotations

import argparse
import sys

from testkit.virtual_cluster import ClusterJob, ClusterWorld, judged


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
