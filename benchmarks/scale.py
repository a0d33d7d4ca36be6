"""Does a loader keep up when a job grows to 1,024 nodes and the store does not?

    python -m benchmarks.scale [--nodes 4,16,64,256,1024] [--html scale.html]

Simulated (`penstock.simulate`), from `examples/scenarios/scale.toml`: one data set, one store of
fixed bandwidth, nodes whose caches together hold half of the set or all of it. Printed is the time
over the least that any loader could need, the seconds of an epoch after the first, and the bytes
from the store over their least and from peers. One core, a few minutes.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.policies import POLICIES
from penstock.report.charts import Axis
from penstock.simulate import PolicyResult, load_scenario, sweep
from penstock.simulate.page import PlottedMeasure, results_html, title_of

ROOT = Path(__file__).resolve().parents[1]
TITLE = "The job grows, the store does not"
LATER_EPOCH = PlottedMeasure(
    axis=Axis(name="time of an epoch after the first", unit="s", log=True),
    of=lambda r: r.epoch_s[-1],
    least=lambda r: r.least_later_s,
)
COMPARED = (
    "double-buffering",
    "nopfs",
    "lbann-dynamic",
    "locality-aware",
    "ours",
    "ours-locality",
)

COLUMNS: dict[str, Callable[[PolicyResult], str]] = {
    "time over the least possible": lambda r: f"{r.time_s / r.least_s:.2f}",
    "seconds an epoch, the first included": lambda r: f"{r.time_s / len(r.epoch_s):.2f}",
    "seconds of a later epoch": lambda r: f"{r.epoch_s[-1]:.2f}",
    "bytes from the store over the fewest possible": lambda r: f"{r.byte_ratio:.2f}",
    "gigabytes from peers in an epoch": lambda r: f"{r.peer_bytes / len(r.epoch_s) / 1e9:.1f}",
}


def table(results: Sequence[PolicyResult], of: Callable[[PolicyResult], str]) -> None:
    nodes = sorted({r.nodes for r in results})
    print(f"  {'':20}" + "".join(f"{n:>9,}" for n in nodes))
    for policy in dict.fromkeys(r.policy for r in results):
        mine = {r.nodes: "-" if r.why_not else of(r) for r in results if r.policy == policy}
        print(f"  {title_of(policy):20}" + "".join(f"{mine.get(n, ''):>9}" for n in nodes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scenario", default=str(ROOT / "examples/scenarios/scale.toml"))
    parser.add_argument("--nodes", default="", help="default: those of the scenario")
    parser.add_argument("--html", default="", help="write the chart and the results as a page")
    args = parser.parse_args()
    scenario = load_scenario(args.scenario)
    begin = time.perf_counter()
    nodes = [int(n) for n in args.nodes.split(",") if n]
    # By class, so that they need no name in the product; ours by name, so that the page marks it.
    policies = [name if name == "ours" else POLICIES[name] for name in COMPARED]
    results = list(sweep(scenario, policies=policies, nodes=nodes))
    took_s = time.perf_counter() - begin
    print(f"{scenario.name}; {scenario.job.epochs} epochs; {took_s:.0f} s to simulate\n")
    for share in sorted({round(r.cache_share, 2) for r in results}):
        some = [r for r in results if round(r.cache_share, 2) == share]
        for what, of in COLUMNS.items():
            print(f"Cache {share:.0%} of the data set: {what}, by nodes")
            table(some, of)
            print()
    if args.html:
        Path(args.html).write_text(results_html(results, TITLE, LATER_EPOCH), encoding="utf-8")
        print(f"page in {args.html}")


if __name__ == "__main__":
    main()
