"""chunk: cut a region into pieces that are carried out one after the other.

The pieces are independent, so the second may be computed while the first is sent; `overlap` allows
it. Condition: a dimension that no node of the region mixes. Where an axis slices it, piece k of a
whole value is the k-th run of every rank's part.
"""

from __future__ import annotations

from penstock.errors import ProgramError
from penstock.step.program.layouts import S, part
from penstock.step.program.loops import loops_of
from penstock.step.program.lower import host_nodes
from penstock.step.program.nodes import Program, Region
from penstock.step.program.ops import OPS
from penstock.step.program.passes.cuts import Cut, cut_along
from penstock.step.program.passes.regions import in_order, meant, named, with_region

__all__ = ["chunk"]


def chunk(
    program: Program, k: int, *names: str, dim: int | None = None, name: str | None = None
) -> Program:
    """Cut a region into k chunks along a dimension of its last node.

    Names are nodes, a region, or the first and the last node; by default the latest fused region.
    Chunks have one length, but the last may be shorter; then there may be fewer than k.
    """
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise ProgramError(f"chunk into {k!r} pieces; 1 or more make sense")
    if not names:
        names = _fused_last(program)
    nodes = _with_fused(program, _with_results(program, set(meant(program, names, "chunk"))))
    _check_whole(program, nodes)
    # Merged dimensions are cut evenly, so that a run of the merged one is a run of its first part.
    cut = cut_along(program, nodes, dim, k * program.mesh.num_ranks)
    axis = _axis_of(program, cut)
    kept = _kept(program, nodes, cut)
    region = Region(
        name=named(program, "chunk", name),
        kind="chunk",
        nodes=kept,
        num_chunks=_num_chunks(program, kept, cut, axis, k),
        dims=_dims(program, kept, cut),
        axis=axis,
    )
    return with_region(program, region)


def _fused_last(program: Program) -> tuple[str, ...]:
    regions = [region.name for region in program.regions if region.kind == "fuse"]
    if not regions:
        raise ProgramError("chunk of nothing: name nodes or a region, or fuse some first")
    return (regions[-1],)


def _with_fused(program: Program, inside: set[str]) -> tuple[str, ...]:
    """Return nodes and those fused with them."""
    for region in program.regions:
        if region.kind == "fuse" and inside & set(region.nodes):
            inside |= set(region.nodes)
    return in_order(program, inside)


def _with_results(program: Program, inside: set[str]) -> set[str]:
    """Return nodes, the calls of which they are results, and all results of those calls."""
    picks = [node for node in program.nodes if node.op == "pick"]
    calls = {node.inputs[0] for node in picks if {node.name, node.inputs[0]} & inside}
    return inside | calls | {node.name for node in picks if node.inputs[0] in calls}


def _check_whole(program: Program, nodes: tuple[str, ...]) -> None:
    for node in (program[name] for name in nodes):
        is_call = node.op in ("call", "pick")
        if node.op in ("load", "store") or (is_call and not loops_of(node, program)):
            if is_call and "sum" in node.attr("batch", ((), ()))[1]:
                raise ProgramError(
                    f"chunk of {node.name}: a result of it is a sum over its samples; leave it out"
                )
            raise ProgramError(
                f"chunk of {node.name}: {node.op} comes whole and cannot be cut into pieces; leave "
                "it out"
            )


def _kept(program: Program, nodes: tuple[str, ...], cut: Cut) -> tuple[str, ...]:
    """Return the nodes that are cut; nodes that every chunk needs whole run before the region.

    Numbers that a fused kernel computes for itself stay in it.
    """
    kept = {name for name in nodes if cut.get(name) is not None}
    fused = [r for r in program.regions if r.kind == "fuse" and kept & set(r.nodes)]
    kept |= {name for region in fused for name in region.nodes}
    for node in (program[name] for name in nodes if cut.get(name) is None):
        kind = OPS[node.op].kind
        if kind in ("move", "io") or node.op in ("update", "recv"):
            raise ProgramError(
                f"chunk of {node.name} ({node.op}), which has no dimension that is cut: every "
                "chunk would do it again; leave it out"
            )
    _check_leaving(program, kept, cut)
    return in_order(program, kept)


def _check_leaving(program: Program, kept: set[str], cut: Cut) -> None:
    """Refuse a value that every chunk computes for itself, if another node reads it as well."""
    numbers = set(host_nodes(program))
    for name in sorted(kept):
        users = program.users[name]
        leaves = name in program.outputs or any(user not in kept for user in users)
        if cut.get(name) is None and leaves and name not in numbers:
            raise ProgramError(
                f"chunk of {name}, which is fused with others and is not cut: every chunk would "
                "write it; leave it out of the fusion"
            )


def _dims(program: Program, nodes: tuple[str, ...], cut: Cut) -> tuple[tuple[str, int], ...]:
    touched = {*nodes, *(name for node in nodes for name in program[node].inputs)}
    return tuple((n, d) for n in sorted(touched) if (d := cut.get(n)) is not None)


# -- slices ------------------------------------------------------------------------------------


def _axis_of(program: Program, cut: Cut) -> str | None:
    """Return the axis that slices some values along the cut and not others."""
    dims = {name: dim for name, dim in cut.items() if dim is not None}
    sliced = [frozenset(program[name].type.slicing(dim)) for name, dim in dims.items()]
    always = frozenset.intersection(*sliced)
    some = frozenset.union(*sliced) - always
    if not some:
        return None
    if len(some) > 1:
        raise ProgramError(
            f"chunk along a dimension that axes {' and '.join(sorted(some))} slice in some of the "
            "values and not in others; one such axis is possible, chunk less at once"
        )
    (axis,) = some
    order = program.mesh.names
    if any(order.index(other) > order.index(axis) for other in always):
        raise ProgramError(
            f"chunk along a dimension whose parts on axis {axis!r} axis {max(always)!r} cuts "
            "again: gathering one of them leaves no runs; chunk less at once"
        )
    return axis


def _num_chunks(
    program: Program, nodes: tuple[str, ...], cut: Cut, axis: str | None, k: int
) -> int:
    """Return the number of chunks, of which none is empty on the rank with the longest part."""
    name, dim = next((n, d) for n in nodes if (d := cut.get(n)) is not None)
    made = program[name].type
    first, last = made.bounds(program.mesh, 0)[dim]
    length = last - first
    if axis is not None and made.layout(axis) != S(dim):
        _, length = part(length, program.mesh.size(axis), 0)
    if not 0 < k <= length:
        raise ProgramError(
            f"chunk of {name} into {k} pieces along dimension {dim}, of which a rank's part has "
            f"{length} elements; {max(length, 1)} pieces at most"
        )
    # All chunks have the length of the first one, so fewer than k may do.
    return -(-length // -(-length // k))
