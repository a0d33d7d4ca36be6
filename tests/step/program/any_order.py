"""A plan carried out on NumPy in whatever order it allows: values that depend on luck show here.

Tasks have two moments: they begin, when what they wait for is over, and read; they end, and write.
Between the two anything else may happen. Values lie in memory as the plan says, so an update
changes what others read; memory that nobody has written yet is NaN.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from penstock.step.program.chunks import chunk_places
from penstock.step.program.interpret import Outcome, _given, _InterpretedRanks, _number
from penstock.step.program.lower import host_nodes
from penstock.step.program.moves import Held
from penstock.step.program.nodes import Region
from penstock.step.program.plan import COMPUTE, IO, Plan, Task

Parts = dict[str, Held]


def run_in_any_order(
    plan: Plan,
    given: Mapping[str, Any],
    *,
    seed: int,
    iterations: int = 1,
    sources: Mapping[str, Callable[[int], Any]] | None = None,
) -> Outcome:
    run = _Run(plan, given, random.Random(seed), sources or {})
    for iteration in range(iterations):
        run.iterate(iteration)
    return run.outcome()


class _Run:
    def __init__(
        self, plan: Plan, given: Mapping[str, Any], luck: random.Random, sources: Any
    ) -> None:
        self.plan, self.program, self.given, self.luck = plan, plan.program, given, luck
        self.ranks = _InterpretedRanks(plan.program, {}, sources)
        self.memory: dict[str, Held] = {
            n.name: [one.copy() for one in _given(n, given, self.program)]
            for n in self.program.inputs
            if n.op == "input"
        }
        self.kept = set(self.memory)
        self.numbers: Parts = {}

    def iterate(self, iteration: int) -> None:
        self.memory = {name: held for name, held in self.memory.items() if name in self.kept}
        self._numbers(iteration)
        waiting = list(self.plan.tasks)
        under_way: dict[str, tuple[Task, Parts]] = {}
        over: set[str] = set()
        while waiting or under_way:
            moves: list[tuple[str, Task]] = [("end", task) for task, _ in under_way.values()]
            moves += [("begin", task) for task in waiting if self._may(task, waiting, over)]
            what, task = self.luck.choice(moves)
            if what == "begin":
                waiting.remove(task)
                under_way[task.name] = task, self._made(task, iteration)
            else:
                self._write(*under_way.pop(task.name))
                over.add(task.name)

    def _may(self, task: Task, waiting: list[Task], over: set[str]) -> bool:
        if not set(task.after) <= over:
            return False
        # Communication keeps the order of its lane; others go when they can.
        mine = [t for t in waiting if t.lane == task.lane]
        return task.lane in (COMPUTE, IO) or mine[0] is task

    def _numbers(self, iteration: int) -> None:
        self.numbers = {}
        for node in self.program.inputs:
            if node.op == "scalar":
                number = _number(node, self.given, self.program, iteration)
                self.numbers[node.name] = [np.asarray(number)] * self.program.mesh.num_ranks
        host = set(host_nodes(self.program))
        for node in self.program.nodes:
            if node.op == "const" or node.name in host:
                self.numbers[node.name] = self.ranks._whole(node, self.numbers, iteration)

    def _region(self, task: Task) -> Region:
        if task.region is not None:
            return self.program.region(task.region)
        return Region(name="all", kind="chunk", nodes=task.nodes)

    def _at(self, task: Task, name: str) -> list[Any]:
        made, mesh = self.program[name].type, self.program.mesh
        return [
            chunk_places(
                self._region(task), name, made, mesh=mesh, rank=rank, chunk=task.chunk or 0
            )
            for rank in range(mesh.num_ranks)
        ]

    def _place(self, name: str) -> str:
        return dict(self.plan.shared).get(name, name)

    def _room(self, name: str) -> Held:
        place, mesh = self._place(name), self.program.mesh
        if place not in self.memory:
            made = self.program[place].type
            self.memory[place] = [
                np.full(made.local_shape(mesh, rank), np.nan) for rank in range(mesh.num_ranks)
            ]
        # A slice lies in its part of the whole.
        out = []
        for rank, whole in enumerate(self.memory[place]):
            all_of = self.program[place].type.bounds(mesh, rank)
            mine = self.program[name].type.bounds(mesh, rank)
            pairs = zip(mine, all_of, strict=True)
            out.append(whole[tuple(slice(a - first, b - first) for (a, b), (first, _) in pairs)])
        return out

    def _read(self, task: Task, name: str) -> Held:
        if name in self.numbers:
            return self.numbers[name]
        where = self.ranks._inside(name, self._at(task, name))
        return [one[at].copy() for one, at in zip(self._room(name), where, strict=True)]

    def _made(self, task: Task, iteration: int) -> Parts:
        parts: Parts = {}
        for name in task.nodes:
            node = self.program[name]
            if name in self.numbers:
                continue
            if node.op == "load":
                parts[name] = self.ranks._whole(node, {}, iteration)
                continue
            held = [parts[n] if n in parts else self._read(task, n) for n in node.inputs]
            in_at = [self._at(task, n) for n in node.inputs]
            parts[name] = self.ranks._computed(node, held, self._at(task, name), in_at)
        return parts

    def _write(self, task: Task, parts: Parts) -> None:
        for access in task.writes:
            if access.value not in self.numbers:
                where = self.ranks._inside(access.value, self._at(task, access.value))
                for rank, whole in enumerate(self._room(access.value)):
                    whole[where[rank]] = parts[access.value][rank]

    def outcome(self) -> Outcome:
        outputs = [self._room(name) for name in self.program.outputs]
        return Outcome(outputs=outputs, states={s: self.memory[s] for s in self.program.states})
