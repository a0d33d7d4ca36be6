"""Does the simulator agree with the table of the NoPFS thesis, and what is that table made of?

    python -m benchmarks.thesis

Published: run times of ten policies on four data sets (Boehringer, "Clairvoyant Prefetching for
Machine Learning I/O", ETH 2020): 4 nodes, compute 100 MB/s, preprocessing 200 MB/s a thread, links
10,000 MB/s, 2,000 MB/s to the file system, stage 1 GB, memory 50 GB, disk 100 GB of 86 MB/s. What
the text leaves open follows from the numbers themselves and from the simulator's source:

* The file system gives 66, 86, 129, 146 MB/s to 1, 2, 3, 4 nodes (not 1, 2, 4, 8): preloading S/4 a
  node takes S/4 · (4/146 + 1/200)/2 in every column.
* t(n)/n is what each *thread* of a node gets, not the node: two threads get twice that. So 4 nodes
  read 292 MB/s of a file system that gives 146, and NoPFS with six threads a node 876.
* Nodes are gone through in turn, and one whose turn has not come is not a reader yet (`in_turn`).
* A gigabyte of storage is 1,024 MB, one of data 1,000. Two threads a tier; 86 MB/s is one thread's.
* 10 epochs in the first two columns, 5 in the others. Sizes and batches are not given; only
  spread/sqrt(batch) matters, and the lower bound over S·E/(N·c) says what it is.
* NoPFS reads ahead from its own tiers and the file system; peers serve only what is late. With
  peers (last line but one) the last column would be 9 % lower.

The second table has the same policies when nodes share what the file system really gives.
"""

import argparse

from benchmarks.policies import POLICIES
from penstock.simulate import PolicyResult, Scenario, run, scenario_of
from penstock.simulate.policies.nopfs import Nopfs

MB = 10**6
BATCH = 32

COLUMNS = {
    # data set MB, epochs, spread of a node's batch, samples
    "0.27 GB": (275, 10, 0.0600, 50_000),
    "150 GB": (150_000, 10, 0.0197, 100_000),
    "600 GB": (600_000, 5, 0.0201, 100_000),
    "1,200 GB": (1_200_000, 5, 0.0133, 100_000),
}


class NopfsAlone(Nopfs):
    """NoPFS as it is in the thesis' simulator: nothing is read ahead from peers."""

    title = "NoPFS, as simulated there"
    peers = False


PUBLISHED: dict[str | type, tuple[float | None, ...]] = {
    "perfect": (7.30, 3826, 7655, 15205),
    "naive": (27.8, 15131, 30273, 60526),
    "double-buffering": (10.2, 4982, 9945, 19888),
    "deepio-ordered": (8.41, 4433, 23948, 54123),
    "deepio-opportunistic": (8.40, 4433, 8487, 16035),
    "parallel-staging": (10.1, 4973, 9314, 16862),
    "lbann-dynamic": (7.71, 4051, None, None),
    "lbann-preloading": (8.41, 4433, None, None),
    "locality-aware": (8.41, 4433, 9314, 19083),
    NopfsAlone: (7.78, 3836, 7661, 16795),
    "nopfs": (7.78, 3836, 7661, 16795),
}
UNPUBLISHED = ("nopfs-released", "coordl", "lru", "belady", "ours")


def scenario(column: str, *, share: float = 1.0, as_published: bool = True) -> Scenario:
    """Return the thesis' machine and one of its data sets, with a share of its samples."""
    size_mb, epochs, spread, num_samples = COLUMNS[column]
    num_samples = int(num_samples * share)
    mean = size_mb * MB // num_samples
    flat = {"counts": [1], "bytes_s": [28e9]}
    disk = {"counts": [1, 2], "bytes_s": [86e6, 172e6]}
    return scenario_of(
        {
            "name": column,
            "dataset": {
                "num_samples": num_samples,
                "sample_bytes": mean,
                "spread_bytes": int(mean * spread * BATCH**0.5),
            },
            "job": {
                "epochs": epochs,
                "nodes": 4,
                "batch": BATCH,
                "compute_bytes_s": 100e6,
                "drop_last": True,
            },
            "loader": {"threads": 2, "fill_threads": 2, "stage_bytes": 1024 * MB},
            "model": {"store_share": "thread", "readers": "in_turn"} if as_published else {},
            "machine": {
                "cores": 16,
                "decode": {"counts": [1, 16], "bytes_s": [200e6, 3200e6]},
                "link": {"bytes_s": 10_000e6},
                "store": {
                    "latency_s": 0.0,
                    "latency_p99_s": 0.0,
                    "throughput": {"counts": [1], "bytes_s": [2000e6]},
                    "shared": {"counts": [1, 2, 3, 4], "bytes_s": [66e6, 86e6, 129e6, 146e6]},
                },
                "tiers": [
                    {"kind": "memory", "capacity_bytes": 51_200 * MB, "read": flat, "write": flat},
                    {"kind": "disk", "capacity_bytes": 102_400 * MB, "read": disk, "write": disk},
                ],
            },
        }
    )


def published_ratio(policy: str | type, column: str) -> float | None:
    """Return a policy's published time over the published lower bound."""
    number = list(COLUMNS).index(column)
    time_s, bound_s = PUBLISHED[policy][number], PUBLISHED["perfect"][number]
    assert bound_s is not None
    return time_s / bound_s if time_s is not None else None


def cell(result: PolicyResult, published: float | None) -> str:
    if result.why_not:
        return "n/a" if published is None else "n/a, but published"
    if published is None:
        return f"{result.time_ratio:.3f}"
    return f"{published:.3f} {result.time_ratio:.3f} {result.time_ratio / published - 1:+6.1%}"


def show(*, as_published: bool) -> None:
    names = list(COLUMNS)
    print(f"{'time over the lower bound':26}" + "".join(f"{name:>24}" for name in names))
    if as_published:
        print(f"{'':26}" + f"{'published ours error':>24}" * len(names))
    for policy in [*PUBLISHED, *UNPUBLISHED]:
        line = f"{policy if isinstance(policy, str) else policy.title:26}"
        for name in names:
            known = as_published and policy in PUBLISHED
            published = published_ratio(policy, name) if known else None
            made = scenario(name, as_published=as_published)
            line += f"{cell(run(made, POLICIES.get(policy, policy)), published):>24}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The table of the NoPFS thesis, published and ours."
    )
    parser.parse_args()
    show(as_published=True)
    print("\nnodes share what the file system gives, and all of them read at once:")
    show(as_published=False)


if __name__ == "__main__":
    main()
