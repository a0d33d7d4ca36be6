"""How long does it take to simulate 1,024 nodes of 8 ranks, 1.28 million samples, 10 epochs?

    python -m benchmarks.simulate_scale [POLICY ...]

The limit is 5 minutes for the costliest policy. Each policy runs in a process of its own, so that
its peak memory is its own.
"""

import argparse
import resource
import subprocess
import sys
import time

from benchmarks.policies import POLICIES
from penstock.simulate import Scenario, run, scenario_of


def scenario(nodes: int) -> Scenario:
    made = scenario_of(
        {
            "dataset": {
                "num_samples": 1_281_167,
                "sample_bytes": 110_000,
                "spread_bytes": 60_000,
            },
            "job": {
                "epochs": 10,
                "nodes": nodes,
                "ranks": 8,
                "batch": 16,
                "compute_samples_s": 700,
            },
            "machine": {
                "cores": 64,
                "link": {"bytes_s": 12.5e9, "latency_s": 5e-5},
                "store": {
                    "latency_s": 0.015,
                    "latency_p99_s": 0.1,
                    "throughput": {"counts": [1, 8, 64], "bytes_s": [50e6, 400e6, 2.5e9]},
                    "shared": {"counts": [1, 16, 256], "bytes_s": [2.5e9, 40e9, 100e9]},
                },
                "tiers": [
                    {
                        "kind": "memory",
                        "capacity_bytes": 10**11,
                        "read": {"counts": [1, 8], "bytes_s": [8e9, 40e9]},
                        "write": {"counts": [1], "bytes_s": [8e9]},
                    },
                    {
                        "kind": "disk",
                        "capacity_bytes": 10**11,
                        "latency_s": 1e-4,
                        "read": {"counts": [1, 8], "bytes_s": [1e9, 6e9]},
                        "write": {"counts": [1], "bytes_s": [3e9]},
                    },
                ],
            },
        }
    )
    return made.with_cache(0.5, int(made.sizes().sum()))


def measure(policy: str, nodes: int) -> None:
    begin = time.perf_counter()
    result = run(scenario(nodes), POLICIES[policy])
    seconds = time.perf_counter() - begin
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    what = result.why_not or f"{result.time_ratio:8.2f} {result.byte_ratio:8.2f}"
    print(f"{policy:22} {seconds:8.1f} {peak_mb:8.0f} {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to simulate a large job, by policy.")
    parser.add_argument("policies", nargs="*", help="default: all")
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure(args.policies[0], args.nodes)
        return
    print(f"{'policy':22} {'seconds':>8} {'peak MB':>8} {'×bound':>8} {'×least':>8}")
    for policy in args.policies or POLICIES:
        command = [sys.executable, "-m", "benchmarks.simulate_scale", policy, "--one"]
        subprocess.run([*command, "--nodes", str(args.nodes)], check=True)


if __name__ == "__main__":
    main()
