"""Communication and computation as one task: reduce-scatter, update, gather.

Over sockets that is a chain: the thread that completes one stage begins the next, and the thread of
the step is not involved. Between ranks that share memory, of a host or of GPUs, it is one pass over
that memory (`shm_pass`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from penstock.step.comms.comm import Handle, HostHandle
from penstock.step.comms.shm import ShmComm
from penstock.step.computing import Scalars, prepared
from penstock.step.groups import Groups
from penstock.step.lanes import Begun
from penstock.step.memory import RankMemory
from penstock.step.moving import Move, move_of
from penstock.step.program.nodes import Node, Program
from penstock.step.program.ops import is_move
from penstock.step.program.plan import Access, Task
from penstock.step.shm_pass import shared_pass
from penstock.step.streams import current_stream, mark_of

__all__ = ["Chain", "fused_lanes", "fused_of"]


def fused_of(
    task: Task,
    memory: RankMemory,
    groups: Groups,
    *,
    host: tuple[str, ...],
    scalars: Scalars,
    backend: str,
) -> Callable[[], Begun]:
    """Return how a fused task is begun."""
    program = memory.program
    axes = next(program[n].axes for n in task.nodes if is_move(program[n].op))
    comm, shared = groups.comm(axes, task.lane), None
    if isinstance(comm, ShmComm):
        shared = shared_pass(task, memory, comm, scalars=scalars, backend=backend)
    stages: list[list[Move] | Callable[[], None]] = []
    for number, (is_moving, nodes) in enumerate(_runs(program, task.nodes)):
        if is_moving:
            # Each stage has a Comm of its own. A stage begins when the one before is over, at
            # another time on each rank, so its order beside other operations of the lane would
            # differ between ranks.
            lane = _stage_lane(task, program, number)
            moves = [(program[n], groups.comm(program[n].axes, lane)) for n in nodes]
            stages.append([move_of(node, task, memory, one) for node, one in moves])
            continue
        some = _part(task, program, nodes)
        call = prepared(some, memory, host=host, backend=backend)
        stages.append(partial(call, scalars))
    device = memory.device

    def begin() -> Begun:
        begun = None if shared is None else shared()
        return begun or Begun(handle=Chain(stages, device).begun(), finish=lambda: None)

    return begin


def fused_lanes(task: Task, program: Program) -> list[tuple[tuple[str, ...], str]]:
    """Return the axes and lanes of a fused task's stages."""
    return [
        (program[name].axes, _stage_lane(task, program, number))
        for number, (is_moving, nodes) in enumerate(_runs(program, task.nodes))
        for name in nodes
        if is_moving
    ]


def _stage_lane(task: Task, program: Program, number: int) -> str:
    return f"{task.lane}:{_region(program, task)}:{number}"


def _region(program: Program, task: Task) -> str:
    return next(r.name for r in program.regions if r.kind == "fuse" and task.nodes[0] in r.nodes)


def _runs(program: Program, nodes: tuple[str, ...]) -> list[tuple[bool, tuple[str, ...]]]:
    """Return the nodes of a task in runs that communicate and runs that compute."""
    work = [program[name] for name in nodes]
    runs = _NodeRuns()
    for node in sorted(work, key=lambda node: not _is_ready(node, {*nodes})):
        runs.add(node)
    return runs.ended()


def _is_ready(node: Node, inside: set[str]) -> bool:
    """Whether a reduce-scatter needs nothing of its task: all of these go first, together."""
    return node.op == "reduce_scatter" and not inside & {*node.inputs}


class _NodeRuns:
    """Nodes of a task, put in runs one after the other.

    Moves go together if none needs another. What they do not need is computed after them, together
    with what needs them: that is one pass over memory instead of two. Otherwise computation keeps
    its order, since a node may read the old value of a state that another one writes.
    """

    def __init__(self) -> None:
        self._out: list[tuple[bool, tuple[str, ...]]] = []
        self._before: list[str] = []
        """Computation that does not need the moves."""
        self._num_needed = 0
        """How many of these the moves need; the rest is computed after them."""
        self._moves: list[str] = []
        self._updates: list[Node] = []
        """Updates of states with what is moved, which mostly lies there already."""
        self._after: list[str] = []

    def add(self, node: Node) -> None:
        """Take one more node."""
        if is_move(node.op):
            self._add_move(node)
        elif node.op == "update" and node.inputs[1] in self._moves:
            self._updates.append(node)
        elif self._after or self._needs_moves(node):
            self._after.append(node.name)
        else:
            self._before.append(node.name)

    def ended(self) -> list[tuple[bool, tuple[str, ...]]]:
        """Return all runs."""
        self._emit()
        self._num_needed = len(self._before)
        self._emit()
        return self._out

    def _add_move(self, node: Node) -> None:
        # Only a reduce-scatter writes no memory that another node may be reading.
        is_apart = node.op == "reduce_scatter"
        if self._needs_moves(node) or (self._after and not is_apart):
            self._emit()
        self._moves.append(node.name)
        needed = [at + 1 for at, name in enumerate(self._before) if name in node.inputs]
        count = max(needed, default=0) if is_apart else len(self._before)
        self._num_needed = max(self._num_needed, count)

    def _needs_moves(self, node: Node) -> bool:
        updates = {one.name for one in self._updates}
        if node.op == "update" and node.attr("target") in {u.attr("target") for u in self._updates}:
            return True
        return any(n in self._moves or n in updates or n in self._after for n in node.inputs)

    def _emit(self) -> None:
        needed = self._before[: self._num_needed]
        self._out += [(False, tuple(needed))] if needed else []
        self._out += [(True, tuple(self._moves))] if self._moves else []
        updates = [node.name for node in self._updates]
        self._before = [*self._before[self._num_needed :], *updates, *self._after]
        self._num_needed, self._moves, self._updates, self._after = 0, [], [], []


def _part(task: Task, program: Program, nodes: tuple[str, ...]) -> Task:
    """Return the computing part of a task as a task; its results are what others read."""
    inside = set(nodes)
    leaving = [
        name
        for name in nodes
        if name in program.outputs
        or program[name].op == "update"
        or any(user not in inside for user in program.users[name])
    ]
    return replace(task, nodes=nodes, writes=tuple(Access(value=name) for name in leaving))


class Chain(HostHandle):
    """Communication and computation one after the other, as one handle."""

    def __init__(
        self, stages: list[list[Move] | Callable[[], None]], device: torch.device | None = None
    ) -> None:
        super().__init__()
        self._stages = stages
        self._device = torch.device("cpu") if device is None else device
        self._mark: torch.cuda.Event | None = None
        """On a device, where it ends."""
        self._at = 0
        self._left = 0
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
            self.error = error
        self._finish()

    def _arrived(self, move: Move) -> None:
        try:
            move.finish()
        except BaseException as error:
            self.error = error
        # Moves of one stage may arrive on threads of several lanes; exactly one of them goes on.
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if not is_last:
            return
        if self.error is None:
            for handle in self._flying:
                # All are done; on a device, what follows is on the stream of one of them.
                handle.wait()
            self._go_on()
        else:
            self._finish()

    def _finish(self) -> None:
        self._mark = mark_of(self._device)
        self.end(self.error)

    def wait(self) -> None:
        """Return when the last stage is over, or raise what went wrong."""
        # A move that fails calls nobody, so the chain would never end: ask the moves first.
        for handle in self._flying:
            handle.wait()
        super().wait()
        self._follow()

    def is_done(self) -> bool:
        """Whether it is over, well or not."""
        return super().is_done() or any(self._has_failed(handle) for handle in self._flying)

    def then(self, work: Callable[[], None]) -> None:
        """Call something when the last stage is over; not if one failed."""

        def follow() -> None:
            self._follow()
            work()

        super().then(follow)

    def _follow(self) -> None:
        """Make the current stream wait for the chain's end; the host has nothing to wait for."""
        if self._mark is not None:
            current_stream(self._device).wait_event(self._mark)

    def _has_failed(self, handle: Handle) -> bool:
        if not handle.is_done():
            return False
        try:
            handle.wait()
        except BaseException as error:
            self.error = error
            return True
        return False
