"""Many nodes as one cache: what does the store serve, what do peers, and how long is an epoch?

    python -m benchmarks.cluster [--nodes 4] [--rounds 3] [--samples 5500] [--step 0.05] [--json F]

Nodes are network namespaces under torchrun, in lock step, with links of 10 Gbit/s; a real S3 store
has 1 Gbit/s for all of them. A node's disk tier holds 30 % of the set. Bytes are those that loaders
report; `at the store` is what its interface sent, headers and indexes included. `no I/O` is the
same loop over one batch from memory. NoPFS is simulated: its placement on the same sizes.
"""

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from testkit.network import Link
from testkit.network_job import Launch

from benchmarks.cluster_job import Job, Task, delivered, expected, peer_bytes, total
from benchmarks.cluster_report import ROWS, table
from benchmarks.cluster_site import Site, open_site
from penstock.flow.bound import epochs_bound
from penstock.simulate import run, scenario_of

EPOCHS = 3
SAMPLE_BYTES = 110_000
BATCH = 16
"""Samples a node and step."""
TIER_SHARE = 0.30
STORE_RATE, NODE_RATE = "1gbit", "10gbit"
STORE_BYTES_S, NODE_BYTES_S = 125e6, 1.25e9
JOB_S = 600.0
CASES = {
    "peers, fixed": {"options": {"peers": True, "assignment": "fixed"}},
    "peers, locality": {"options": {"peers": True, "assignment": "locality"}},
    "no peers": {"options": {"peers": False}},
    "no I/O": {"options": {"peers": False}, "disk": 0, "is_dry": True},
}


def measure(site: Site, name: str, folder: Path, args: argparse.Namespace) -> dict:
    wanted = {"disk": int(TIER_SHARE * site.size_bytes)} | CASES[name]
    task = Task(
        uri=site.uri,
        endpoint=site.store.access.endpoint,
        folder=str(folder),
        global_batch_size=BATCH * len(site.nodes),
        epochs=EPOCHS,
        step_s=args.step,
        is_lockstep=True,
        threads=1,
        look_ahead="64MB",
        **wanted,
    )
    before = site.store.host.counters()
    with Job(task, site.nodes, Launch(by="torchrun")) as job:
        job.wait(timeout_s=JOB_S)
    sent = site.store.host.counters() - before
    ends = job.ends()
    return {
        "store_bytes": total(ends, "store_bytes"),
        "sent_bytes": sent.out_bytes,
        "peer_bytes": peer_bytes(ends) / EPOCHS,
        "epoch_s": epoch_times(job),
        "stall_share": 0.0 if task.is_dry else total(ends, "stall_s") / total(ends, "elapsed_s"),
        "cpu_s": total(ends, "cpu_s"),
        "is_right": task.is_dry
        or (not total(ends, "num_wrong") and delivered(folder) == expected(site.num_samples, task)),
    }


def epoch_times(job: Job) -> list[float]:
    """Return how long each epoch took, by its slowest rank; the first from its first batch on."""
    ranks = [job.lines(rank) for rank in range(len(job.hosts))]
    ends_s = [
        max(line["at_s"] for lines in ranks for line in lines if line["epoch"] == epoch)
        for epoch in range(EPOCHS)
    ]
    first_s = min(lines[0]["at_s"] - lines[0]["wait_s"] for lines in ranks)
    return [end_s - start_s for start_s, end_s in zip([first_s, *ends_s], ends_s, strict=False)]


def nopfs(site: Site, args: argparse.Namespace) -> dict:
    """Return what NoPFS's placement comes to on these sizes, in virtual time."""
    curve = {"counts": [1], "bytes_s": [1e9]}
    store = {"counts": [1], "bytes_s": [STORE_BYTES_S]}
    nodes = len(site.nodes)
    scenario = scenario_of(
        {
            "dataset": {"sizes": site.sizes.tolist()},
            "job": {
                "epochs": EPOCHS,
                "nodes": nodes,
                "ranks": 1,
                "batch": BATCH,
                "compute_samples_s": BATCH / args.step,
            },
            "machine": {
                "link": {"bytes_s": NODE_BYTES_S, "latency_s": 1e-4},
                "cores": 2,
                "store": {
                    "latency_s": 0.002,
                    "latency_p99_s": 0.01,
                    "throughput": store,
                    "shared": store,
                },
                "tiers": [
                    {
                        "kind": "disk",
                        "capacity_bytes": int(TIER_SHARE * site.size_bytes),
                        "read": curve,
                        "write": curve,
                    }
                ],
            },
        }
    )
    result = run(scenario, "nopfs")
    return {
        "store_bytes": result.store_bytes,
        "peer_bytes": result.peer_bytes / EPOCHS,
        "epoch_s": list(result.epoch_s),
        "stall_share": result.stall_share,
    }


def limits(site: Site) -> dict[str, float]:
    nodes, size = len(site.nodes), site.size_bytes
    cache_bytes = min(size, nodes * int(TIER_SHARE * size))
    return {
        "store_bytes": epochs_bound(size, cache_bytes, EPOCHS),
        "fixed_bytes": size * (1 - 1 / nodes),
        "locality_bytes": size * math.sqrt((1 - 1 / nodes) / (2 * math.pi * BATCH)),
    }


def median_of(results: list[dict]) -> dict:
    """Return the round whose later epochs took the median time; right only if all were."""
    later = [sum(result["epoch_s"][1:]) for result in results]
    middle = results[later.index(statistics.median_low(later))]
    return middle | {"is_right": all(r["is_right"] for r in results), "rounds": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=5500)
    parser.add_argument("--step", type=float, default=0.05, help="seconds that a step takes")
    parser.add_argument("--cases", type=lambda names: names.split("; "), default=list(CASES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    nodes = {f"n{k}": Link(rate=NODE_RATE) for k in range(args.nodes)}
    results: dict[str, list[dict]] = {name: [] for name in args.cases}
    with (
        tempfile.TemporaryDirectory(prefix="penstock-cluster-") as root,
        open_site(
            nodes,
            num_samples=args.samples,
            sample_bytes=SAMPLE_BYTES,
            store_rate=STORE_RATE,
            shard_size="64MB",
        ) as site,
    ):
        for number in range(args.rounds):
            for name in args.cases:
                folder = Path(root, f"{number}-{name.replace(', ', '-').replace(' ', '-')}")
                print(f"round {number + 1}: {name}", file=sys.stderr, flush=True)
                results[name].append(measure(site, name, folder, args))
                shutil.rmtree(folder / "tiers", ignore_errors=True)
        rows = {name: median_of(of) for name, of in results.items()}
        rows["NoPFS (simulated)"] = nopfs(site, args)
        bounds = limits(site)
    print(table(__doc__.splitlines()[0], args.nodes, bounds, rows, ROWS))
    if args.json:
        args.json.write_text(json.dumps({"limits": bounds, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
