"""Gathers of the next iteration, begun in this one.

A state that is kept in slices and gathered where an iteration first reads it (`rotate`) can be on
its way as soon as it has its new value. Such a gather writes to memory of its own, beside the one
that this iteration still reads; when the next iteration comes to it, the two are exchanged. On its
lane it stands behind everything of this iteration, in the order of the plan, so all ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.errors import ProgramError
from penstock.step.comms.comm import Comm, Done
from penstock.step.lanes import Begun
from penstock.step.memory import RankMemory
from penstock.step.moving import move_of
from penstock.step.program.nodes import Program
from penstock.step.program.plan import Plan, Task

__all__ = ["NextGather", "next_gathers", "with_next_gathers"]

_NEXT = " of the next iteration"


def next_gathers(plan: Plan) -> tuple[Task, ...]:
    """Return the gathers of states that are begun an iteration ahead."""
    return tuple(
        task
        for task in plan.tasks
        if task.ahead == 1 and task.kind == "move" and _state_of(plan.program, task) is not None
    )


def _state_of(program: Program, task: Task) -> str | None:
    source = program[task.nodes[0]].inputs[0]
    return source if source in program.states else None


def with_next_gathers(plan: Plan) -> Plan:
    """Return a plan that also begins the gathers of the next iteration."""
    tasks = list(plan.tasks)
    for task in next_gathers(plan):
        state = _state_of(plan.program, task)
        writers = [t.name for t in plan.tasks if any(a.state == state for a in t.writes)]
        tasks.append(replace(task, name=task.name + _NEXT, after=tuple(writers), ahead=0))
    return replace(plan, tasks=tuple(tasks))


class NextGather:
    """One such gather: begun in one iteration, awaited in the next."""

    def __init__(self, task: Task, memory: RankMemory, comm: Comm) -> None:
        node = memory.program[task.nodes[0]]
        self.name, self.next_name = task.name, task.name + _NEXT
        self._value, self._state = node.name, node.inputs[0]
        self._memory, self._beside = memory, memory.beside(node.name)
        self._now = move_of(node, task, memory, comm)
        self._next = move_of(node, task, self._beside, comm)
        self._begun: Begun | None = None
        self._from = 0
        """Where the state lay when the gather was begun."""

    def begin_now(self) -> Begun:
        """Return what was begun an iteration ago, or begin now."""
        begun, self._begun = self._begun, None
        if begun is None:
            return self._now.begin()
        if self._memory.whole(self._state).data_ptr() != self._from:
            raise ProgramError(
                f"{self._state} is another tensor than when its gather was begun; give the same "
                "tensor to every step, or call forget() on all ranks first"
            )
        return Begun(handle=begun.handle, finish=self._swapped(begun.finish))

    def begin_next(self) -> Begun:
        """Begin the gather of the next iteration; nothing in this one waits for it."""
        self._from = self._memory.whole(self._state).data_ptr()
        self._begun = self._next.begin()
        return Begun(handle=Done(), finish=lambda: None)

    def _swapped(self, finish: Callable[[], None]) -> Callable[[], None]:
        def work() -> None:
            finish()
            mine, other = self._memory.whole(self._value), self._beside.whole(self._value)
            self._memory.give(self._value, other)
            self._beside.give(self._value, mine)

        return work

    def forget(self) -> None:
        """Wait for what was begun, and do not use it."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.handle.wait()
