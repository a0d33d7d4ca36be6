"""What does each failure cost a job: its longest step, bytes of the store, and is the stream right?

    python -m benchmarks.failures [--nodes 2,4,8] [--cases killed,frozen] [--rounds 1] [--json F]

A job of 3 epochs runs on nodes in network namespaces (links of 1 Gbit/s, tiers that hold the set).
In the middle of the first epoch all ranks stop, something is done to the last node, and they go on.
`longest step` is the longest wait for a batch after that, on any rank that nothing was done to; its
limit is one timeout. `more of S/N` is what the store's interface sent beyond an undisturbed job,
over S/N, and what a job that went on in its place has read; the limit is 1 for each lost node, and
what was on its way.
`stream` compares every global batch with the order.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from testkit.network import Link

from benchmarks.cluster_site import Site, open_site
from benchmarks.failures_cases import CASES
from benchmarks.failures_run import BATCH, BATCHES_AHEAD, Outcome, outcome_of
from penstock.testing.servers import ServerError

SAMPLE_BYTES = 110_000
NUM_SAMPLES = 1280
NODE_RATE, STORE_RATE = "1gbit", "400mbit"
"""The store is slow enough to be at work in the whole of the first epoch."""
ON_THE_WAY = BATCHES_AHEAD * BATCH / NUM_SAMPLES
"""Of a lost node's share, what ranks were waiting for: they read it, and its new home as well."""
TIMEOUT_S = 2.0
"""A peer that is silent for so long is passed over."""


def limit_s(seen: Outcome, clean: Outcome | None) -> float:
    """Return the longest step without the failure, and one timeout."""
    return (clean or seen).longest_s + TIMEOUT_S + seen.outage_s


def more_of_share(seen: Outcome, clean: Outcome | None, share_bytes: int) -> str:
    """Return what the store sent beyond an undisturbed job, over S/N.

    A job that was killed at once has sent less: what it lacked is part of what its successor read.
    """
    if clean is None:
        return "-"
    sent, again = seen.sent_bytes - clean.sent_bytes, seen.resent_bytes
    if sent < 0:
        sent, again = sent + again, 0
    more = f"{sent / share_bytes:.2f}"
    return f"{more} + {again / share_bytes:.2f}" if again else more


def victims_share(seen: Outcome, clean: Outcome | None, share_bytes: int) -> str:
    if clean is None or seen.victim_bytes is None or clean.victim_bytes is None:
        return "-"
    return f"{(seen.victim_bytes - clean.victim_bytes) / share_bytes:.2f}"


COLUMNS: dict[str, Callable[[Outcome, Outcome | None, int], str]] = {
    "longest step s": lambda seen, _, __: f"{seen.longest_s:.2f}",
    "limit s": lambda seen, clean, _: f"{limit_s(seen, clean):.2f}",
    "more of S/N": more_of_share,
    "limit": lambda seen, _, __: f"{seen.num_lost * (1 + ON_THE_WAY):.2f}",
    "of it the victim's": victims_share,
    "stream": lambda seen, _, __: "right" if seen.is_right else "WRONG",
    "seconds": lambda seen, _, __: f"{seen.seconds:.1f}",
    "the summary says": lambda seen, _, __: seen.said,
}


def measure(site: Site, num_nodes: int, names: list[str], root: Path) -> dict[str, Outcome]:
    out = {}
    for name in names:
        print(f"{num_nodes} nodes: {name}", file=sys.stderr, flush=True)
        try:
            out[name] = outcome_of(CASES[name], site, num_nodes, root / f"{num_nodes}-{name}")
        except (ServerError, AssertionError) as error:  # one row fails, the others are still asked
            print(error, file=sys.stderr, flush=True)
            out[name] = Outcome(said=f"failed: {str(error).splitlines()[0]}")
    return out


def table(num_nodes: int, size_bytes: int, seen: dict[str, Outcome]) -> str:
    share_bytes = size_bytes // num_nodes
    clean = seen.get("nothing")
    lines = [
        [f"{num_nodes} nodes", *COLUMNS],
        *(
            [name, *(show(outcome, clean, share_bytes) for show in COLUMNS.values())]
            for name, outcome in seen.items()
        ),
    ]
    widths = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    padded = [[c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = {"type": lambda text: [int(n) for n in text.split(",")], "default": [2, 4, 8]}
    parser.add_argument("--nodes", **numbers)
    parser.add_argument("--cases", type=lambda names: names.split(","), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    nodes = {f"n{k}": Link(rate=NODE_RATE) for k in range(max(args.nodes) + 1)}
    kept: dict[str, dict] = {}
    with (
        tempfile.TemporaryDirectory(prefix="penstock-failures-") as root,
        open_site(
            nodes, num_samples=NUM_SAMPLES, sample_bytes=SAMPLE_BYTES, store_rate=STORE_RATE
        ) as site,
    ):
        for number in range(args.rounds):
            for num_nodes in args.nodes:
                seen = measure(site, num_nodes, args.cases, Path(root, str(number)))
                print(table(num_nodes, site.size_bytes, seen), flush=True)
                kept[f"{number} {num_nodes}"] = {n: asdict(o) for n, o in seen.items()}
    if args.json:
        args.json.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
