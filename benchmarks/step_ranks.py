"""Ranks that take turns at several ways of doing one thing, on hosts of their own or on this one.

A benchmark names its ways in `ways(options)`, which every rank calls: functions that do the work
once, and look whether what it left is what it should be. In each round every way takes its turn; a
time is the slowest rank's, bytes are what the first rank's interface has sent, which it may share
with the other ranks of its host (`ranks_of_host`). With `--host` all ranks are on this host and
there are no links: what goes over the loopback interface is not counted, others may use it too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from testkit.network import Link, Network
from testkit.network_link import bits_of
from torch import distributed

from benchmarks.compare import conditions
from penstock.testing.ports import HOST, free_ports

ROOT = Path(__file__).parents[1]
RUN_S = 1200


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of doing it."""

    run: Callable[[], object]
    check: Callable[[], None] = lambda: None
    """Raises if what `run` left is not what it should be."""
    reset: Callable[[], None] = lambda: None
    due_bytes: int | None = None
    """What a rank must send."""
    repeats: int = 1
    """How often `run` does the work: times are divided by it."""
    against: str | None = None
    """The way that this one is compared with, if not with the baseline of all."""


def measure(way: Way) -> dict[str, float]:
    """Return the seconds of the slowest rank, and bytes and CPU seconds of this one.

    The work is done once before: in training nobody waits while others take their turn, and TCP
    begins slowly after a pause.
    """
    way.reset()
    distributed.barrier()
    way.run()
    way.reset()
    distributed.barrier()
    sent, cpu_s = sent_bytes(), time.process_time()
    distributed.barrier()
    begin_s = time.perf_counter()
    way.run()
    taken = torch.tensor(time.perf_counter() - begin_s, dtype=torch.float64)
    cpu_s = time.process_time() - cpu_s
    distributed.barrier()
    sent = sent_bytes() - sent
    way.check()
    distributed.all_reduce(taken, op=distributed.ReduceOp.MAX)
    count = way.repeats
    return {"s": taken.item() / count, "sent_bytes": sent / count, "cpu_s": cpu_s / count}


def sent_bytes() -> int:
    """Return what was sent so far, 0 where nobody counts."""
    return interface_bytes() if os.environ["GLOO_SOCKET_IFNAME"] == "eth0" else 0


def interface_bytes() -> int:
    """Return what this host's interface has sent; the file shows this process's own network."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            return int(counts.split()[8])
    raise AssertionError("no eth0 here")


def be_rank(module: str, options: argparse.Namespace) -> None:
    """Be one rank: every way once to warm up, then in turns."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    ways: dict[str, Way] = importlib.import_module(module).ways(options)
    rows = []
    for way in ways.values():
        measure(way)
    for number in range(options.rounds):
        turn = number % len(ways)
        names = list(ways)
        for name in names[turn:] + names[:turn]:
            result = measure(ways[name])
            about = {"due_bytes": ways[name].due_bytes, "against": ways[name].against}
            rows.append({"way": name, "round": number} | about | result)
    if distributed.get_rank() == 0:
        print(json.dumps(rows), flush=True)
    distributed.barrier()
    # Threads of torch's groups may still be at it; there is nothing left to lose.
    os._exit(0)


def launch(module: str, options: argparse.Namespace, arguments: list[str]) -> list[dict]:
    """Run the ranks and return what the first has measured."""
    command = [sys.executable, "-m", module, "rank", *arguments]
    env = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(options.ranks)}
    if options.is_host:
        env |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(free_ports(1)[0])}
        env |= {"GLOO_SOCKET_IFNAME": "lo"}
        return joined([started(command, env, number) for number in range(options.ranks)])
    num_hosts = options.ranks // options.ranks_of_host
    names = [f"r{number}" for number in range(num_hosts)]
    rate = None if options.rate == "none" else options.rate
    with Network({name: Link(rate=rate) for name in names}, tcp="reno") as network:
        env |= {"MASTER_ADDR": network.host("r0").address, "MASTER_PORT": "29512"}
        env |= {"GLOO_SOCKET_IFNAME": "eth0"}
        places = [
            number % num_hosts if options.is_cyclic else number // options.ranks_of_host
            for number in range(options.ranks)
        ]
        return joined(
            [
                started(command, env, number, network.host(names[place]).popen)
                for number, place in enumerate(places)
            ]
        )


def started(
    command: list[str],
    env: dict[str, str],
    rank: int,
    popen: Callable[..., subprocess.Popen[str]] | None = None,
) -> subprocess.Popen[str]:
    """Start one rank; here, where no host says how."""
    how = {"cwd": ROOT, "stdout": subprocess.PIPE, "text": True}
    env = env | {"RANK": str(rank)}
    if popen is None:
        return subprocess.Popen(command, env=os.environ | env, **how)
    return popen(command, env=env, **how)


def joined(ranks: list[subprocess.Popen[str]]) -> list[dict]:
    """Wait for all ranks and return what the first has said."""
    said = [each.communicate(timeout=RUN_S)[0] for each in ranks]
    assert not any(each.returncode for each in ranks), "a rank has failed"
    return json.loads(said[0].splitlines()[-1])


def parser_of(question: str, **defaults: object) -> argparse.ArgumentParser:
    """Return the options that all of these benchmarks have."""
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("mode", nargs="?", choices=("compare", "rank"), default="compare")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="of every link, or none")
    parser.add_argument(
        "--host", dest="is_host", action="store_true", help="all ranks on this host, no links"
    )
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    parser.add_argument("--json", type=Path)
    parser.set_defaults(**{"ranks_of_host": 1, "is_cyclic": False} | defaults)
    return parser


def main(module: str, question: str, parser: argparse.ArgumentParser, baseline: str) -> list[dict]:
    """Compare the ways of a module on the command line; return what was measured."""
    options = parser.parse_args()
    if options.quick:
        options.rounds = 3
    if options.mode == "rank":
        be_rank(module, options)
    arguments = [a for a in sys.argv[1:] if a != "compare"]
    rows = launch(module, options, arguments)
    where = "one host" if options.is_host else f"links {options.rate}"
    print(f"{question}\n{conditions()}\n{options.ranks} ranks, {where}, {options.rounds} rounds\n")
    rate = None if options.is_host or options.rate == "none" else bits_of(options.rate)
    print(text(rows, baseline, rate))
    if options.json:
        options.json.write_text(json.dumps({"conditions": conditions(), "rows": rows}))
    return rows


def times_of(rows: list[dict]) -> dict[str, list[float]]:
    """Return the seconds of each way, round by round."""
    times: dict[str, list[float]] = {}
    for row in sorted(rows, key=lambda row: row["round"]):
        times.setdefault(row["way"], []).append(row["s"])
    return times


def text(rows: list[dict], baseline: str, rate_bits: float | None) -> str:
    """Return a table: medians, and the baseline's time over each way's, round by round.

    `wire` is what the bytes that are due take at the rate of a link.
    """
    lines = ["| way | ms | min..max | times faster | wire ms | sent MB | due MB | CPU ms |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    times = times_of(rows)
    for way in dict.fromkeys(row["way"] for row in rows if row["round"] == 0):
        mine = [row for row in rows if row["way"] == way]
        base = times[mine[0]["against"] or baseline]
        ratios = [a / b for a, b in zip(base, times[way], strict=True)]
        due = mine[0]["due_bytes"]
        cells = [
            f"{1e3 * median(times[way]):.1f}",
            f"{1e3 * min(times[way]):.1f}..{1e3 * max(times[way]):.1f}",
            f"{median(ratios):.2f}",
            "-" if due is None or rate_bits is None else f"{8e3 * due / rate_bits:.1f}",
            f"{median(row['sent_bytes'] for row in mine) / 1e6:.2f}",
            "-" if due is None else f"{due / 1e6:.2f}",
            f"{1e3 * median(row['cpu_s'] for row in mine):.1f}",
        ]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)
