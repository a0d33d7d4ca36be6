"""Regions contracted to single nodes: whether an order of them is left, and which.

A region that is carried out in one go waits for everything that any of its nodes reads. Each
region alone may be fine and two of them still wait for each other; so all are contracted together.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from heapq import heapify, heappop, heappush

from penstock.errors import ProgramError
from penstock.step.program.nodes import Program

__all__ = ["arranged", "check_old_values", "contracted"]

_TOGETHER = ("fuse", "chunk", "ring", "bucket")
"""Kinds of regions that are carried out in one go."""

Edges = dict[int, set[int]]


def contracted(program: Program, kinds: Iterable[str] = _TOGETHER) -> tuple[tuple[str, ...], ...]:
    """Return the nodes in groups, each a region or a single node, in an order that they allow.

    Regions that share nodes are one group. Readers of the old value of a state stand before its
    update, where an order allows that.
    """
    groups = _groups(program, tuple(kinds))
    needs, order = _ordered(program, groups)
    if len(order) < len(groups):
        # Not all old values can be read in time. The order of values is left; whether the old ones
        # are overwritten too early, the plan's check decides, which knows what shares memory.
        order = _sorted(needs)
    if len(order) < len(groups):
        raise ProgramError(_circle(program, groups, needs))
    return tuple(groups[number] for number in order)


def check_old_values(program: Program, before: Program) -> None:
    """Refuse a rewrite after which the old value of a state is read or returned too late.

    A region that reads the old value and needs something made of the update would have to run
    before the update and after it. Where the program before had the same fault, the plan's check,
    which knows more, decides.
    """
    gone = [name for name in _returned_old(program) if name not in _returned_old(before)]
    if gone:
        raise ProgramError(
            f"the program would return the old value of {gone[0]}, whose memory has the new one by "
            "then; return the new value, or a value made of the old one"
        )
    groups = _groups(program, _TOGETHER)
    _, order = _ordered(program, groups)
    if len(order) == len(groups):
        return
    was = _groups(before, _TOGETHER)
    if len(_ordered(before, was)[1]) < len(was):
        return
    done = {name for number in order for name in groups[number]}
    stuck = [n for n in program.nodes if n.op == "update" and n.name not in done]
    old = {node.inputs[0] for node in stuck}
    regions = [
        region
        for region in program.regions
        if region.kind in _TOGETHER and any(old & set(program[n].inputs) for n in region.nodes)
    ]
    what = f"the {regions[-1].kind} region {regions[-1].name}" if regions else "a region"
    raise ProgramError(
        f"{what} reads the old value of {min(old)} and depends on its update {stuck[0].name}: it "
        "would have to run before the update and after it; leave one of its nodes out"
    )


def _returned_old(program: Program) -> list[str]:
    """Return the outputs that are values of states before their last update."""
    nodes = [program[name] for name in program.outputs]
    states = [(str(node.attr("target", node.name)), node.name) for node in nodes]
    return [name for state, name in states if program.states.get(state, name) != name]


def arranged(program: Program) -> Program:
    """Return a program whose regions stand in one piece, if they do not wait for each other."""
    names = [name for group in contracted(program) for name in group]
    place = {name: at for at, name in enumerate(names)}
    regions = [
        replace(region, nodes=tuple(sorted(region.nodes, key=place.__getitem__)))
        for region in program.regions
    ]
    return replace(program, nodes=tuple(program[name] for name in names), regions=tuple(regions))


def _groups(program: Program, kinds: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the nodes in groups, by their first nodes; each group in the order of the program."""
    leader = {node.name: node.name for node in program.nodes}

    def top(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    for region in program.regions:
        if region.kind in kinds:
            for name in region.nodes[1:]:
                leader[top(name)] = top(region.nodes[0])
    out: dict[str, list[str]] = {}
    for node in program.nodes:
        out.setdefault(top(node.name), []).append(node.name)
    return [tuple(group) for group in out.values()]


def _ordered(program: Program, groups: list[tuple[str, ...]]) -> tuple[Edges, list[int]]:
    """Return the groups that each group needs, and an order in which old values are read in time.

    Where there is no such order, some groups are missing in it.
    """
    group_of = {name: number for number, group in enumerate(groups) for name in group}
    needs: Edges = {number: set() for number in range(len(groups))}
    for node in program.nodes:
        mine = group_of[node.name]
        needs[mine] |= {group_of[name] for name in node.inputs} - {mine}
    old = {k: v | _readers(program, groups, group_of, k) for k, v in needs.items()}
    return needs, _sorted(old)


def _readers(
    program: Program, groups: list[tuple[str, ...]], group_of: dict[str, int], number: int
) -> set[int]:
    """Return the groups that read what the updates of a group write over."""
    updates = [program[name] for name in groups[number] if program[name].op == "update"]
    old = {node.inputs[0] for node in updates}
    out = {group_of[user] for name in old for user in program.users[name]}
    return out - {number}


def _sorted(needs: Edges) -> list[int]:
    """Return an order near to that of the numbers; a circle and all after it are left out."""
    sorter = TopologicalSorter(needs)
    with suppress(CycleError):
        sorter.prepare()
    ready = list(sorter.get_ready())
    # The smallest ready number first: nodes keep the user's order where nothing speaks against it.
    heapify(ready)
    out = []
    while ready:
        number = heappop(ready)
        out.append(number)
        sorter.done(number)
        for user in sorter.get_ready():
            heappush(ready, user)
    return out


def _circle(program: Program, groups: list[tuple[str, ...]], needs: Edges) -> str:
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        circle: list[int] = error.args[1][:-1]
    shown = " and ".join(_called(program, groups[number]) for number in sorted(circle))
    return (
        f"{shown} would wait for each other: each needs something that another one makes; "
        "leave one of their nodes out"
    )


def _called(program: Program, group: tuple[str, ...]) -> str:
    if len(group) == 1:
        return group[0]
    found = [r for r in program.regions if r.kind in _TOGETHER and group[0] in r.nodes]
    inside = set(group)
    found = found or [r for r in program.regions if set(r.nodes) <= inside]
    return f"the {found[0].kind} region {found[0].name}" if found else group[0]
