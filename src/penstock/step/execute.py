"""Programs carried out: `compile` makes a step of a program, calling the step runs it.

    with Groups(mesh) as groups:
        step = compile(program, groups)
        (new,) = step(g=grad, w=weights, m=m, v=v, t=1, lr=1e-3)

Every rank passes what it has of each input: its slice of a sliced one, its addend of a partial one.
States are updated in the memory that was passed. All ranks compare the digest of their plan before
the first step; if they differ, nothing is begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import distributed

from penstock.errors import ProgramError
from penstock.step.bucketing import bucket_of
from penstock.step.calling import call_of
from penstock.step.comms.comm import Comm
from penstock.step.comms.recording import begun_ns, record_step
from penstock.step.computing import prepared
from penstock.step.dtensor import local_of
from penstock.step.dtypes import torch_dtype
from penstock.step.groups import Groups
from penstock.step.inputs import no_program, no_tensor, number_of, with_article
from penstock.step.kernels.regions import check_backend
from penstock.step.lanes import Begun, PlanIteration, PreparedTasks, TaskTime
from penstock.step.loads.sources import Source, StageHandle, check_apart, field_of, stages_offered
from penstock.step.memory import RankMemory
from penstock.step.moving import move_of
from penstock.step.next_gathers import NextGather, next_gathers, with_next_gathers
from penstock.step.program.check import check_plan
from penstock.step.program.loads import LOAD_LANES, STAGES, staged, stages_of
from penstock.step.program.lower import host_nodes, lower
from penstock.step.program.nodes import Node, Program
from penstock.step.program.ops import computed
from penstock.step.program.plan import Plan, Task
from penstock.step.program.timeline import Span, Timeline
from penstock.step.ringing import run_ring
from penstock.step.streams import StreamOrder, Streams

__all__ = ["Step", "compile", "planned", "whole_device"]

Calls = Mapping[str, Callable[..., Any]]


def compile(
    program: Program,
    groups: Groups,
    *,
    backend: str = "auto",
    calls: Calls | None = None,
    sources: Mapping[str, Iterable[Any]] | None = None,
    donate: Sequence[str] = (),
    device: torch.device | str = "cpu",
) -> Step:
    """Return a step that carries out a program on this rank.

    Args:
        program: on the mesh of the groups.
        groups: the communication of this rank.
        backend: what fused regions become: auto, native, compile, tiled, eager, triton.
        calls: the user's functions by name.
        sources: where batches are loaded from, by name: any iterable of batches, such as a Loader.
        donate: inputs whose memory may be overwritten, such as gradients.
        device: where values live.
    """
    where = whole_device(device)
    plan = planned(program, sources or {}, donate, where)
    options: dict[str, Any] = {"backend": backend, "calls": calls or {}, "sources": sources or {}}
    return Step(plan, groups, **options, device=where)


def planned(
    program: Program,
    sources: Mapping[str, Iterable[Any]],
    donate: Sequence[str],
    device: torch.device,
) -> Plan:
    """Return the plan of a program whose loads have the stages of their sources."""
    if not isinstance(program, Program):
        raise ProgramError(no_program(program))
    check_apart(sources)
    stages = {name: stages_offered(of, device) for name, of in sources.items()}
    return lower(staged(program, stages), donate=donate)


class Step:
    """A plan on one rank."""

    def __init__(
        self,
        plan: Plan,
        groups: Groups,
        *,
        backend: str,
        calls: Calls,
        sources: Mapping[str, Iterable[Any]],
        device: torch.device,
    ) -> None:
        if not isinstance(groups, Groups):
            raise ProgramError(
                f"a program is compiled for Groups, not for {with_article(groups)}; write `with "
                "Groups(program.mesh) as groups:` and give those"
            )
        check_backend(backend)
        check_plan(plan)
        self.plan = plan
        self.program = plan.program
        if groups.mesh != self.program.mesh:
            raise ProgramError(
                f"program {self.program.name} is on the mesh {self.program.mesh}, the groups are "
                f"on {groups.mesh}"
            )
        self._groups, self._groups_closed = groups, groups.num_closed
        self._agree()
        self._rank = groups.rank
        self._device = device
        self._memory = RankMemory(self.program, self._rank, device)
        self._host = host_nodes(self.program)
        self._calls = calls
        self._sources = {
            name: of if isinstance(of, Source) else Source(name, of, device, groups.over)
            for name, of in sources.items()
        }
        self._scalars: dict[str, float | int] = {}
        self._inputs, self._defaults = self.program.inputs, dict(self.program.defaults)
        self._held: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        """What this rank has of a value: shape and element type, cached at first use."""
        self._io = ThreadPoolExecutor(1, thread_name_prefix="penstock-step-io")
        # Stores that last longer than their iteration. Not on `_io`: its tasks wait for these.
        self._behind = ThreadPoolExecutor(1, thread_name_prefix="penstock-step-store")
        self._is_broken = self._is_closed = False
        self.keeps_times = False
        """Whether `times` records when each task ran."""
        self.times: list[TaskTime] = []
        self._took_s = self._ended_s = 0.0
        for name, place in plan.shared:
            self._memory.share(name, place)
        self._backend = backend
        self._next_gathers = {
            task.name: NextGather(task, self._memory, self._comm(task))
            for task in next_gathers(plan)
        }
        self._stored: dict[str, Future[None]] = {}
        """Stores under way while later iterations run, by node."""
        self._whole_plan = with_next_gathers(plan)
        self._streams = Streams(self._whole_plan, device) if device.type == "cuda" else None
        self._prepared_tasks = self._prepared()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all threads, and raise what went wrong since the last step, if anything did."""
        if self._is_closed:
            return
        self._is_closed = True
        # From the last callback to the first, whatever goes wrong: gathers and stores under way use
        # the threads, and the threads use the sources.
        with ExitStack() as closing:
            if self._streams is not None:
                # The step's memory may be freed after this: no kernel may still use it.
                closing.callback(torch.cuda.synchronize, self._device)
            for source in self._sources.values():
                closing.callback(source.close)
            closing.callback(self._behind.shutdown, wait=True)
            closing.callback(self._io.shutdown, wait=True)
            closing.callback(self.forget)

    def hand_over(self) -> dict[str, Source]:
        """Close all but the sources and return them: another step continues with their batches."""
        kept, self._sources = self._sources, {}
        with ExitStack() as failing:
            for source in kept.values():
                failing.callback(source.close)
            self.close()
            failing.pop_all()
        return {name: source.handed_on() for name, source in kept.items()}

    @property
    def sources(self) -> dict[str, Source]:
        """The sources from which it loads, by name."""
        return dict(self._sources)

    def forget(self) -> None:
        """Wait for what was begun for the next iteration and drop it; all ranks call it together.

        Needed before a state is changed from outside, for instance by loading a checkpoint.
        """
        with ExitStack() as ending:
            for name in list(self._stored):
                ending.callback(self._stored.pop(name).result)
            for gather in self._next_gathers.values():
                ending.callback(gather.forget)

    def __call__(self, *by_place: Any, **given: Any) -> list[torch.Tensor]:
        """Run one iteration and return what the program returns, as this rank has it.

        Returned tensors are the caller's to keep; a returned state is the tensor that was passed.
        """
        if by_place:
            raise ProgramError(
                f"the step of {self.program.name} takes its inputs by name, got {len(by_place)} by "
                f"place; write step({', '.join(f'{n.name}=...' for n in self._inputs)})"
            )
        if self._is_closed:
            raise ProgramError(
                f"the step of {self.program.name} is closed; compile the program again"
            )
        if self._groups.num_closed != self._groups_closed:
            raise ProgramError(
                f"the Groups of the step of {self.program.name} are closed; call it inside their "
                "`with`, or open others and compile the program again, on all ranks"
            )
        if self._is_broken:
            raise ProgramError(
                f"an earlier step of {self.program.name} has failed, and ranks may be at different "
                "places in it; close it and compile it again, on all ranks"
            )
        begin_ns = begun_ns()
        self._take(given)
        plan, keeps_times = self._whole_plan, self.keeps_times
        order = None if self._streams is None else StreamOrder(self._streams)
        iteration = PlanIteration(
            plan, self._prepared_tasks, self._io, keeps_times=keeps_times, order=order
        )
        # Until the end: an iteration that raises leaves ranks at different places.
        self._is_broken = True
        iteration.run()
        self._is_broken = False
        record_step(begin_ns)
        if keeps_times:
            self._keep_times(iteration)
        self._ended_s = time.perf_counter()
        outputs = [self._output(name) for name in self.program.outputs]
        for name in self.program.outputs:
            self._memory.give_away(name)
        return outputs

    def _keep_times(self, iteration: PlanIteration) -> None:
        """Keep when tasks ran; for loads, when their source was at work, not how long we waited."""
        began_s, before_s = iteration.began_s, self._ended_s
        self._took_s = time.perf_counter() - began_s
        self.times = [one for one in iteration.times if one.lane not in LOAD_LANES]
        loads = [task for task in self.plan.tasks if task.lane in LOAD_LANES]
        for name, source in self._sources.items():
            tasks = {t.kind: t for t in reversed(loads) if self._source_name(t) == name}
            self.times += [
                TaskTime(
                    task=tasks[spent.stage].name,
                    lane=tasks[spent.stage].lane,
                    start_s=spent.start_s - began_s,
                    stop_s=spent.stop_s - began_s,
                    ahead=ahead,
                )
                for spent, ahead in source.spent()
                if spent.stop_s > before_s and spent.stage in tasks
            ]

    def timeline(self) -> Timeline:
        """Return the latest iteration as a timeline, for `explain` and pictures.

        Needs `keeps_times` set before that iteration.
        """
        known = self._whole_plan.by_name
        spans = [
            Span(task=known[t.task], step=t.ahead, start_s=t.start_s, end_s=t.stop_s)
            for t in sorted(self.times, key=lambda one: one.start_s)
        ]
        return Timeline(plan=self._whole_plan, spans=tuple(spans), ends_s=(self._took_s,))

    def go_on_after_errors(self, keep: Callable[[Exception], None]) -> None:
        """Pass errors of computation to `keep` and go on, so that other ranks do not wait for this.

        The values are worthless then: this is for trials of a program, which only want times.
        """
        for task in self._whole_plan.tasks:
            if task.name in self._prepared_tasks.run:
                work = self._prepared_tasks.run[task.name]
                self._prepared_tasks.run[task.name] = self._going_on(task, work, keep)

    def _going_on(
        self, task: Task, work: Callable[[], None], keep: Callable[[Exception], None]
    ) -> Callable[[], None]:
        def go_on() -> None:
            try:
                work()
            except Exception as error:
                keep(error)
                users = [self.program[u] for name in task.nodes for u in self.program.users[name]]
                for node in users:
                    if node.op == "pick":
                        self._memory.give(node.name, self._zeros(node))

        return go_on

    def _zeros(self, node: Node) -> torch.Tensor:
        shape = node.type.local_shape(self.program.mesh, self._rank)
        return torch.zeros(shape, dtype=torch_dtype(node.type.dtype), device=self._device)

    # -- inputs --------------------------------------------------------------------------------

    def check(self, **given: Any) -> None:
        """Raise what a call with these inputs would raise, also because of the batch that is next.

        A call that is refused on this rank leaves the others waiting in theirs: check first.
        """
        self._take(given)
        for node in self.program.nodes:
            if node.op == "load":
                source, field = field_of(str(node.attr("source")))
                batch = self._sources[source].looked_at()[0]
                self._checked(node, (batch[field] if field else batch).to(self._device))

    def _take(self, given: dict[str, Any]) -> None:
        scalars: dict[str, float | int] = {}
        for node in self._inputs:
            value = given.pop(node.name, self._defaults.get(node.name))
            if value is None:
                raise ProgramError(f"program {self.program.name} needs {node.name} ({node.type})")
            if node.op == "scalar":
                scalars[node.name] = number_of(node, value)
            else:
                self._memory.give(node.name, self._checked(node, value))
        if given:
            raise ProgramError(
                f"program {self.program.name} has no input {', '.join(given)}; it has "
                f"{', '.join(node.name for node in self._inputs)}"
            )
        self._scalars.clear()
        self._scalars.update(scalars)
        for name in self._host:
            self._scalars[name] = self._number(self.program[name], self._scalars)

    def _checked(self, node: Node, value: Any) -> torch.Tensor:
        value = local_of(value, node.type, self.program.mesh, node.name)
        held = self._held.get(node.name)
        if held is None:
            shape = node.type.local_shape(self.program.mesh, self._rank)
            held = self._held[node.name] = shape, torch_dtype(node.type.dtype)
        shape, dtype = held
        if not isinstance(value, torch.Tensor):
            raise ProgramError(no_tensor(f"{node.name} on rank {self._rank}", value, shape))
        if tuple(value.shape) != shape:
            raise ProgramError(
                f"{node.name} on rank {self._rank} is {tuple(value.shape)}, should be {shape}"
            )
        if value.dtype != dtype:
            raise ProgramError(
                f"{node.name} is {value.dtype}, program has {dtype}; give {node.name}.to({dtype}), "
                "or write another element type behind its dimensions, R['n', ps.bf16]"
            )
        if value.device != self._device:
            raise ProgramError(
                f"{node.name} is on {value.device}, the step on {self._device}; move it there, or "
                "say compile(..., device=...)"
            )
        return value.detach()

    def _number(self, node: Node, known: Mapping[str, float | int]) -> float | int:
        args = [
            self.program[name].attr("value") if name not in known else known[name]
            for name in node.inputs
        ]
        made = computed(node.op, args, dict(node.attrs), node.type.dtype)
        number: float | int = made.item()
        return number

    def _output(self, name: str) -> torch.Tensor:
        if name in self._scalars:
            return torch.tensor(self._scalars[name])
        return self._memory.whole(name)

    # -- preparing -----------------------------------------------------------------------------

    def _prepared(self) -> PreparedTasks:
        run: dict[str, Callable[[], None]] = {}
        begin: dict[str, Callable[[], Begun]] = {}
        for task in self.plan.tasks:
            if task.name in self._next_gathers:
                gather = self._next_gathers[task.name]
                begin |= {gather.name: gather.begin_now, gather.next_name: gather.begin_next}
            elif task.kind == "move":
                node = self.program[task.nodes[0]]
                begin[task.name] = move_of(node, task, self._memory, self._comm(task)).begin
            elif task.kind == "bucket":
                begin[task.name] = bucket_of(task, self._memory, self._comm(task)).begin
            elif task.kind == "ring":
                run[task.name] = self._ring(task)
            elif task.kind == "fused":
                begin[task.name] = self._fused(task)
            elif task.kind == "call":
                run[task.name] = self._call(task)
            elif task.kind in ("load", *STAGES):
                begin[task.name] = self._load(task)
            elif task.kind == "store":
                run[task.name] = self._store(task)
            elif self.program[task.nodes[0]].op == "recv":
                run[task.name] = self._recv(task)
            else:
                run[task.name] = self._compute(task)
        return PreparedTasks(run=run, begin=begin)

    def _compute(self, task: Task) -> Callable[[], None]:
        call = prepared(task, self._memory, host=self._host, backend=self._backend)
        scalars = self._scalars
        return lambda: call(scalars)

    def _comm(self, task: Task) -> Comm:
        return self._groups.comm(self.program[task.nodes[0]].axes, task.lane)

    def _ring(self, task: Task) -> Callable[[], None]:
        region = next(
            r for r in self.program.regions if r.kind == "ring" and task.nodes[0] in r.nodes
        )
        moves = [self.program[name] for name in task.nodes if self.program[name].axes]
        # It communicates while it computes, at times of its own, so it needs a lane of its own.
        comm = self._groups.comm(moves[0].axes, f"ring:{region.name}")
        return lambda: run_ring(region, self._memory, comm)

    def _fused(self, task: Task) -> Callable[[], Begun]:
        from penstock.step.fusing import fused_of

        return fused_of(
            task,
            self._memory,
            self._groups,
            host=self._host,
            scalars=self._scalars,
            backend=self._backend,
        )

    def _call(self, task: Task) -> Callable[[], None]:
        return call_of(task, self._calls, self._memory, value=self._value, checked=self._checked)

    def _value(self, name: str) -> Any:
        return self._scalars[name] if name in self._scalars else self._memory.whole(name)

    def _recv(self, task: Task) -> Callable[[], None]:
        node = self.program[task.nodes[0]]
        mesh, by = self.program.mesh, int(node.attr("by"))
        sender = mesh.coordinate(self._rank, *node.axes) - by
        chosen = node.inputs[0 if 0 <= sender < mesh.size(*node.axes) else 1]
        return lambda: self._memory.give(node.name, self._memory.whole(chosen))

    def _source_name(self, task: Task) -> str:
        return field_of(str(self.program[task.nodes[0]].attr("source")))[0]

    def _load(self, task: Task) -> Callable[[], Begun]:
        node = self.program[task.nodes[0]]
        name, field = field_of(str(node.attr("source")))
        if name not in self._sources:
            raise ProgramError(f"no source called {name!r} was given; compile(..., sources=...)")
        source, stages = self._sources[name], stages_of(node) or ("load",)
        if task.kind == stages[0]:
            others = [t.priority for t in self.plan.tasks if t.sent_bytes]
            is_first = task.priority < min(others, default=task.priority)
            is_out = node.name in self.program.outputs
            source.want(node.name, field, task.ahead, goes_first=is_first, is_returned=is_out)

        def give() -> None:
            taken = source.take(node.name)
            try:
                value = self._checked(node, taken)
            except ProgramError as error:
                raise ProgramError(
                    f"load of {node.attr('source')}: {error}; all batches have to be as the "
                    "program says: leave out a last one that is short"
                ) from None
            if self._streams is not None:
                self._streams.keep(value)
            self._memory.give(node.name, value)

        def begin() -> Begun:
            if task.kind == stages[0]:
                source.ask(node.name)
            stage = source.stage(node.name, task.kind)
            finish = give if task.kind == stages[-1] else stage.result
            return Begun(handle=StageHandle(stage), finish=finish, is_host=True)

        return begin

    def _store(self, task: Task) -> Callable[[], None]:
        node = self.program[task.nodes[0]]
        name = str(node.attr("place"))
        if name not in self._calls:
            raise ProgramError(f"no function takes {name!r}; give one in compile(..., calls=...)")
        function = self._calls[name]
        is_read = bool(self.program.users[node.name]) or node.name in self.program.outputs

        def store() -> None:
            value = self._memory.whole(node.inputs[0])
            # A state may be overwritten before what was stored is read.
            self._memory.give(node.name, value.clone() if is_read else value)
            if task.ahead == 0:
                function(value.clone())  # The function may keep it.
                return
            if node.name in self._stored:
                # One at a time. The result is also where its error is raised, if it failed.
                self._stored.pop(node.name).result()
            self._stored[node.name] = self._behind.submit(self._here(function), value.clone())

        return store

    def _here(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose kernels come after what was launched here and now."""
        if self._streams is None:
            return function
        stream = torch.cuda.current_stream(self._device)

        def call(*values: Any) -> None:
            with torch.cuda.stream(stream):
                function(*values)

        return call

    # -- agreement -----------------------------------------------------------------------------

    def _agree(self) -> None:
        """Refuse to begin if ranks have different plans: they would wait for each other."""
        mesh = self.program.mesh
        if mesh.num_ranks > 1:
            everyones: list[Any] = [None] * mesh.num_ranks
            distributed.all_gather_object(everyones, self.plan.digest)
            odd = [rank for rank, digest in enumerate(everyones) if digest != everyones[0]]
            if odd:
                raise ProgramError(
                    f"ranks 0 and {odd[0]} have different plans of {self.program.name} "
                    f"({everyones[0][:8]} and {everyones[odd[0]][:8]}); build the program and its "
                    "schedule from the same numbers on all ranks"
                )


def whole_device(device: torch.device | str) -> torch.device:
    """Return a device with its number, as tensors have it."""
    return torch.empty(0, device=device).device
