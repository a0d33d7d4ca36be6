"""A plan on lanes in virtual time: when every task begins and ends, on one rank like all others.

A task goes through its latency and then through its work, at the speed that shared resources allow.
Wires and processors are shared fairly: a task that wants less than an even share gets that, and the
others divide the rest. So a move that needs a fifth of a core slows the computation beside
it by a fifth on one core and not at all on two; two moves on one wire take twice as long each.

Steps follow each other. A step begins when the one before it is over, with two exceptions. Tasks
that are *ahead* begin so many steps earlier, as soon as their operands are ready, and only their
readers wait for them. Tasks that are *behind* may last into later steps. Where a plan has such
tasks, several steps are simulated and the last one counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from penstock.step.program.cost import MachineCosts, TaskWork, work_of
from penstock.step.program.plan import Plan
from penstock.step.program.timeline import Span, Timeline

__all__ = ["simulate"]

_STEPS_AHEAD = 4
"""Steps simulated beyond those that tasks are ahead: by then all steps are alike."""
_TINY_S = 1e-12

Key = tuple[int, str]
"""A task of a step: the step that its values belong to, and its name."""


def simulate(plan: Plan, costs: MachineCosts, *, num_steps: int | None = None) -> Timeline:
    """Return when every task of a plan begins and ends, over some steps that follow each other."""
    ahead = max((abs(task.ahead) for task in plan.tasks), default=0)
    steps = num_steps or (ahead + _STEPS_AHEAD if ahead else 1)
    # The last step also begins tasks of later steps, which share lanes and wires with its own.
    more = max((task.ahead for task in plan.tasks if task.ahead > 0), default=0)
    run = _SimulationState(plan, costs, steps + more)
    run.go()
    ends = [0.0] * steps
    for span in run.spans:
        if span.task.ahead == 0 and span.step < steps:
            ends[span.step] = max(ends[span.step], span.end_s)
    if not any(ends) and run.spans:
        ends[-1] = max(span.end_s for span in run.spans)
    spans = sorted(run.spans, key=lambda span: (span.start_s, span.step))
    return Timeline(plan=plan, spans=tuple(spans), ends_s=tuple(ends))


# -- the clockwork -----------------------------------------------------------------------------


@dataclass(slots=True)
class _Running:
    key: Key
    work: TaskWork
    start_s: float
    latency_s: float
    left_s: float
    speed: float = 1.0

    @property
    def is_waiting(self) -> bool:
        return self.latency_s > _TINY_S

    @property
    def rest_s(self) -> float:
        """Seconds until its latency or its work ends, at its present speed."""
        if self.is_waiting:
            return self.latency_s
        return self.left_s / self.speed if self.left_s > _TINY_S else 0.0


class _SimulationState:
    """The state of all lanes between two events."""

    def __init__(self, plan: Plan, costs: MachineCosts, num_steps: int) -> None:
        self._plan, self._cores = plan, costs.cores
        self._works = _works(plan, costs)
        self._now = 0.0
        self._running: dict[str, _Running] = {}
        writers = _state_writers(plan)
        self._missing, self._users = _waits(plan, num_steps, writers)
        self._queues = _queues(plan, num_steps, writers)
        self._ready: dict[str, list[tuple[int, int]]] = {lane: [] for lane in self._queues}
        self._places = {
            key: place for queue in self._queues.values() for place, key in enumerate(queue)
        }
        self._next_place = dict.fromkeys(self._queues, 0)
        self.spans: list[Span] = []

    def go(self) -> None:
        """Run until all tasks are over."""
        for key, needs in self._missing.items():
            if not needs:
                self._is_ready(key)
        while True:
            self._begin()
            if not self._running:
                break
            self._advance()
        # Lanes keep the order of the plan, in which nothing waits for what comes later.
        assert len(self.spans) == len(self._places), f"{len(self.spans)=} {len(self._places)=}"

    def _is_ready(self, key: Key) -> None:
        task = self._plan.by_name[key[1]]
        # Ranks must agree on the order of moves, so priorities do not count on their lanes.
        priority = 0 if task.lane.startswith("net:") else task.priority
        heappush(self._ready[task.lane], (priority, self._places[key]))

    def _begin(self) -> None:
        for lane, ready in self._ready.items():
            if lane in self._running or not ready:
                continue
            place = ready[0][1]
            # Communication keeps its order: a later move does not overtake one that is not ready.
            if lane.startswith("net:") and place != self._next_place[lane]:
                continue
            heappop(ready)
            self._next_place[lane] += 1
            key = self._queues[lane][place]
            work = self._works[key[1]]
            self._running[lane] = _Running(key, work, self._now, work.latency_s, work.seconds)
        self._share()

    def _share(self) -> None:
        """Divide cores and wires between running tasks."""
        active = {lane: run for lane, run in self._running.items() if not run.is_waiting}
        cores = _fair({lane: run.work.cores for lane, run in active.items()}, self._cores)
        wires: dict[str, dict[str, float]] = {}
        for lane, run in active.items():
            if run.work.wire:
                wires.setdefault(run.work.wire, {})[lane] = run.work.wire_share
        shares = {lane: s for wanted in wires.values() for lane, s in _fair(wanted, 1.0).items()}
        for lane, run in active.items():
            run.speed = min(cores[lane], shares.get(lane, 1.0))

    def _advance(self) -> None:
        after_s = min(run.rest_s for run in self._running.values())
        self._now += after_s
        for lane, run in list(self._running.items()):
            if run.is_waiting:
                run.latency_s -= after_s
            else:
                run.left_s -= after_s * run.speed
            if not run.is_waiting and run.left_s <= _TINY_S:
                self._end(lane, run)

    def _end(self, lane: str, run: _Running) -> None:
        del self._running[lane]
        step, name = run.key
        task = self._plan.by_name[name]
        self.spans.append(Span(task=task, step=step, start_s=run.start_s, end_s=self._now))
        for user in self._users.get(run.key, ()):
            self._missing[user].discard(run.key)
            if not self._missing[user]:
                self._is_ready(user)


def _works(plan: Plan, costs: MachineCosts) -> dict[str, TaskWork]:
    """Return the work of every task; equal chunks of one region are computed once."""
    known: dict[object, TaskWork] = {}
    out: dict[str, TaskWork] = {}
    for task in plan.tasks:
        amounts = task.sent_bytes, task.touched_bytes
        key = task.name if task.chunk is None else (task.kind, task.nodes, amounts)
        if key not in known:
            known[key] = work_of(task, plan, costs)
        out[task.name] = known[key]
    return out


def _fair(wanted: Mapping[str, float], capacity: float) -> dict[str, float]:
    """Return the granted part of each demand; demands below an even share are granted in full.

    >>> _fair({"move": 0.2, "compute": 1.0}, 1.0)
    {'move': 1.0, 'compute': 0.8}
    """
    out = dict.fromkeys(wanted, 1.0)
    left, count = capacity, len(wanted)
    for who in sorted(wanted, key=lambda name: wanted[name]):
        got = min(wanted[who], left / count)
        out[who] = got / wanted[who] if wanted[who] > 0 else 1.0
        left, count = left - got, count - 1
    return out


def _queues(plan: Plan, num_steps: int, writers: dict[str, list[str]]) -> dict[str, list[Key]]:
    """Return by lane its tasks in the order in which they are begun.

    A task that is ahead stands before a step's own tasks, or after them if it reads their values.
    """
    queues: dict[str, list[tuple[tuple[int, int, int], Key]]] = {}
    late: set[str] = set()
    for place, task in enumerate(plan.tasks):
        if writers[task.name] or any(name in late for name in task.after):
            late.add(task.name)
        for step in range(num_steps):
            turn = 0 if task.ahead <= 0 else 1 if task.name in late else -1
            at = (step - max(0, task.ahead), turn, place)
            queues.setdefault(task.lane, []).append((at, (step, task.name)))
    return {lane: [key for _, key in sorted(queue)] for lane, queue in queues.items()}


def _waits(
    plan: Plan, num_steps: int, writers: dict[str, list[str]]
) -> tuple[dict[Key, set[Key]], dict[Key, list[Key]]]:
    """Return the tasks that every task of every step waits for, and those that wait for it."""
    own = [task for task in plan.tasks if task.ahead == 0]
    waited = {name for task in own for name in task.after}
    last = [task.name for task in own if task.name not in waited]
    behind = [(task.name, -task.ahead) for task in plan.tasks if task.ahead < 0]
    missing: dict[Key, set[Key]] = {}
    for step in range(num_steps):
        for task in plan.tasks:
            # A task that is ahead runs before the step's own tasks, so it cannot wait for them.
            after = [name for name in task.after if plan.by_name[name].ahead >= task.ahead]
            needs = {(step, name) for name in after}
            if step:
                needs |= {(step - 1, name) for name in writers[task.name]}
                if task.ahead == 0 and not any(plan.by_name[n].ahead == 0 for n in after):
                    needs |= {(step - 1, name) for name in last}
                    needs |= {(step - 1 - k, name) for name, k in behind if step > k}
            # A task that is ahead needs a buffer: it is free when the step that used it is over.
            if 0 < task.ahead < step:
                needs |= {(step - task.ahead - 1, name) for name in last}
            missing[step, task.name] = needs
    users: dict[Key, list[Key]] = {}
    for key, needs in missing.items():
        for need in needs:
            users.setdefault(need, []).append(key)
    return missing, users


def _state_writers(plan: Plan) -> dict[str, list[str]]:
    """Return by task the tasks of the step before that wrote the states it reads."""
    written: dict[str, list[tuple[int | None, str]]] = {}
    for task in plan.tasks:
        for access in task.writes:
            if access.state is not None:
                written.setdefault(access.state, []).append((access.chunk, task.name))
    return {
        task.name: [
            name
            for access in task.reads
            if access.state is None
            for chunk, name in written.get(access.value, ())
            if chunk is None or access.chunk is None or chunk == access.chunk
        ]
        for task in plan.tasks
    }
