"""Whether a plan can be carried out: no races, no waiting in circles, nothing read too early.

A task *happens before* another if the other waits for it, directly or through other tasks. The
order of a lane does not count here: a lane orders the beginnings of its tasks, not their ends. Two
tasks that touch the same memory, one of them writing, must be ordered; and the order must be the
right one, since a state lies in the same memory before and after its update. Chunks of one region
are apart; chunks of two regions may overlap.

Ranks wait for each other in communication. They cannot deadlock if all have the same tasks in the
same order on every lane, and no lane has a task before another one that it waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from penstock.errors import ProgramError
from penstock.step.program.lower import host_nodes
from penstock.step.program.nodes import Node
from penstock.step.program.ops import is_pointwise
from penstock.step.program.plan import COMPUTE, IO, Access, Plan, Task

__all__ = ["check_orders", "check_plan", "goes_along"]

_IN_PART = ("reduce_scatter", "all_gather")
"""Moves whose slices may lie in the rank's part of the whole: no other rank touches that part."""


def check_plan(plan: Plan) -> None:
    """Refuse a plan that could go wrong, with the two tasks at fault."""
    book = _Book(plan)
    # Only waits are looked at, never a run: a race that luck would hide is found as well.
    for task in plan.tasks:
        for access in task.reads:
            book.check_read(task, access)
        for access in task.writes:
            book.check_write(task, access)
        book.check_ahead(task)
    book.check_results()
    net_lanes = [lane for lane in plan.lanes if lane not in (COMPUTE, IO)]
    check_orders(plan, {lane: [task.name for task in plan.on(lane)] for lane in net_lanes})


# -- races -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Touch:
    """A task and one of its reads or writes."""

    task: Task
    access: Access

    def meets(self, other: _Touch) -> bool:
        """Whether both touch the same elements; chunks of different regions may do."""
        chunks = self.access.chunk, other.access.chunk
        is_one = self.task.region == other.task.region
        return None in chunks or not is_one or chunks[0] == chunks[1]


class _Book:
    """The accesses of all tasks, and which tasks happen before which."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._numbers = {task.name: number for number, task in enumerate(plan.tasks)}
        self._before = _before(plan)
        self._there = {n.name for n in plan.program.nodes if n.op in ("input", "scalar", "const")}
        # Numbers computed from numbers are known before any task begins.
        self._host = {*host_nodes(plan.program)}
        self._there |= self._host
        self._writes: dict[str, list[_Touch]] = {}
        """By memory."""
        self._makers: dict[str, list[_Touch]] = {}
        """By value."""
        for task in plan.tasks:
            for access in task.writes:
                if access.value not in self._host:
                    touch = _Touch(task, access)
                    self._writes.setdefault(access.memory, []).append(touch)
                    self._makers.setdefault(access.value, []).append(touch)

    def is_before(self, one: Task, other: Task) -> bool:
        """Whether one task is over when the other begins."""
        return bool(self._before[self._numbers[other.name]] >> self._numbers[one.name] & 1)

    def check_read(self, task: Task, access: Access) -> None:
        """Refuse to read a value that is not written yet, or already overwritten."""
        if access.value in self._host or self._is_place(task, access.value):
            return
        mine = _Touch(task, access)
        self._check_within(mine)
        made = [w for w in self._makers.get(access.value, []) if w.meets(mine)]
        self._check_covered(mine, made)
        for write in made:
            if write.task.name != task.name and not self.is_before(write.task, task):
                raise ProgramError(
                    f"{task.name} reads {_shown(access)}, which {write.task.name} writes, and does "
                    "not wait for it; it needs it in `after`"
                )
        # Other values in the same memory, such as the state before or after its update.
        for other in self._writes.get(access.memory, []):
            if self._content(other.access) != self._content(access) and other.meets(mine):
                self._check_version(mine, made, other)

    def _content(self, access: Access) -> str:
        """Return the value whose elements lie in memory: an update may have its operand's."""
        node = self._plan.program[access.value]
        if node.op == "update":
            made = [w.access for w in self._makers.get(node.inputs[1], [])]
            if made and all(one.state == access.state for one in made):
                return node.inputs[1]
        return access.value

    def _is_place(self, task: Task, value: str) -> bool:
        """Whether a task names a value only as the state that its updates overwrite."""
        nodes = [self._plan.program[name] for name in task.nodes]
        readers = [node for node in nodes if value in node.inputs]
        return all(node.op == "update" and node.inputs[1] != value for node in readers)

    def _check_within(self, mine: _Touch) -> None:
        """Refuse a task that overwrites elements which it still reads."""
        value, memory = mine.access.value, mine.access.memory
        taken = [w for w in mine.task.writes if w.memory == memory and w.value != value]
        nodes = [self._plan.program[name] for name in mine.task.nodes]
        for node in nodes if taken else []:
            if value in node.inputs and not (goes_along(node) or node.op in _IN_PART):
                raise ProgramError(
                    f"{mine.task.name} writes {taken[0].value} over {value}, of which "
                    f"{node.op} ({node.name}) still reads other elements; give it its own memory"
                )

    def _check_version(self, mine: _Touch, made: list[_Touch], other: _Touch) -> None:
        """Refuse to read memory that another value has overwritten, or may be overwriting."""
        task = mine.task
        if other.task.name == task.name or self.is_before(task, other.task):
            return
        if self._is_older(other, made):
            return
        what, place = _shown(mine.access), mine.access.memory
        if self.is_before(other.task, task):
            raise ProgramError(
                f"{task.name} reads {what} after {other.task.name} has written "
                f"{other.access.value} over it in the memory of {place}; let it come before, or "
                "read the new value"
            )
        raise ProgramError(
            f"{task.name} reads {what} while {other.task.name} may be writing "
            f"{other.access.value} over it; the second must wait for the first"
        )

    def _is_older(self, other: _Touch, made: list[_Touch]) -> bool:
        """Whether another task's write came before a value overwrote it."""
        over = [w for w in made if w.meets(other)]
        return bool(over) and all(
            w.task.name == other.task.name or self.is_before(other.task, w.task) for w in over
        )

    def _check_covered(self, mine: _Touch, made: list[_Touch]) -> None:
        access = mine.access
        if access.value in self._there or any(w.access.chunk is None for w in made):
            return
        regions = {w.task.region for w in made if w.task.region is not None}
        for name in regions:
            chunks = {w.access.chunk for w in made if w.task.region == name}
            same = mine.task.region == name and access.chunk is not None
            count = self._plan.program.region(name).num_chunks
            wanted = {access.chunk} if same else set(range(count))
            if wanted <= chunks:
                return
        raise ProgramError(
            f"{mine.task.name} reads {_shown(access)}, which no task writes, or not all of it"
        )

    def check_write(self, task: Task, access: Access) -> None:
        """Refuse two tasks that may write the same memory at the same time."""
        if access.value in self._host:
            return
        mine = _Touch(task, access)
        for other in self._writes[access.memory]:
            if other.task.name == task.name or not other.meets(mine):
                continue
            if not self.is_before(other.task, task) and not self.is_before(task, other.task):
                raise ProgramError(
                    f"{task.name} and {other.task.name} both write {_shown(access)}, and neither "
                    "waits for the other"
                )

    def check_results(self) -> None:
        """Refuse a plan that does not write all outputs and states of the program."""
        program = self._plan.program
        for name in (*program.outputs, *program.states.values()):
            node = program[name]
            made = node.inputs[0] if node.op == "pick" else name
            if made not in self._there and made not in self._makers:
                raise ProgramError(f"no task writes {name}, a result of program {program.name}")
            if made not in self._host:
                self._check_left(made)

    def _check_left(self, name: str) -> None:
        """Refuse a result whose memory is overwritten by another value in the end."""
        made = self._makers.get(name, [])
        access = made[0].access if made else Access(value=name)
        for other in self._writes.get(access.memory, []):
            if self._content(other.access) == self._content(access):
                continue
            if not self._is_older(other, made):
                raise ProgramError(
                    f"the program returns {name}, over which {other.task.name} has written "
                    f"{other.access.value} by then; return the new value, or something made of "
                    "the old one"
                )

    def check_ahead(self, task: Task) -> None:
        """Refuse a task that is more iterations ahead than the values it reads."""
        for access in task.reads:
            makers = {w.task.name: w.task for w in self._makers.get(access.value, [])}
            for maker in makers.values():
                if maker.ahead < task.ahead:
                    raise ProgramError(
                        f"{task.name} is {task.ahead} iterations ahead and reads {access.value}, "
                        f"which {maker.name} makes {maker.ahead} ahead; rotate that too, or neither"
                    )
            if task.ahead > 1 and access.value in self._plan.program.states and not makers:
                raise ProgramError(
                    f"{task.name} is {task.ahead} iterations ahead and reads {access.value}, which "
                    "every iteration changes; 1 is the most"
                )


def _before(plan: Plan) -> list[int]:
    """Return for each task the tasks that are over when it begins, as bits of an integer."""
    numbers = {task.name: number for number, task in enumerate(plan.tasks)}
    # Bits of integers: a plan of a thousand tasks would have a million names in sets.
    out: list[int] = []
    for task in plan.tasks:
        bits = 0
        for name in task.after:
            bits |= out[numbers[name]] | 1 << numbers[name]
        out.append(bits)
    return out


def goes_along(node: Node) -> bool:
    """Whether an operation has read an element before it writes the same element of its result."""
    return is_pointwise(node.op) or node.op in ("update", "slice", "store", "recv", "all_reduce")


def _shown(access: Access) -> str:
    return access.value if access.chunk is None else f"chunk {access.chunk} of {access.value}"


# -- orders ------------------------------------------------------------------------------------


def check_orders(plan: Plan, orders: Mapping[str, Sequence[str]]) -> None:
    """Refuse orders of lanes in which ranks would wait for each other forever.

    A lane begins its tasks in its order, each as soon as the tasks that it waits for are over. So
    the waits and the orders of all lanes together must have no circle.
    """
    needs: dict[str, list[str]] = {task.name: list(task.after) for task in plan.tasks}
    for lane, order in orders.items():
        there = [task.name for task in plan.on(lane)]
        if sorted(order) != sorted(there):
            odd = sorted(set(there) ^ set(order)) or ["a task that is there twice"]
            raise ProgramError(
                f"lane {lane} has {len(there)} tasks and an order of {len(order)}: {odd[0]}; every "
                "task has one place"
            )
        for one, other in pairwise(order):
            needs[other].append(one)
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]  # each waits for the one before it
        raise ProgramError(
            f"{circle[1]} waits for {circle[0]} and, by the order of their lanes, the other way "
            f"round ({' -> '.join(circle)}); all ranks would wait for ever"
        ) from None
