"""Whether a plan can be carried out: no races, no waiting in circles, nothing read too early.

A task *happens before* another if that one waits for it, or for something that waits for it. The
order of a lane counts for nothing here: it says who begins first, not who is over first. Two tasks
that touch the same memory, one of them writing, must be ordered; and the order must be the right
one, since a state lies in the same memory before and after its update. Chunks of one region are
apart; a chunk of one region and one of another are taken to meet.

Ranks wait for each other in communication. They cannot do so forever if all have the same tasks in
the same order on every lane, and if no lane has a task before another one that it waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from penstock.errors import ProgramError
from penstock.step.program.bytes import held_bytes
from penstock.step.program.lower import host_nodes
from penstock.step.program.nodes import Node
from penstock.step.program.ops import is_pointwise
from penstock.step.program.plan import COMPUTE, IO, Access, Plan, Task

__all__ = [
    "Checked",
    "check_orders",
    "check_plan",
    "check_ranks",
    "goes_along",
    "peak_bytes",
]


_IN_PART = ("reduce_scatter", "all_gather")
"""Moves whose slices may lie in the rank's part of the whole: nobody else reads or writes there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What was found out about a plan in which nothing is wrong."""

    num_tasks: int
    num_accesses: int
    peak_bytes: int
    """The most memory that values take at once on one rank, if tasks keep the plan's order."""


def check_plan(plan: Plan) -> Checked:
    """Refuse a plan that could go wrong, with the two tasks that could."""
    book = _Book(plan)
    for task in plan.tasks:
        for access in task.reads:
            book.check_read(task, access)
        for access in task.writes:
            book.check_write(task, access)
        _check_ahead(plan, task, book)
    book.check_results()
    check_orders(plan, {lane: [t.name for t in plan.on(lane)] for lane in _net_lanes(plan)})
    return Checked(
        num_tasks=len(plan.tasks),
        num_accesses=sum(len(t.reads) + len(t.writes) for t in plan.tasks),
        peak_bytes=peak_bytes(plan),
    )


# -- races -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Touch:
    """A task and what it reads or writes."""

    task: Task
    access: Access

    @property
    def memory(self) -> str:
        return self.access.state or self.access.value

    def meets(self, other: _Touch) -> bool:
        """Whether both have memory in common."""
        mine, theirs = self.access.chunk, other.access.chunk
        if mine is None or theirs is None or self.task.region != other.task.region:
            return True
        return mine == theirs


class _Book:
    """Who touches what, and who happens before whom."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._numbers = {task.name: number for number, task in enumerate(plan.tasks)}
        self._before = _before(plan)
        self._there = {n.name for n in plan.program.nodes if n.op in ("input", "scalar", "const")}
        # Numbers made of numbers are known before anything begins.
        self._host = {*host_nodes(plan.program)}
        self._there |= self._host
        self._writes: dict[str, list[_Touch]] = {}
        for task in plan.tasks:
            for access in task.writes:
                if access.value not in self._host:
                    touch = _Touch(task, access)
                    self._writes.setdefault(touch.memory, []).append(touch)

    def is_before(self, one: Task, other: Task) -> bool:
        """Whether a task is over when another one begins."""
        return bool(self._before[self._numbers[other.name]] >> self._numbers[one.name] & 1)

    @cached_property
    def makers(self) -> dict[str, list[_Touch]]:
        """By value: who writes it."""
        out: dict[str, list[_Touch]] = {}
        for touches in self._writes.values():
            for touch in touches:
                out.setdefault(touch.access.value, []).append(touch)
        return out

    def check_read(self, task: Task, access: Access) -> None:
        """Refuse a value that is not there yet, or not any more."""
        if access.value in self._host or self._is_place(task, access.value):
            return
        mine = _Touch(task, access)
        self._check_within(mine)
        made = [w for w in self.makers.get(access.value, []) if w.meets(mine)]
        self._check_covered(mine, made)
        for write in made:
            if write.task.name != task.name and not self.is_before(write.task, task):
                raise ProgramError(
                    f"{task.name} reads {_shown(access)}, which {write.task.name} writes, and does "
                    "not wait for it; it needs it in `after`"
                )
        for other in self._writes.get(mine.memory, []):
            if self._content(other.access) != self._content(access) and other.meets(mine):
                self._check_version(mine, made, other)

    def _content(self, access: Access) -> str:
        """Return what a value is a name of: an update, of what lies in the state's memory."""
        node = self._plan.program[access.value]
        if node.op == "update":
            made = [w.access for w in self.makers.get(node.inputs[1], [])]
            if made and all(one.state == access.state for one in made):
                return node.inputs[1]
        return access.value

    def _is_place(self, task: Task, value: str) -> bool:
        """Whether a value is only said to be the one that an update takes the place of."""
        nodes = [self._plan.program[name] for name in task.nodes]
        readers = [node for node in nodes if value in node.inputs]
        return all(node.op == "update" and node.inputs[1] != value for node in readers)

    def _check_within(self, mine: _Touch) -> None:
        """Refuse a task that writes over what it is still reading."""
        value = mine.access.value
        writes = [_Touch(mine.task, access) for access in mine.task.writes]
        taken = [w for w in writes if w.memory == mine.memory and w.access.value != value]
        nodes = [self._plan.program[name] for name in mine.task.nodes]
        for node in nodes if taken else []:
            if value in node.inputs and not (goes_along(node) or node.op in _IN_PART):
                raise ProgramError(
                    f"{mine.task.name} writes {taken[0].access.value} over {value}, of which "
                    f"{node.op} ({node.name}) still reads other elements; give it its own memory"
                )

    def _check_version(self, mine: _Touch, made: list[_Touch], other: _Touch) -> None:
        """Refuse a read of memory that another value has taken, or may be taking."""
        task = mine.task
        if other.task.name == task.name or self.is_before(task, other.task):
            return
        if self._is_older(other, made):
            return
        what, place = _shown(mine.access), mine.memory
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
        """Whether what another task wrote was there before a value took its place."""
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
        """Refuse two tasks that may write the same at the same time."""
        if access.value in self._host:
            return
        mine = _Touch(task, access)
        for other in self._writes[mine.memory]:
            if other.task.name == task.name or not other.meets(mine):
                continue
            if not self.is_before(other.task, task) and not self.is_before(task, other.task):
                raise ProgramError(
                    f"{task.name} and {other.task.name} both write {_shown(access)}, and neither "
                    "waits for the other"
                )

    def check_results(self) -> None:
        """Refuse a plan that leaves out something that the program returns or keeps."""
        program = self._plan.program
        for name in (*program.outputs, *program.states.values()):
            node = program[name]
            made = node.inputs[0] if node.op == "pick" else name
            if made not in self._there and made not in self.makers:
                raise ProgramError(f"no task writes {name}, which program {program.name} leaves")
            if made not in self._host:
                self._check_left(made)

    def _check_left(self, name: str) -> None:
        """Refuse a result in whose memory another value lies in the end."""
        made = self.makers.get(name, [])
        access = made[0].access if made else Access(value=name)
        for other in self._writes.get(access.state or name, []):
            if self._content(other.access) == self._content(access):
                continue
            if not self._is_older(other, made):
                raise ProgramError(
                    f"the program returns {name}, over which {other.task.name} has written "
                    f"{other.access.value} by then; return the new value, or something made of "
                    "the old one"
                )


def _before(plan: Plan) -> list[int]:
    """Return for each task the set of those that are over when it begins, as bits."""
    numbers = {task.name: number for number, task in enumerate(plan.tasks)}
    out: list[int] = []
    for task in plan.tasks:
        bits = 0
        for name in task.after:
            bits |= out[numbers[name]] | 1 << numbers[name]
        out.append(bits)
    return out


def goes_along(node: Node) -> bool:
    """Whether an operation is done with an element of its operand when it writes the result's."""
    return is_pointwise(node.op) or node.op in ("update", "slice", "store", "recv", "all_reduce")


def _shown(access: Access) -> str:
    return access.value if access.chunk is None else f"chunk {access.chunk} of {access.value}"


def _check_ahead(plan: Plan, task: Task, book: _Book) -> None:
    """Refuse to do something early that needs what is not there so early."""
    for access in task.reads:
        makers = {w.task.name: w.task for w in book.makers.get(access.value, [])}
        for maker in makers.values():
            if maker.ahead < task.ahead:
                raise ProgramError(
                    f"{task.name} is {task.ahead} iterations ahead and reads {access.value}, which "
                    f"{maker.name} makes {maker.ahead} ahead; rotate that too, or neither"
                )
        if task.ahead > 1 and access.value in plan.program.states and not makers:
            raise ProgramError(
                f"{task.name} is {task.ahead} iterations ahead and reads {access.value}, which "
                "every iteration changes; 1 is the most"
            )


# -- orders ------------------------------------------------------------------------------------


def _net_lanes(plan: Plan) -> list[str]:
    return [lane for lane in plan.lanes if lane not in (COMPUTE, IO)]


def check_orders(plan: Plan, orders: Mapping[str, Sequence[str]]) -> None:
    """Refuse orders of lanes in which ranks would wait for each other forever.

    A lane begins its tasks in its order, each as soon as what it waits for is over. So a task must
    not stand before one that it waits for, and lanes must not do so to each other.
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
    left = dict(needs)
    done: set[str] = set()
    while ready := [name for name, before in left.items() if all(b in done for b in before)]:
        done.update(ready)
        for name in ready:
            del left[name]
    if left:
        raise ProgramError(_circle(left))


def _circle(left: Mapping[str, Sequence[str]]) -> str:
    at = next(iter(left))
    seen: list[str] = []
    while at not in seen:
        seen.append(at)
        at = next(name for name in left[at] if name in left)
    circle = seen[seen.index(at) :]
    return (
        f"{circle[0]} waits for {circle[-1 if len(circle) == 2 else 1]} and, by the order of their "
        f"lanes, the other way round ({' <- '.join([*circle, circle[0]])}); all ranks would stand"
    )


def check_ranks(plans: Sequence[Plan]) -> None:
    """Refuse plans of different ranks that are not the same."""
    first = plans[0]
    for rank, plan in enumerate(plans):
        if plan.digest == first.digest:
            continue
        for lane in dict.fromkeys((*first.lanes, *plan.lanes)):
            ours, theirs = first.on(lane), plan.on(lane)
            for one, other in zip(ours, theirs, strict=False):
                if one != other:
                    raise ProgramError(
                        f"on lane {lane} rank 0 does {one.name} where rank {rank} does "
                        f"{other.name}; build the plan from the same numbers on all ranks"
                    )
            if len(ours) != len(theirs):
                raise ProgramError(
                    f"lane {lane} has {len(ours)} tasks on rank 0 and {len(theirs)} on rank {rank}"
                )
        raise ProgramError(f"ranks 0 and {rank} have plans of different programs")


# -- memory ------------------------------------------------------------------------------------


def peak_bytes(plan: Plan) -> int:
    """Return the most that values take at once on one rank, beside what it was given.

    A value is there from the first task that writes it to the last that touches it, in the plan's
    order; what is returned stays. What is done ahead has so many places more.
    """
    program = plan.program
    lives: dict[str, tuple[int, int, int]] = {}
    for number, task in enumerate(plan.tasks):
        for access in (*task.reads, *task.writes):
            name = access.state or access.value
            if program[name].op in ("input", "scalar", "const"):
                continue
            first, last, ahead = lives.get(name, (number, number, max(0, task.ahead)))
            stays = access.value in program.outputs
            lives[name] = first, max(last, len(plan.tasks) if stays else number), ahead
    changes = [0] * (len(plan.tasks) + 2)
    for name, (first, last, ahead) in lives.items():
        size_bytes = held_bytes(name, program) * (1 + ahead)
        changes[first] += size_bytes
        changes[last + 1] -= size_bytes
    now = peak = 0
    for change in changes:
        now += change
        peak = max(peak, now)
    return peak
