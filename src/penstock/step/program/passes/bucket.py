"""bucket: several small collectives become one, over memory that lies together.

A collective costs its latency however small it is, so many small tensors are moved as one flat
*arena*. The region has their order in it and where each begins, in elements of one rank's
contribution; the graph stays as it is. Conditions: the same operation on the same axes and element
type, and none depends on another one.
"""

from __future__ import annotations

import math

from penstock.errors import ProgramError
from penstock.step.program.nodes import Node, Program, Region
from penstock.step.program.passes.draft import below_all
from penstock.step.program.passes.regions import found, in_order, named, with_region

__all__ = ["bucket"]

_TOGETHER = ("all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast")
_ALIKE = ("axis", "op", "root", "wire", "algo", "priority", "ahead")


def bucket(program: Program, *names: str, name: str | None = None) -> Program:
    """Move several values as one, in the order of the program."""
    chosen = {found(program, one).name for one in names}
    nodes = in_order(program, chosen)
    if len(nodes) < 2:
        raise ProgramError(f"bucket of {len(nodes)} collectives; name two or more")
    first = program[nodes[0]]
    for node in (program[one] for one in nodes):
        _check_alike(program, first, node)
    for one in nodes:
        later = (below_all(program, [one]) & chosen) - {one}
        if later:
            raise ProgramError(
                f"bucket of {one} and {min(later)}, which needs it: they cannot go at once; put "
                "them into different buckets"
            )
    offsets, total = _offsets(program, nodes)
    region = Region(
        name=named(program, "bucket", name),
        kind="bucket",
        nodes=nodes,
        attrs=(("offsets", offsets), ("total", total)),
    )
    return with_region(program, region)


def _check_alike(program: Program, first: Node, node: Node) -> None:
    if node.op not in _TOGETHER:
        raise ProgramError(
            f"bucket of {node.name}: {node.op} is none of {', '.join(_TOGETHER)}; leave it out"
        )
    mine, theirs = program[first.inputs[0]].type.dtype, program[node.inputs[0]].type.dtype
    found = [("operation", first.op, node.op), ("element type", mine, theirs)]
    found += [(key, first.attr(key), node.attr(key)) for key in _ALIKE]
    for what, one, other in found:
        if one != other:
            raise ProgramError(
                f"bucket of {first.name} and {node.name}: {what} {one!r} and {other!r}; make a "
                "bucket for each"
            )


def _offsets(program: Program, nodes: tuple[str, ...]) -> tuple[tuple[int, ...], int]:
    """Return where each value begins in the arena, and its length, on the rank with most elements.

    For a scatter or a gather these are places in one rank's share: the arena has one share for each
    rank, so that all parts of a rank lie together.
    """
    at, out = 0, []
    for node in (program[one] for one in nodes):
        made = node.type if node.op == "reduce_scatter" else program[node.inputs[0]].type
        out.append(at)
        at += math.prod(made.local_shape(program.mesh, 0))
    return tuple(out), at
