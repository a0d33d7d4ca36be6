"""Communication and computation as one task: reduce-scatter, update, gather.

Over sockets that is a chain: whoever completes one part begins the next, and nobody else is asked.
Between ranks that share memory it is one pass over it (`shm_fused`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from penstock.program.nodes import Program
from penstock.program.ops import is_move
from penstock.program.plan import Access, Task
from penstock.step.comm import Handle
from penstock.step.computing import Scalars, prepared
from penstock.step.groups import Groups
from penstock.step.lanes import Begun
from penstock.step.memory import Memory
from penstock.step.moving import Move, move_of
from penstock.step.shm import ShmComm
from penstock.step.shm_pass import shared_pass

__all__ = ["Chain", "fused_of"]


def fused_of(
    task: Task,
    memory: Memory,
    groups: Groups,
    *,
    host: tuple[str, ...],
    scalars: Scalars,
    backend: str,
) -> Callable[[], Begun]:
    """Return how a fused task is begun."""
    program = memory.program
    comms = [groups.comm(program[n].axes, task.lane) for n in task.nodes if is_move(program[n].op)]
    if isinstance(comms[0], ShmComm):
        shared = shared_pass(task, memory, comms[0], scalars=scalars, backend=backend)
        if shared is not None:
            return shared
    stages: list[list[Move] | Callable[[], None]] = []
    for is_moving, nodes in _runs(program, task.nodes):
        if is_moving:
            stages.append([_move(task, n, memory, groups) for n in nodes])
            continue
        some = _part(task, program, nodes)
        call = prepared(some, memory, host=host, backend=backend)
        stages.append(partial(call, scalars))
    return lambda: Begun(handle=Chain(stages).begun(), finish=lambda: None)


def _move(task: Task, name: str, memory: Memory, groups: Groups) -> Move:
    node = memory.program[name]
    lane = task.lane + (":gather" if node.op == "all_gather" else "")
    return move_of(node, task, memory, groups.comm(node.axes, lane))


def _runs(program: Program, nodes: tuple[str, ...]) -> list[tuple[bool, tuple[str, ...]]]:
    """Return the nodes of a task in runs that communicate and runs that compute."""
    out: list[tuple[bool, tuple[str, ...]]] = []
    waiting = list(nodes)
    made: set[str] = set()
    while waiting:
        for is_moving in (False, True):
            run: list[str] = []
            for name in waiting:
                node = program[name]
                inside = {n for n in node.inputs if n in nodes}
                there = made if is_moving else made | set(run)
                if is_move(node.op) == is_moving and inside <= there:
                    run.append(name)
            if run:
                out.append((is_moving, tuple(run)))
                made.update(run)
                waiting = [name for name in waiting if name not in made]
    return out


def _part(task: Task, program: Program, nodes: tuple[str, ...]) -> Task:
    """Return the computing part of a task as a task: what leaves it is what others read."""
    inside = set(nodes)
    leaving = [
        name
        for name in nodes
        if name in program.outputs
        or program[name].op == "update"
        or any(user not in inside for user in program.users[name])
    ]
    return replace(task, nodes=nodes, writes=tuple(Access(value=name) for name in leaving))


class Chain:
    """Communication and computation one after the other, as one handle."""

    def __init__(self, stages: list[list[Move] | Callable[[], None]]) -> None:
        self._stages = stages
        self._at = 0
        self._left = 0
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._works: list[Callable[[], None]] = []
        self._error: BaseException | None = None
        self._flying: list[Handle] = []

    def begun(self) -> Chain:
        """Begin with the first stage."""
        self._go_on()
        return self

    def _go_on(self) -> None:
        try:
            while self._at < len(self._stages):
                stage = self._stages[self._at]
                self._at += 1
                if callable(stage):
                    stage()
                    continue
                self._left = len(stage)
                self._flying = [move.issue() for move in stage]
                for move, handle in zip(stage, self._flying, strict=True):
                    handle.then(partial(self._arrived, move))
                return
        except BaseException as error:
            self._error = error
        self._end()

    def _arrived(self, move: Move) -> None:
        try:
            move.finish()
        except BaseException as error:
            self._error = error
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            if self._error is None:
                self._go_on()
            else:
                self._end()

    def _end(self) -> None:
        with self._lock:
            self._done.set()
            works, self._works = self._works, []
        if self._error is None:
            for work in works:
                work()

    def wait(self) -> None:
        """Return when the last stage is over, or raise what went wrong."""
        for handle in self._flying:
            handle.wait()
        self._done.wait()
        if self._error is not None:
            raise self._error

    def is_done(self) -> bool:
        """Whether it is over, well or not."""
        return self._done.is_set() or any(self._has_failed(handle) for handle in self._flying)

    def then(self, work: Callable[[], None]) -> None:
        """Have something called when the last stage is over; not if one failed."""
        with self._lock:
            if not self._done.is_set():
                self._works.append(work)
                return
        if self._error is None:
            work()

    def _has_failed(self, handle: Handle) -> bool:
        if not handle.is_done():
            return False
        try:
            handle.wait()
        except BaseException as error:
            self._error = error
            return True
        return False
