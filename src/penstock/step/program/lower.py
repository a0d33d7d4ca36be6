"""Lowering: from a program to the plan that carries it out.

Nodes become tasks, a fused region one task, a chunked region one task for each node and chunk, a
load one task for each of its stages. A task waits for the writers of the values that it reads; if
it writes memory that is used again, as that of a state, it waits for earlier readers and writers of
that memory. All other tasks run one after the other, except in regions that overlap.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from penstock.step.program.bytes import chunk_bytes, sent_by_task
from penstock.step.program.contract import arranged
from penstock.step.program.loads import STAGES, tasks_of_load
from penstock.step.program.nodes import Node, Program, Region
from penstock.step.program.ops import OPS, is_move
from penstock.step.program.plan import COMPUTE, IO, Access, Plan, Task, net_lane
from penstock.step.program.sharing import shared
from penstock.step.program.verify import verified

__all__ = ["host_nodes", "lower"]

_FREE = ("input", "scalar", "const", "pick")
"""Nodes without a task: their values are given, or come with another node."""
_AS_ONE = ("fuse", "ring", "bucket")
"""Regions that are one task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TaskUnit:
    """Nodes that one task carries out, for one chunk or for all."""

    nodes: tuple[str, ...]
    region: Region | None = None
    chunk: int | None = None


Touched = dict[str, list[tuple[Task, Access]]]
"""By memory: the tasks so far that read or write it."""


def lower(program: Program, *, donate: Collection[str] = ()) -> Plan:
    """Return the plan of a program; inputs that are donated may be written over."""
    # `arranged`: readers of the old value of a state stand before the update that overwrites it.
    program = arranged(verified(program))
    units = list(_units(program))
    memory = shared(program, donate)
    tasks: list[Task] = []
    touched: Touched = {}
    order = _ImpliedOrder(program)
    for each in (task for unit in units for task in _tasks(program, unit, memory)):
        after = _needed(each, touched) | order.before(each)
        # Stages of a load share no value, so only this orders them.
        if tasks and tasks[-1].kind in STAGES and tasks[-1].nodes == each.nodes:
            after.add(tasks[-1].name)
        task = replace(each, after=tuple(t.name for t in tasks if t.name in after))
        for access in (*task.reads, *task.writes):
            touched.setdefault(access.memory, []).append((task, access))
        order.done(task)
        tasks.append(task)
    return Plan(program=program, tasks=tuple(tasks), shared=tuple(memory.items()))


def host_nodes(program: Program) -> tuple[str, ...]:
    """Return the nodes that compute a number from numbers, which need no task."""
    host = {n.name for n in program.nodes if n.op in ("scalar", "const")}
    out = []
    for node in program.nodes:
        is_number = node.type.shape == () and OPS[node.op].kind == "pointwise"
        if is_number and node.inputs and all(name in host for name in node.inputs):
            host.add(node.name)
            out.append(node.name)
    return tuple(out)


# -- units -------------------------------------------------------------------------------------


def _units(program: Program) -> Iterator[_TaskUnit]:
    """Yield the units that become tasks, in an order in which they can be done."""
    fused, chunked = program.region_by_node(*_AS_ONE), program.region_by_node("chunk")
    skipped = {*host_nodes(program)}
    wanted = [n.name for n in program.nodes if n.op not in _FREE and n.name not in skipped]
    fuse = {n: fused[n].nodes if n in fused else (n,) for n in wanted}
    cut = {n: chunked[n].nodes if n in chunked else fuse[n] for n in wanted}
    for group in _in_order(program, cut):
        region = chunked.get(group[0])
        if region is None:
            yield _TaskUnit(nodes=group)
            continue
        inside = _in_order(program, {n: fuse[n] for n in wanted if n in region.nodes})
        # Chunk by chunk: the move of the first can run while the second is computed.
        for chunk in range(region.num_chunks):
            for each in inside:
                yield _TaskUnit(nodes=each, region=region, chunk=chunk)


def _in_order(program: Program, groups: dict[str, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return groups of nodes in an order in which each comes after everything that it reads.

    So a group may come later than some nodes that stood between its own.
    """
    missing = set(groups)
    waiting = list(dict.fromkeys(groups.values()))
    out: list[tuple[str, ...]] = []
    while waiting:
        for group in waiting:
            needs = {name for node in group for name in _made_by(program, program[node])}
            if not (needs - set(group)) & missing:
                break
        else:
            raise AssertionError(f"{waiting[0]} depends on itself")
        waiting.remove(group)
        missing -= set(group)
        out.append(group)
    return out


def _made_by(program: Program, node: Node) -> list[str]:
    """Return the nodes whose tasks make the operands of a node."""
    return [program[name].inputs[0] if program[name].op == "pick" else name for name in node.inputs]


# -- tasks -------------------------------------------------------------------------------------


def _tasks(program: Program, unit: _TaskUnit, memory: dict[str, str]) -> list[Task]:
    task = _task(program, unit, memory)
    return tasks_of_load(program[unit.nodes[0]], task) if task.kind == "load" else [task]


def _task(program: Program, unit: _TaskUnit, memory: dict[str, str]) -> Task:
    nodes = [program[name] for name in unit.nodes]
    moves = [node for node in nodes if is_move(node.op)]
    suffix = "" if unit.chunk is None else f"[{unit.chunk}]"
    lane, kind = _lane_and_kind(program, nodes, moves)
    inside = set(unit.nodes)
    outside = [name for node in nodes for name in node.inputs if name not in inside]
    reads = [_access(program, name, unit, memory) for name in dict.fromkeys(outside)]
    leaving = [node.name for node in nodes if _leaves(program, node, inside)]
    writes = [_access(program, name, unit, memory) for name in leaving]
    return Task(
        name=f"{nodes[-1].name if len(nodes) == 1 else '+'.join(unit.nodes[:1] + unit.nodes[-1:])}"
        + suffix,
        lane=lane,
        nodes=unit.nodes,
        kind=kind,
        region=None if unit.region is None else unit.region.name,
        chunk=unit.chunk,
        reads=tuple(a for a in reads if program[a.value].op not in ("scalar", "const")),
        writes=tuple(writes),
        sent_bytes=_share(sent_by_task(unit.nodes, program, kind), unit),
        touched_bytes=0
        if _is_there(nodes, memory)
        else sum(chunk_bytes(n, program, unit.region) for n in (*dict.fromkeys(outside), *leaving)),
        priority=min((int(node.attr("priority", 0)) for node in nodes), default=0),
        ahead=max((int(node.attr("ahead", 0)) for node in nodes), key=abs, default=0),
    )


def _is_there(nodes: list[Node], memory: dict[str, str]) -> bool:
    """Whether a task is an update whose value was computed in the state's memory."""
    (first, *others) = nodes
    return first.op == "update" and not others and memory.get(first.inputs[1]) == memory[first.name]


def _lane_and_kind(program: Program, nodes: list[Node], moves: list[Node]) -> tuple[str, str]:
    if moves:
        # Gathers have a lane of their own: one that waits for an update would hold up the scatters
        # behind it, as lanes of communication keep their order.
        gathers = all(node.op == "all_gather" for node in moves)
        lane = net_lane(moves[0].axes) + (":gather" if gathers else "")
        as_one = [r.kind for r in program.regions if r.kind in _AS_ONE and nodes[0].name in r.nodes]
        if "ring" in as_one:
            return COMPUTE, "ring"  # One thread computes and communicates, step by step.
        if "bucket" in as_one:
            return lane, "bucket"
        return lane, "fused" if as_one else "move"
    kinds = {"load": (IO, "load"), "store": (IO, "store"), "call": (COMPUTE, "call")}
    return kinds.get(nodes[0].op, (COMPUTE, "compute"))


def _leaves(program: Program, node: Node, inside: set[str]) -> bool:
    """Whether a value is needed after its task."""
    if node.op == "update" or node.name in program.outputs:
        return True
    users = program.users[node.name]
    return len(inside) == 1 or any(user not in inside for user in users)


def _access(program: Program, name: str, unit: _TaskUnit, memory: dict[str, str]) -> Access:
    node = program[name]
    chunk = unit.chunk
    if unit.region is None or unit.region.dim(name) is None:
        chunk = None
    if node.op == "pick":
        return Access(value=node.inputs[0], chunk=chunk)
    return Access(value=name, chunk=chunk, state=memory.get(name))


def _needed(task: Task, touched: Touched) -> set[str]:
    """Return the tasks that must be over before a task may touch its values."""
    out: set[str] = set()
    for access in (*task.reads, *task.writes):
        for other, theirs in touched.get(access.memory, ()):
            is_write = access in task.writes or theirs in other.writes
            # Chunks of different regions are cut differently: any two of them may overlap.
            if is_write and (task.region != other.region or theirs.overlaps(access)):
                out.add(other.name)
    return out


class _ImpliedOrder:
    """Waits between tasks that may not overlap, since no region says that they may."""

    def __init__(self, program: Program) -> None:
        self._regions = program.region_by_node("overlap")
        self._last: list[str] = []
        """The latest tasks; tasks that do not overlap with them wait for them."""
        self._before: list[str] = []
        """The value of `_last` when the present region began."""
        self._inside: str | None = None

    def before(self, task: Task) -> set[str]:
        """Return the tasks that a task waits for."""
        region = self._region_of(task)
        if region is not None and region == self._inside:
            return set(self._before)
        return set(self._last)

    def done(self, task: Task) -> None:
        """Add a task to the order."""
        region = self._region_of(task)
        # Tasks of a region wait for those before it and not for each other.
        if region is None or region != self._inside:
            self._before = self._last
            self._last = []
        self._inside = region
        self._last = [*self._last, task.name]

    def _region_of(self, task: Task) -> str | None:
        found = [self._regions.get(name) for name in task.nodes]
        return found[0].name if found[0] and found.count(found[0]) == len(found) else None


# -- what tasks move ---------------------------------------------------------------------------


def _share(total: int, unit: _TaskUnit) -> int:
    """Return the largest share of one chunk."""
    return total if unit.region is None else -(-total // unit.region.num_chunks)
