"""Regions seen as single nodes: whether that leaves an order, and which.

A region that is carried out in one go waits for everything that any of its nodes reads. Each
region alone may be fine and two of them still wait for each other; so all are contracted together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from heapq import heapify, heappop, heappush

from penstock.errors import ProgramError
from penstock.step.program.nodes import Program

__all__ = ["arranged", "check_old_values", "contracted"]

_TOGETHER = ("fuse", "chunk", "ring", "bucket")
"""Kinds of regions that are carried out in one go."""

Edges = dict[int, set[int]]


def contracted(program: Program, kinds: Iterable[str] = _TOGETHER) -> tuple[tuple[str, ...], ...]:
    """Return the nodes in groups, each a region or a single node, in an order that they allow.

    Regions that share nodes are one group. Who still reads the old value of a state stands before
    its update, where that can be.
    """
    groups = _groups(program, tuple(kinds))
    needs, order = _ordered(program, groups)
    if len(order) < len(groups):
        order = _sorted(needs)
    if len(order) < len(groups):
        raise ProgramError(_circle(program, groups, needs, set(order)))
    return tuple(groups[number] for number in order)


def check_old_values(program: Program, before: Program) -> None:
    """Refuse to read or return a state as it was when its update is there already.

    A region that reads it and needs what is made of the update would have to be carried out before
    that and after it. What was so before is left for the plan's check, which knows more.
    """
    gone = [name for name in _returned_old(program) if name not in _returned_old(before)]
    if gone:
        raise ProgramError(
            f"the program would return {gone[0]} as it was, in whose memory the new value lies by "
            "then; return the new one, or leave what is made of the old one"
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
        f"{what} reads {min(old)} as it was and waits for what is made of the new one, "
        f"{stuck[0].name}: it would have to come before that and after it; leave one of its nodes "
        "out"
    )


def _returned_old(program: Program) -> list[str]:
    """Return what a program returns of states that something else takes the place of."""
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
    """Return what each group needs, and an order in which old values are read before they go.

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
    missing = {number: len(before) for number, before in needs.items()}
    users: dict[int, list[int]] = {}
    for number, before in needs.items():
        for one in before:
            users.setdefault(one, []).append(number)
    ready = [number for number, count in missing.items() if not count]
    heapify(ready)
    out = []
    while ready:
        number = heappop(ready)
        out.append(number)
        for user in users.get(number, ()):
            missing[user] -= 1
            if not missing[user]:
                heappush(ready, user)
    return out


def _circle(program: Program, groups: list[tuple[str, ...]], needs: Edges, done: set[int]) -> str:
    at = next(number for number in needs if number not in done)
    seen: list[int] = []
    while at not in seen:
        seen.append(at)
        at = min(needs[at] - done)
    circle = seen[seen.index(at) :]
    if len(circle) == 1:
        return f"{groups[circle[0]][0]} depends on itself"
    shown = " and ".join(_called(program, groups[number]) for number in circle)
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
