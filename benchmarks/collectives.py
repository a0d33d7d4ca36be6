"""What do our collectives over gloo cost beside gloo's own, in time and in bytes on the wire?

    python -m benchmarks.collectives [--rounds 8] [--ranks 2] [--rate 1gbit] [--mb 16] [--quick]

Every rank is a process on a host of its own (network namespaces, links of the given rate; needs
root). `sent` is what the interface of rank 0 has counted, headers included, `due` what the formula
of `payload_bytes` in `comms.comm` says; `wire` is the time that `due` takes at the link's rate.
`times faster` divides gloo's time for the same result by ours, round by round. The chained way
scatters in 16 chunks and gathers each on a second lane as soon as it is there, which is how
a sharded update runs. Values are checked in the same run, against sums that each rank makes for
itself.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import distributed

from benchmarks.step_ranks import Way, main, parser_of
from penstock.step.comms.comm import Comm, Handle, parts_of, payload_bytes
from penstock.step.comms.native import all_gather_flat, reduce_scatter_flat
from penstock.step.groups import Groups
from penstock.step.program.mesh import mesh

QUESTION = __doc__.splitlines()[0]
KINDS = ("all_gather", "all_reduce", "reduce_scatter")
CHUNKS = 16
OURS = {"direct": "ours, direct", "ring": "ours, ring", "native": "ours, gloo inside"}


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

    def check(self, kind: str, *, exact: bool) -> None:
        """Look at what came out. Whole numbers: sums are exact in any order, and in bf16 near."""
        size, rank = self.comm.size, self.comm.rank
        if kind == "reduce_scatter":
            got, want = self.mine, parts_of(self.total, size)[rank]
        elif kind == "all_reduce":
            got, want = self.whole, self.total
        else:
            parts = [parts_of(self.values(r), size)[r] for r in range(size)]
            got, want = self.whole, torch.cat(parts)
        close = 0.0 if exact else 0.01
        assert torch.allclose(got, want, rtol=close, atol=0.0), kind

    def way(
        self, kind: str, run: Callable[[], object], *, algo: str = "direct", half: bool = False
    ) -> Way:
        """Return one way of one collective."""
        counts = {"size": self.comm.size, "rank": self.comm.rank, "algo": algo}
        gloo = "all_reduce: gloo" if self.length % self.comm.size else f"{kind}: gloo"
        return Way(
            run=run,
            check=lambda: self.check(kind, exact=not half),
            reset=self.reset,
            due_bytes=payload_bytes(kind, self.length, 2 if half else 4, **counts),
            against=gloo,
        )

    def ours(self, kind: str, **how: str) -> Callable[[], None]:
        calls: dict[str, Callable[[], Handle]] = {
            "reduce_scatter": lambda: self.comm.reduce_scatter(self.mine, self.whole, **how),
            "all_gather": lambda: self.comm.all_gather(self.whole, self.mine, **how),
            "all_reduce": lambda: self.comm.all_reduce(self.whole, **how),
        }
        return lambda: calls[kind]().wait()

    def gloos(self) -> dict[str, Callable[[], object]]:
        """Return gloo's own, of which some take equal parts only."""
        out: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: distributed.all_reduce(self.whole)
        }
        if self.length % self.comm.size == 0:
            out["all_gather"] = lambda: all_gather_flat(self.whole, self.mine)
            out["reduce_scatter"] = lambda: reduce_scatter_flat(self.mine, self.whole)
        return out

    def ways(self) -> dict[str, Way]:
        gloos, out = self.gloos(), {}
        for kind in KINDS:
            if kind in gloos:
                out[f"{kind}: gloo"] = self.way(kind, gloos[kind])
            for algo, name in OURS.items():
                # A ring of two is an exchange, and gloo's own is inside of one kind only.
                is_other = algo == "native" and kind != "all_reduce"
                if is_other or (algo == "ring" and self.comm.size == 2):
                    continue
                run = self.ours(kind, algo=algo)
                out[f"{kind}: {name}"] = self.way(kind, run, algo=algo)
            half = self.ours(kind, wire="bf16")
            out[f"{kind}: ours, bf16 wire"] = self.way(kind, half, half=True)
        chain = f"all_reduce: ours, {CHUNKS} chained chunks"
        out[chain] = self.way("all_reduce", self.chained)
        out["all_reduce: gloo in bf16"] = self.way("all_reduce", self.in_bf16, half=True)
        return out

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


def ways(options: argparse.Namespace) -> dict[str, Way]:
    groups = Groups(mesh(dp=options.ranks))
    groups.__enter__()
    length = (4 if options.quick else options.mb) * 10**6 // 4
    return Rank(groups.comm("dp", "rs"), groups.comm("dp", "ag"), length).ways()


if __name__ == "__main__":
    parser = parser_of(QUESTION)
    parser.add_argument("--mb", type=int, default=16, help="size of the tensor")
    main("benchmarks.collectives", QUESTION, parser, "all_reduce: gloo")
