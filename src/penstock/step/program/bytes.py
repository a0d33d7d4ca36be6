"""Bytes: what every rank sends and holds, known before anything is sent.

    all_reduce       a rank sends all parts but its own, and then its own to everybody
    reduce_scatter   all parts but its own
    all_gather       its own to everybody; in a ring, all parts but the one its neighbour began with
    all_to_all       what others will have of its own
    reduce           all of it, but for the root
    broadcast        all of it, but for the last of the chain that begins at the root
    send             all of it, but for ranks at the end, which have no receiver

For N bytes on W ranks with even parts that is 2(W-1)/W·N, (W-1)/W·N, (W-1)/W·N, (W-1)/W²·N and N.
Uneven parts are counted as they are cut, so these are the bytes on the wire and no estimates. All
ranks together send the same with every algorithm. A wire of another element type counts by that
type. Tests compare these numbers with the bytes that the carried-out program has counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from penstock.errors import ProgramError
from penstock.step.program.chunks import Runs, chunk_runs
from penstock.step.program.layouts import DTYPES, part
from penstock.step.program.nodes import Node, Program, Region
from penstock.step.program.ops import is_move

__all__ = [
    "chunk_bytes",
    "held_bytes",
    "num_elements",
    "sent_by_task",
    "sent_bytes",
    "sent_together",
]


def sent_bytes(
    node: Node, program: Program, rank: int | None = None, chunk: int | None = None
) -> int:
    """Return the bytes that one rank or the busiest one sends in a move, or in one chunk of it."""
    return sent_together((node,), program, rank, chunk)


def sent_together(
    nodes: Iterable[Node], program: Program, rank: int | None = None, chunk: int | None = None
) -> int:
    """Return the bytes of several moves that go as one, from one flat memory.

    All-reduces are joined to one long tensor, which is cut into parts anew; other moves keep the
    parts of each value.
    """
    moves = tuple(nodes)
    for node in moves:
        if not is_move(node.op):
            raise ProgramError(f"{node.name} is a {node.op}, which sends nothing; name a move")
    ranks = range(program.mesh.num_ranks) if rank is None else (rank,)
    return max(_of_rank(moves, program, at, chunk) for at in ranks)


def sent_by_task(
    names: Iterable[str],
    program: Program,
    kind: str,
    rank: int | None = None,
    chunk: int | None = None,
) -> int:
    """Return the bytes that the moves of a task send, each alone or, in a bucket, as one."""
    moves = [program[name] for name in names if is_move(program[name].op)]
    if kind == "bucket":
        return sent_together(moves, program, rank, chunk)
    return sum(sent_bytes(node, program, rank, chunk) for node in moves)


def held_bytes(name: str, program: Program, rank: int = 0, chunk: int | None = None) -> int:
    """Return the bytes that a rank has of a value, or of one of its chunks.

    A call has the bytes of its results.
    """
    if program[name].op == "call":
        return sum(held_bytes(pick, program, rank, chunk) for pick in program.users[name])
    return num_elements(name, program, rank, chunk) * DTYPES[program[name].type.dtype].size_bytes


def chunk_bytes(name: str, program: Program, region: Region | None) -> int:
    """Return the bytes that rank 0 has of a value, or of its largest chunk in a region."""
    size_bytes = held_bytes(name, program)
    if region is None or region.dim(name) is None:
        return size_bytes
    return -(-size_bytes // region.num_chunks)


def num_elements(
    name: str,
    program: Program,
    rank: int = 0,
    chunk: int | None = None,
    region: Region | None = None,
) -> int:
    """Return how many elements a rank has of a value, or of one of its chunks.

    The region is given for values that it reads: a value may be cut in one region and not in
    another.
    """
    return math.prod(map(_length, _runs(name, program, rank, chunk, region)))


def _of_rank(moves: tuple[Node, ...], program: Program, rank: int, chunk: int | None) -> int:
    """Return the bytes of one rank. All-reduces of one element size are one tensor."""
    total, flat = 0, dict[int, int]()
    for node in moves:
        if program.mesh.size(*node.axes) == 1:
            continue
        region = _region(program, node.name) if chunk is not None else None
        dtype = node.attr("wire") or program[node.inputs[0]].type.dtype
        size = DTYPES[str(dtype)].size_bytes
        if node.op == "all_reduce":
            count = num_elements(node.inputs[0], program, rank, chunk, region)
            flat[size] = flat.get(size, 0) + count
        else:
            total += size * _sent_elements(node, program, rank, chunk, region)
    for size, count in flat.items():
        total += size * _all_reduced(moves[0], program, rank, count)
    return total


def _all_reduced(node: Node, program: Program, rank: int, count: int) -> int:
    mesh = program.mesh
    parts, at = mesh.size(*node.axes), mesh.coordinate(rank, *node.axes)
    lengths = [stop - start for start, stop in (part(count, parts, i) for i in range(parts))]
    back = (parts - 1) * lengths[at]
    if node.attr("algo") == "ring":
        # A rank passes on all sums but the one that its next neighbour has made itself.
        back = count - lengths[(at + 1) % parts]
    return count - lengths[at] + back


def _sent_elements(
    node: Node, program: Program, rank: int, chunk: int | None, region: Region | None
) -> int:
    mesh, source = program.mesh, node.inputs[0]
    size, at = mesh.size(*node.axes), mesh.coordinate(rank, *node.axes)
    group = mesh.group(rank, *node.axes)
    held = num_elements(source, program, rank, chunk, region)
    if node.op == "reduce_scatter":
        return held - num_elements(node.name, program, rank, chunk, region)
    if node.op == "all_gather":
        if node.attr("algo") != "ring":
            return (size - 1) * held
        whole = num_elements(node.name, program, rank, chunk, region)
        return whole - num_elements(source, program, group[(at + 1) % size], chunk, region)
    if node.op == "all_to_all":
        mine = _runs(source, program, rank, chunk, region)
        theirs = [_runs(node.name, program, r, chunk, region) for r in group if r != rank]
        return sum(_common(mine, wanted) for wanted in theirs)
    if node.op == "send":
        return held if 0 <= at + int(node.attr("by")) < size else 0
    assert node.op in ("reduce", "broadcast"), node.op
    from_root = (at - int(node.attr("root"))) % size
    is_end = from_root == (0 if node.op == "reduce" else size - 1)
    return 0 if is_end else held


# -- where elements lie ------------------------------------------------------------------------


def _region(program: Program, name: str) -> Region:
    found = program.regions_of(name, "chunk")
    if not found:
        raise ProgramError(f"{name} is in no region that is cut into chunks; ask for all of it")
    return found[0]


def _runs(
    name: str, program: Program, rank: int, chunk: int | None, region: Region | None
) -> tuple[Runs, ...]:
    """Return by dimension where the elements lie that a rank has of a value, or of one chunk."""
    made = program[name].type
    if chunk is None:
        return tuple((bound,) for bound in made.bounds(program.mesh, rank))
    region = region or _region(program, name)
    return chunk_runs(region, name, made, mesh=program.mesh, rank=rank, chunk=chunk)


def _length(runs: Runs) -> int:
    return sum(stop - start for start, stop in runs)


def _common(some: tuple[Runs, ...], others: tuple[Runs, ...]) -> int:
    """Return how many elements two ranks' parts of one value have in common."""
    total = 1
    for mine, theirs in zip(some, others, strict=True):
        pairs = ((a, b) for a in mine for b in theirs)
        total *= sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in pairs)
    return total
