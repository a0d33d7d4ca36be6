"""overlap: let nodes go on at the same time, as far as the values that they read allow.

What nobody says may overlap is done one after the other. Condition: there is something to win and
nothing to wait for, that is, nodes on different lanes of which none needs another one, or chunks,
of which one is computed while another one is on its way.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from penstock.errors import ProgramError
from penstock.program.nodes import Program, Region
from penstock.program.passes.draft import below_all
from penstock.program.passes.regions import found, in_order, lane_of, named

__all__ = ["overlap"]


def overlap(program: Program, *names: str, name: str | None = None) -> Program:
    """Let regions and nodes overlap; where none is named, each region of chunks within itself."""
    if not names:
        return _each_of_chunks(program)
    regions = {region.name: region for region in program.regions}
    parts = [regions[one].nodes if one in regions else (found(program, one).name,) for one in names]
    nodes = in_order(program, {node for part in parts for node in part})
    _check_new(program, nodes)
    _check_lanes(program, nodes)
    for part, other in combinations(parts, 2):
        _check_pair(program, part, other)
    if len(parts) == 1 and not _are_chunked_together(program, nodes):
        _check_alone(program, nodes)
    called = named(program, "overlap", name)
    region = Region(name=called, kind="overlap", nodes=nodes)
    return replace(program, regions=(*program.regions, region))


def _each_of_chunks(program: Program) -> Program:
    done = {n for r in program.regions if r.kind == "overlap" for n in r.nodes}
    chosen = [r for r in program.regions if r.kind == "chunk" and not done & set(r.nodes)]
    if not chosen:
        raise ProgramError("overlap of nothing: name nodes or regions, or chunk some first")
    for region in chosen:
        program = overlap(program, region.name)
    return program


def _check_new(program: Program, nodes: tuple[str, ...]) -> None:
    for region in program.regions:
        both = [node for node in nodes if node in region.nodes]
        if region.kind == "overlap" and both:
            raise ProgramError(
                f"overlap of {both[0]}, which overlaps in region {region.name} already; name "
                "everything that goes on at the same time at once"
            )


def _check_lanes(program: Program, nodes: tuple[str, ...]) -> None:
    lanes = {lane_of(program[node]) for node in nodes}
    if len(lanes) < 2:
        raise ProgramError(
            f"overlap of {', '.join(nodes)}: all of it keeps {min(lanes)} busy, so nothing can go "
            "on beside it; take in something on another lane"
        )


def _are_chunked_together(program: Program, nodes: tuple[str, ...]) -> bool:
    inside = set(nodes)
    return any(
        r.kind == "chunk" and r.num_chunks > 1 and inside <= set(r.nodes) for r in program.regions
    )


def _check_pair(program: Program, part: tuple[str, ...], other: tuple[str, ...]) -> None:
    """Refuse two of which one needs all of the other before it can begin."""
    if _are_chunked_together(program, (*part, *other)):
        return
    for first, second in ((part, other), (other, part)):
        if below_all(program, first) & set(second) - set(first):
            raise ProgramError(
                f"overlap of {first[0]} and {second[-1]}: the second needs all of the first; "
                "chunk them together, then each chunk waits for its own only"
            )


def _check_alone(program: Program, nodes: tuple[str, ...]) -> None:
    """Refuse nodes that wait for each other, all of them."""
    for one, other in combinations(nodes, 2):
        if lane_of(program[one]) == lane_of(program[other]):
            continue
        if other not in below_all(program, [one]) and one not in below_all(program, [other]):
            return
    raise ProgramError(
        f"overlap of {', '.join(nodes)}: what is on different lanes waits for each other; chunk "
        "them together, then each chunk waits for its own only"
    )
