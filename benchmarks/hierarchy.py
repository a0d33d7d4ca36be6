"""How much of an all-reduce must cross between nodes? Flat, and axis by axis (`hier`).

    python -m benchmarks.hierarchy [--rounds 8] [--rate 500mbit] [--million 4] [--cyclic] [--quick]

Two hosts, two ranks on each: inside a host they share memory or its loopback, between hosts there
is one link for both. `sent` is what the first host's interface has counted, so it is what crosses
the slow link one way; `due` is what the algorithm must send over it, in tensors of N bytes:

    flat, direct   each rank exchanges parts with each other one              2 N
    flat, ring     round the ranks, host by host: two of four hops cross      1.5 N
    the same       with --cyclic, which deals ranks out to hosts in turn      3 N
    hier           scatter inside, all-reduce of a half across, gather        1 N, the least

Sums are compared with those of one process.
"""

from __future__ import annotations

import argparse

import torch
from torch import distributed

import penstock.step as ps
from benchmarks.step_ranks import Way, main, parser_of

QUESTION = __doc__.splitlines()[0]
NODES, LOCAL = 2, 2
CHUNKS = 4
BASELINE = "torch all_reduce"


@ps.program
def total(g: ps.P["n"]):
    g = ps.all_reduce(g)
    return g * 0.25


def axes(is_cyclic: bool) -> tuple[tuple[str, int], ...]:
    """Return the two axes, the one whose ranks have neighbouring numbers last."""
    both = (("node", NODES), ("local", LOCAL))
    return both[::-1] if is_cyclic else both


def schedules(n: int, is_cyclic: bool) -> dict[str, tuple[ps.Program, str, float]]:
    """Return the ways: a program, what carries it inside a host, and N that cross."""
    flat = total.on(ps.mesh(dp=NODES * LOCAL), n=n)
    flat = flat.factor("dp", *axes(is_cyclic))
    direct = flat.with_nodes(
        node.with_attrs(algo="direct") if node.op == "all_reduce" else node for node in flat.nodes
    )
    hier = flat.hier("g", inner="local")
    chunks = hier.chunk(CHUNKS, "g.scatter", "g.gather", dim=0).overlap()
    return {
        "flat, as compiled (gloo's ring)": (flat, "gloo", 3.0 if is_cyclic else 1.5),
        "flat, direct": (direct, "gloo", 2.0),
        "hier, gloo inside": (hier, "gloo", 1.0),
        "hier, shm inside": (hier, "shm", 1.0),
        f"hier, shm inside, {CHUNKS} chunks": (chunks, "shm", 1.0),
        "hier, shm inside, bf16 across": (hier.wire("g.reduce"), "shm", 0.5),
    }


def ways(options: argparse.Namespace) -> dict[str, Way]:
    rank, n = distributed.get_rank(), int(options.million * 1e6)
    mesh = ps.mesh(**dict(axes(options.is_cyclic)))
    everyones = [numbers(n, 1 + each) for each in range(NODES * LOCAL)]
    mine, expected = everyones[rank], torch.stack(everyones).sum(0)
    groups = {
        inside: ps.Groups(mesh, backend={"local": inside, "node": "gloo"})
        for inside in ("gloo", "shm")
    }
    for each in groups.values():
        each.__enter__()
    kept: dict[str, torch.Tensor] = {}
    held = torch.empty_like(mine)

    def way(name: str, run, share: float, *, scale: float = 1.0) -> Way:
        def check() -> None:
            off = (kept[name] / scale - expected).abs().max().item()
            close = 0.02 if "bf16" in name else 1e-6
            assert off <= close * expected.abs().max().item(), f"{name} is off by {off}"

        return Way(run=run, check=check, due_bytes=int(share * 4 * n))

    def plain() -> None:
        kept[BASELINE] = held.copy_(mine)
        distributed.all_reduce(held)

    out = {BASELINE: way(BASELINE, plain, 3.0 if options.is_cyclic else 1.5)}
    for name, (program, inside, share) in schedules(n, options.is_cyclic).items():
        step = ps.compile(program, groups[inside])

        def run(name: str = name, step: ps.Step = step) -> None:
            kept[name] = step(g=mine)[0]

        out[name] = way(name, run, share, scale=0.25)
    return out


def numbers(length: int, seed: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


if __name__ == "__main__":
    parser = parser_of(QUESTION, rate="500mbit", ranks=4, ranks_of_host=2)
    parser.add_argument(
        "--cyclic", dest="is_cyclic", action="store_true", help="neighbours on different hosts"
    )
    parser.add_argument("--million", type=float, default=4, help="elements of float32")
    main("benchmarks.hierarchy", QUESTION, parser, BASELINE)
