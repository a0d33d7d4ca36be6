"""What do our collectives over gloo cost beside gloo's own, in time and in bytes on the wire?

    python -m benchmarks.collectives [--rounds 8] [--ranks 2] [--rate 1gbit] [--mb 16] [--quick]

Every rank is a process on a host of its own (network namespaces, links of the given rate; needs
root). In each round every way takes its turn: a barrier, one operation, the slowest rank's time.
`sent` is what the interface of rank 0 has counted, headers included, `due` what the formula of
`penstock.step.comm.payload_bytes` says; `wire` is the time that `due` takes at the link's rate.
`of gloo` divides gloo's time for the same result by ours, round by round. The chained way scatters
in 16 chunks and gathers each on a second lane as soon as it is there, which is how a sharded update
runs. Values are checked in the same run, against sums that each rank makes for itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import distributed

from benchmarks.compare import conditions
from penstock.program.mesh import mesh
from penstock.step.comm import Comm, Handle, parts_of, payload_bytes
from penstock.step.groups import Groups
from penstock.step.native import all_gather_flat, reduce_scatter_flat
from penstock.testing.network import Link, Network
from penstock.testing.network_link import bits_of

ROOT = Path(__file__).parents[1]
CHUNKS = 16
OURS = {"direct": "ours, direct", "ring": "ours, ring", "native": "ours, gloo inside"}


class Case:
    """One way of one collective: what it does, what must come out, what must be sent."""

    def __init__(
        self, kind: str, way: str, run: Callable[[], object], due_bytes: int, *, exact: bool = True
    ) -> None:
        self.kind, self.way, self.run, self.due_bytes = kind, way, run, due_bytes
        self.exact = exact


# -- one rank --------------------------------------------------------------------------------


class Rank:
    """The tensors of a rank, and the ways it can go."""

    def __init__(self, comm: Comm, second: Comm, length: int) -> None:
        self.comm, self.second, self.length = comm, second, length
        everyone = [self.values(rank) for rank in range(comm.size)]
        self.total = torch.stack(everyone).sum(0)
        self.whole = everyone[comm.rank].clone()
        self.mine = torch.zeros_like(parts_of(self.whole, comm.size)[comm.rank])

    def values(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        return torch.randint(-64, 64, (self.length,), generator=generator).float()

    def reset(self) -> None:
        self.whole.copy_(self.values(self.comm.rank))
        self.mine.copy_(parts_of(self.whole, self.comm.size)[self.comm.rank])

    def check(self, case: Case) -> None:
        """Look at what came out. Whole numbers: sums are exact in any order, and in bf16 near."""
        size, rank = self.comm.size, self.comm.rank
        if case.kind == "reduce_scatter":
            got, want = self.mine, parts_of(self.total, size)[rank]
        elif case.kind == "all_reduce":
            got, want = self.whole, self.total
        else:
            parts = [parts_of(self.values(r), size)[r] for r in range(size)]
            got, want = self.whole, torch.cat(parts)
        close = 0.0 if case.exact else 0.01
        assert torch.allclose(got, want, rtol=close, atol=0.0), (case.kind, case.way)

    def due(self, kind: str, item_bytes: int = 4, algo: str = "direct") -> int:
        counts = {"size": self.comm.size, "rank": self.comm.rank, "algo": algo}
        return payload_bytes(kind, self.length, item_bytes, **counts)

    def ours(self, kind: str, **how: str) -> Callable[[], None]:
        def run() -> None:
            calls: dict[str, Callable[[], Handle]] = {
                "reduce_scatter": lambda: self.comm.reduce_scatter(self.mine, self.whole, **how),
                "all_gather": lambda: self.comm.all_gather(self.whole, self.mine, **how),
                "all_reduce": lambda: self.comm.all_reduce(self.whole, **how),
            }
            calls[kind]().wait()

        return run

    def cases(self) -> list[Case]:
        due, cases = self.due, []
        if self.length % self.comm.size == 0:
            scatter = lambda: reduce_scatter_flat(self.mine, self.whole)  # noqa: E731
            gather = lambda: all_gather_flat(self.whole, self.mine)  # noqa: E731
            cases.append(Case("reduce_scatter", "gloo", scatter, due("reduce_scatter")))
            cases.append(Case("all_gather", "gloo", gather, due("all_gather")))
        reduce = lambda: distributed.all_reduce(self.whole)  # noqa: E731
        cases.append(Case("all_reduce", "gloo", reduce, due("all_reduce")))
        for kind in ("reduce_scatter", "all_gather", "all_reduce"):
            for algo, name in OURS.items():
                if algo == "ring" and self.comm.size == 2:
                    continue  # a ring of two is an exchange
                if algo == "native" and kind != "all_reduce":
                    continue
                run = self.ours(kind, algo=algo)
                cases.append(Case(kind, name, run, due(kind, algo=algo)))
            half = self.ours(kind, wire="bf16")
            cases.append(Case(kind, "ours, bf16 wire", half, due(kind, 2), exact=False))
        chain = f"ours, {CHUNKS} chained chunks"
        cases.append(Case("all_reduce", chain, self.chained, due("all_reduce")))
        half_gloo = Case("all_reduce", "gloo in bf16", self.in_bf16, due("all_reduce", 2))
        half_gloo.exact = False
        return sorted([*cases, half_gloo], key=lambda case: case.kind)

    def chained(self) -> None:
        """Scatter chunks on one lane, gather each on the other as soon as it is there."""
        handles: list[Handle] = []
        for chunk in self.whole.chunk(CHUNKS):
            mine = parts_of(chunk, self.comm.size)[self.comm.rank]

            def gather(chunk: torch.Tensor = chunk, mine: torch.Tensor = mine) -> None:
                handles.append(self.second.all_gather(chunk, mine))

            last = self.comm.reduce_scatter(mine, chunk)
            last.then(gather)
        last.wait()
        while len(handles) < CHUNKS:  # the last one's work may still be under way
            time.sleep(1e-4)
        handles[-1].wait()

    def in_bf16(self) -> None:
        """What people do today: cast, let gloo add halves, cast back."""
        half = self.whole.bfloat16()
        distributed.all_reduce(half)
        self.whole.copy_(half)


def measure(rank: Rank, case: Case) -> dict[str, float]:
    rank.reset()
    distributed.barrier()
    sent, cpu_s = interface_bytes(), time.process_time()
    distributed.barrier()
    begin = time.perf_counter()
    case.run()
    taken = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    cpu_s = time.process_time() - cpu_s
    distributed.barrier()
    sent = interface_bytes() - sent
    rank.check(case)
    distributed.all_reduce(taken, op=distributed.ReduceOp.MAX)
    return {"s": taken.item(), "sent_bytes": sent, "cpu_s": cpu_s}


def interface_bytes() -> int:
    """Return what this host's interface has sent; the file shows this process's own network."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            return int(counts.split()[8])
    raise AssertionError("no eth0 here")


def be_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    with Groups(mesh(dp=options.ranks)) as groups:
        rank = Rank(groups.comm("dp", "rs"), groups.comm("dp", "ag"), options.mb * 10**6 // 4)
        cases = rank.cases()
        for case in cases:
            measure(rank, case)
        rows = []
        for number in range(options.rounds):
            turn = number % len(cases)
            for case in cases[turn:] + cases[:turn]:
                result = measure(rank, case)
                about = {"kind": case.kind, "way": case.way, "due_bytes": case.due_bytes}
                rows.append(about | result | {"round": number})
        if rank.comm.rank == 0:
            print(json.dumps(rows), flush=True)
    distributed.destroy_process_group()


# -- all -------------------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> list[dict]:
    names = [f"r{number}" for number in range(options.ranks)]
    rate = None if options.rate == "none" else options.rate
    with Network({name: Link(rate=rate) for name in names}) as network:
        env = {"MASTER_ADDR": network.host("r0").address, "MASTER_PORT": "29511"}
        env |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        env |= {"WORLD_SIZE": str(options.ranks)}
        command = [sys.executable, "-m", "benchmarks.collectives", "rank"]
        command += ["--ranks", str(options.ranks), "--mb", str(options.mb)]
        command += ["--rounds", str(options.rounds)]
        ranks = [
            network.host(name).popen(
                command,
                env=env | {"RANK": str(number)},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number, name in enumerate(names)
        ]
        said = [each.communicate(timeout=1200)[0] for each in ranks]
        assert not any(each.returncode for each in ranks), "a rank has failed"
    return json.loads(said[0])


def report(rows: list[dict], options: argparse.Namespace) -> None:
    size = f"{options.mb} MB of float32 on {options.ranks} ranks, {options.rate}"
    print(f"{__doc__.splitlines()[0]}\n{conditions()}\n{size}, {options.rounds} rounds\n")
    print("| collective | way | ms | min..max | of gloo | wire ms | sent MB | due MB | CPU ms |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    ways = dict.fromkeys((row["kind"], row["way"]) for row in rows)
    times = {way: [r["s"] for r in sorted(of(rows, way), key=lambda r: r["round"])] for way in ways}
    for kind, way in sorted(ways, key=lambda each: (each[0], each[1] != "gloo", each[1])):
        taken, mine = times[kind, way], of(rows, (kind, way))
        ratios = [a / b for a, b in zip(times.get((kind, "gloo"), []), taken, strict=False)]
        due = mine[0]["due_bytes"]
        wire = 1e3 * due / (bits_of(options.rate) / 8) if options.rate != "none" else float("nan")
        cells = [
            f"{1e3 * median(taken):.1f}",
            f"{1e3 * min(taken):.1f}..{1e3 * max(taken):.1f}",
            f"{median(ratios):.2f}" if ratios else "-",
            f"{wire:.1f}",
            f"{median(row['sent_bytes'] for row in mine) / 1e6:.2f}",
            f"{due / 1e6:.2f}",
            f"{1e3 * median(row['cpu_s'] for row in mine):.1f}",
        ]
        print(f"| {kind} | {way} | {' | '.join(cells)} |")


def of(rows: list[dict], way: tuple[str, str]) -> list[dict]:
    return [row for row in rows if (row["kind"], row["way"]) == way]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", nargs="?", choices=("compare", "rank"), default="compare")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="of every link, or none")
    parser.add_argument("--mb", type=int, default=16, help="size of the tensor")
    parser.add_argument("--quick", action="store_true", help="three rounds of 4 MB")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.mb = 3, 4
    if options.mode == "rank":
        be_rank(options)
        os._exit(0)
    rows = compare(options)
    report(rows, options)
    if options.json:
        options.json.write_text(json.dumps({"conditions": conditions(), "rows": rows}))


if __name__ == "__main__":
    main()
