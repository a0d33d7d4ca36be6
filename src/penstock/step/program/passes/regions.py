"""Regions of a program: which nodes names stand for, and whether they can be carried out together.

Names stand for nodes or for the nodes of a region. Two names stand for everything between the first
node and the last, and for the values that only those nodes need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import ProgramError
from penstock.step.program.contract import arranged
from penstock.step.program.lower import host_nodes
from penstock.step.program.nodes import Node, Program, Region, free_name
from penstock.step.program.ops import OPS
from penstock.step.program.passes.draft import above, below_all
from penstock.step.program.plan import net_lane
from penstock.step.program.verify import left_between

__all__ = [
    "between",
    "found",
    "in_order",
    "lane_of",
    "meant",
    "named",
    "with_buckets",
    "with_region",
]

_WORK = tuple(op.name for op in OPS.values() if op.kind != "leaf")
_APART = ("ring", "bucket")
"""Kinds of regions whose nodes may be in no other region, except one that overlaps."""


def found(program: Program, name: str) -> Node:
    """Return the node of a name; `g` in `g = all_reduce(g)` is the all-reduce."""
    if not isinstance(name, str):
        raise ProgramError(f"nodes are meant by their names, got {name!r}")
    return program.find(name, *_WORK, noun="node")


def meant(program: Program, names: Sequence[str], rewrite: str) -> tuple[str, ...]:
    """Return the nodes that some names stand for, in the order of the program."""
    if not names:
        raise ProgramError(f"{rewrite} of nothing; name nodes, or the first and the last of them")
    regions = {region.name: region for region in program.regions}
    if len(names) == 2 and not any(name in regions for name in names):
        return between(program, found(program, names[0]).name, found(program, names[1]).name)
    inside: set[str] = set()
    for name in names:
        inside.update(regions[name].nodes if name in regions else [found(program, name).name])
    return in_order(program, inside)


def in_order(program: Program, names: set[str]) -> tuple[str, ...]:
    """Return some nodes in the order of the program."""
    return tuple(node.name for node in program.nodes if node.name in names)


def with_buckets(program: Program, names: set[str]) -> set[str]:
    """Return some nodes and those in one bucket with them."""
    buckets = [set(region.nodes) for region in program.regions if region.kind == "bucket"]
    return names.union(*(nodes for nodes in buckets if nodes & names))


def between(program: Program, first: str, last: str) -> tuple[str, ...]:
    """Return all nodes on the paths from one to another, and nodes that only those need.

    With `b1 * m + (1 - b1) * g` on a path, `b1 * m` belongs to it though no path leads there; so do
    updates of states with values of the path. Numbers computed from numbers, such as `1 - b1`, do
    not: they are computed before a step begins.
    """
    inside = below_all(program, [first]) & above(program, last)
    if not inside:
        inside = below_all(program, [last]) & above(program, first)
    inside |= {first, last}
    while added := _absorbed(program, inside):
        inside |= added
    return in_order(program, inside - set(host_nodes(program)))


def _absorbed(program: Program, inside: set[str]) -> set[str]:
    for node in reversed(program.nodes):
        if node.name in inside:
            continue
        if node.op == "update" and node.inputs[1] in inside:
            if not left_between(program, in_order(program, inside | {node.name})):
                return {node.name}
        elif _is_only_for(program, node, inside):
            return {node.name}
    return set()


def _is_only_for(program: Program, node: Node, inside: set[str]) -> bool:
    """Whether a node computes a number or a value sliced alike, only for nodes that are inside."""
    users = [program[name] for name in program.users[node.name]]
    if OPS[node.op].kind != "pointwise" and node.op != "slice":
        return False
    if node.name in program.outputs or not users:
        return False
    if not all(u.name in inside and OPS[u.op].kind in ("pointwise", "state") for u in users):
        return False
    return not node.type.ndim or all(u.type.axes("S") == node.type.axes("S") for u in users)


# -- joining a program ---------------------------------------------------------------------------


def named(program: Program, kind: str, name: str | None) -> str:
    """Return the name of a new region: the given one, or its kind with a number."""
    # Names of nodes are taken too: rewrites are given names of either.
    taken = {region.name for region in program.regions} | set(program.by_name)
    if name is not None:
        if not isinstance(name, str) or name in taken:
            raise ProgramError(f"a region called {name!r}: there is something of that name already")
        return name
    return free_name(kind, taken)


def with_region(program: Program, region: Region) -> Program:
    """Return a program with one more region, if it fits with the other ones."""
    for other in program.regions:
        _check_pair(region, other)
    _check_turn(program, region)
    if region.kind != "overlap" and (between := left_between(program, region.nodes)):
        raise ProgramError(
            f"{region.kind} of {', '.join(region.nodes)}: {between[0]} stands between them, it "
            "reads one and another one reads it; take it in, or leave out what depends on it"
        )
    return arranged(replace(program, regions=(*program.regions, region)))


def _check_turn(program: Program, region: Region) -> None:
    """Refuse to carry nodes of different iterations out in one go."""
    ahead = {int(program[name].attr("ahead", 0)): name for name in region.nodes}
    if region.kind != "overlap" and len(ahead) > 1:
        (one, first), (other, second) = sorted(ahead.items())[:2]
        raise ProgramError(
            f"{region.kind} of {first} and {second}, which are {one} and {other} iterations ahead; "
            "what is carried out in one go belongs to one iteration"
        )


def _check_pair(region: Region, other: Region) -> None:
    shared = [name for name in region.nodes if name in other.nodes]
    if not shared or "overlap" in (region.kind, other.kind):
        return
    kinds = {region.kind, other.kind}
    if kinds == {"fuse", "chunk"}:
        fuse, chunk = (region, other) if region.kind == "fuse" else (other, region)
        odd = [name for name in fuse.nodes if name not in chunk.nodes]
        if not odd:
            return
        raise ProgramError(
            f"{odd[0]} is fused with {shared[0]}, which is cut into chunks, and is not cut itself; "
            f"take it in, or fuse only what is in chunk region {chunk.name}"
        )
    raise ProgramError(
        f"{region.kind} of {shared[0]}, which is in the {other.kind} region {other.name} already; "
        "leave it out, or do without that region"
    )


def lane_of(node: Node) -> str:
    """Return the resource that a node keeps busy: nodes on one of them cannot overlap."""
    kind = OPS[node.op].kind
    if kind == "move":
        return net_lane(node.axes)
    return "io" if kind == "io" else "compute"
