"""overlap: let nodes run at the same time, as far as the values that they read allow.

Nodes outside of such regions run one after the other. All nodes may be named at once: each waits
for its operands only, so in a chain of gradients, each followed by its all-reduce, one is sent
while the next is computed. Condition: there is something to gain. Two nodes on different lanes must
be independent, or there must be chunks, of which one is computed while another is sent.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from penstock.errors import ProgramError
from penstock.step.program.nodes import Program, Region
from penstock.step.program.passes.draft import below_all
from penstock.step.program.passes.regions import found, in_order, lane_of, named

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
    if not _has_chunks(program, nodes):
        _check_alone(program, nodes)
    called = named(program, "overlap", name)
    region = Region(name=called, kind="overlap", nodes=nodes)
    return replace(program, regions=(*program.regions, region))


def _each_of_chunks(program: Program) -> Program:
    done = program.region_by_node("overlap").keys()
    chosen = [r for r in program.regions if r.kind == "chunk" and done.isdisjoint(r.nodes)]
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
                f"overlap of {both[0]}, which overlaps in region {region.name} already; name all "
                "nodes that overlap in one call"
            )


def _check_lanes(program: Program, nodes: tuple[str, ...]) -> None:
    lanes = {lane_of(program[node]) for node in nodes}
    if len(lanes) < 2:
        raise ProgramError(
            f"overlap of {', '.join(nodes)}: each of them keeps {min(lanes)} busy, so none can run "
            "beside another; take in a node on another lane"
        )


def _has_chunks(program: Program, nodes: tuple[str, ...]) -> bool:
    """Whether there are chunks on different lanes among some nodes."""
    inside = set(nodes)
    for region in program.regions:
        cut = [name for name in region.nodes if name in inside]
        lanes = {lane_of(program[name]) for name in cut}
        if region.kind == "chunk" and region.num_chunks > 1 and len(lanes) > 1:
            return True
    return False


def _check_alone(program: Program, nodes: tuple[str, ...]) -> None:
    """Refuse nodes of which each pair on different lanes depends on each other."""
    below = {name: below_all(program, [name]) for name in nodes}
    for one, other in combinations(nodes, 2):
        if lane_of(program[one]) == lane_of(program[other]):
            continue
        if other not in below[one] and one not in below[other]:
            return
    raise ProgramError(
        f"overlap of {', '.join(nodes)}: nodes on different lanes depend on each other; chunk them "
        "together, then each chunk waits for its own values only"
    )
