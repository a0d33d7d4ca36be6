"""Trials: programs that are run to see how long they take, on real ranks or in the simulator.

All trials use one set of copies of the inputs, since what they are about is time. States that a
schedule keeps in slices are cut from those that were given whole. What they load is one batch again
and again, and what they store goes nowhere (`samples`).

A rank that fails must not leave the others waiting for it. So groups are opened before anything
that can fail on one rank only, and where computation fails in a step, the rank goes on with what
others wait for and raises its error at the end. Ranks then tell each other, by their own group.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import distributed

from penstock.errors import ProgramError
from penstock.step.comms.timeouts import default_timeout
from penstock.step.dtensor import local_of
from penstock.step.execute import Step
from penstock.step.execute import compile as compile_step
from penstock.step.fusing import fused_lanes
from penstock.step.groups import Groups
from penstock.step.lanes import TaskTime
from penstock.step.program.cost import MachineCosts
from penstock.step.program.loads import source_of
from penstock.step.program.lower import lower
from penstock.step.program.nodes import Node, Program
from penstock.step.program.ops import is_move
from penstock.step.program.plan import Task
from penstock.step.program.simulate import simulate
from penstock.step.tuner.samples import Stored, sampled
from penstock.step.tuner.values import RankValue, Values

__all__ = [
    "TrialsAlone",
    "MeasuredTrials",
    "Measure",
    "TrialRanks",
    "Simulated",
    "Team",
    "Trial",
    "gathered",
]

_LONG_S = 0.02
"""A timing that is shorter is made of several runs."""
_RUNS_MAX = 64


class Trial(Protocol):
    """One program, ready to be run."""

    def run(self) -> float:
        """Run it once, together with all ranks, and return how long a step took here."""
        ...

    def results(self) -> Values | None:
        """Return what it makes of the inputs as they were given; None where nobody can say."""
        ...

    def close(self) -> None:
        """Let it go."""


Measure = Callable[[Program], Trial]


class Team(Protocol):
    """The ranks that tune together."""

    rank: int

    def from_first(self, mine: Any) -> Any:
        """Return what the first rank says."""
        ...

    def gathered(self, mine: Any) -> list[Any]:
        """Return what all ranks say."""
        ...

    def close(self) -> None:
        """Let it go."""


class TrialsAlone:
    """One rank, or a simulator that speaks for all."""

    rank = 0

    def from_first(self, mine: Any) -> Any:
        """Return it."""
        return mine

    def gathered(self, mine: Any) -> list[Any]:
        """Return it, alone."""
        return [mine]

    def close(self) -> None:
        """Nothing is held."""


class TrialRanks:
    """The ranks of torch's default group, in a group of their own."""

    def __init__(self) -> None:
        self.rank = distributed.get_rank()
        self._size = distributed.get_world_size()
        self._group = distributed.new_group(backend="gloo", timeout=default_timeout())

    def from_first(self, mine: Any) -> Any:
        """Return what the first rank says."""
        said = [mine]
        distributed.broadcast_object_list(said, src=0, group=self._group)
        return said[0]

    def gathered(self, mine: Any) -> list[Any]:
        """Return what all ranks say."""
        said: list[Any] = [None] * self._size
        distributed.all_gather_object(said, mine, group=self._group)
        return said

    def close(self) -> None:
        """Let the group go."""
        distributed.destroy_process_group(self._group)


def gathered(groups: Groups, mine: Any) -> list[Any]:
    """Return what all ranks of some groups say, by the default group."""
    if groups.mesh.num_ranks == 1:
        return [mine]
    said: list[Any] = [None] * groups.mesh.num_ranks
    distributed.all_gather_object(said, mine)
    return said


class Simulated:
    """Measures by the simulator: for tests, and to see what a search would find."""

    def __init__(
        self, costs: MachineCosts, noise: Callable[[Program], float] | None = None
    ) -> None:
        self._costs = costs
        self._noise = noise or (lambda program: 1.0)
        self.key = f"{costs}" if noise is None else None

    def __call__(self, program: Program) -> Trial:
        """Return a trial of a program."""
        return _SimulatedTrial(program, self._costs, self._noise)


class _SimulatedTrial:
    def __init__(
        self, program: Program, costs: MachineCosts, noise: Callable[[Program], float]
    ) -> None:
        self._program, self._noise = program, noise
        self._step_s = simulate(lower(program), costs).step_s

    def run(self) -> float:
        return self._step_s * self._noise(self._program)

    def results(self) -> Values | None:
        return None

    def close(self) -> None:
        """Nothing is held."""


class MeasuredTrials:
    """Measures by carrying programs out.

    Args:
        groups: of this rank.
        inputs: what the program as it was written is given, by name; they are not changed.
        options: of `compile`, such as calls, sources, backend, donate and device. No source is
            used up, and nothing is stored.
    """

    def __init__(self, groups: Groups, inputs: Mapping[str, Any], **options: Any) -> None:
        self.groups, self._options = groups, options
        self._given = dict(inputs)
        self._copies: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._baseline: Program | None = None

    @property
    def key(self) -> str:
        """What, of all this, how long programs take depends on."""
        mesh, said = self.groups.mesh, self._options
        ways = [self.groups.backend_of(axis) for axis in mesh.names]
        device = torch.device(said.get("device", "cpu"))
        donated = sorted(said.get("donate", ()))
        return f"{ways} {said.get('backend', 'auto')} {device.type} {donated}"

    def check_given(self, program: Program) -> None:
        """Refuse to tune what would load from, or call, what was not given."""
        loads = [source_of(node) for node in program.nodes if node.op == "load"]
        called = [str(node.attr("function")) for node in program.nodes if node.op == "call"]
        for option, names in (("sources", loads), ("calls", called)):
            lacking = [name for name in names if name not in (self._options.get(option) or {})]
            if lacking:
                raise ProgramError(
                    f"{program.name} needs {lacking[0]!r} to be tuned; give tune "
                    f"{option}={{{lacking[0]!r}: ...}}, as compile"
                )

    def look(self) -> None:
        """Look at a batch of each source; it may fail on one rank, so before anything together."""
        if self._options.get("sources"):
            self._options["sources"] = sampled(self._options["sources"])

    def __call__(self, program: Program) -> CarriedTrial:
        """Return a trial of a program; the first one is the program as it was written."""
        self._baseline = self._baseline or program
        self._open(program)
        self.look()
        stored = Stored()
        calls = stored.instead(self._options.get("calls") or {}, program)
        step = compile_step(program, self.groups, **{**self._options, "calls": calls})
        inputs, state = partial(self._inputs, program), partial(self._state, program)
        return CarriedTrial(step, inputs, state, self.groups, stored)

    def _open(self, program: Program) -> None:
        """Open the groups that a program needs: all ranks do that, and only together."""
        for task in lower(program).tasks:
            for axes, lane in lanes_of(task, program):
                self.groups.comm(axes, lane)

    def _inputs(self, program: Program, fresh: bool) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for node in program.inputs:
            if node.name not in self._given:
                continue
            value = self._given[node.name]
            is_tensor = isinstance(value, torch.Tensor) and node.op != "scalar"
            out[node.name] = self._copy(program, node, value, fresh) if is_tensor else value
        return out

    def _copy(self, program: Program, node: Node, value: torch.Tensor, fresh: bool) -> torch.Tensor:
        source = self._part(program, node, value)
        key = node.name, tuple(source.shape)
        if key not in self._copies:
            self._copies[key] = source.clone(memory_format=torch.contiguous_format)
        elif fresh:
            self._copies[key].copy_(source)
        return self._copies[key]

    def _part(self, program: Program, node: Node, value: torch.Tensor) -> torch.Tensor:
        """Return what this rank has of an input in a program, in the memory that was given."""
        assert self._baseline is not None
        mesh, rank = program.mesh, self.groups.rank
        written = self._baseline[node.name].type
        given = written.bounds(mesh, rank)
        value = local_of(value, written, mesh, node.name).detach()
        shape = tuple(last - first for first, last in given)
        if tuple(value.shape) != shape:
            got = tuple(value.shape)
            raise ProgramError(f"{node.name} on rank {rank} is {got}, should be {shape}")
        mine = node.type.bounds(mesh, rank)
        cut = tuple(
            slice(first - start, last - start)
            for (first, last), (start, _) in zip(mine, given, strict=True)
        )
        return value[cut] if cut else value

    def _state(self, program: Program, name: str) -> torch.Tensor:
        """Return what a state was."""
        return self._part(program, program[name], self._given[name])


class CarriedTrial:
    """A program compiled."""

    def __init__(
        self,
        step: Step,
        inputs: Callable[[bool], dict[str, Any]],
        state: Callable[[str], torch.Tensor],
        groups: Groups,
        stored: Stored,
    ) -> None:
        self.step = step
        self._inputs, self._state, self._groups, self._stored = inputs, state, groups, stored
        self._runs = 0
        self._errors: list[Exception] = []
        step.go_on_after_errors(self._errors.append)

    def check(self) -> None:
        """Refuse what a step would refuse to begin with: others would be in it by then."""
        self.step.check(**self._inputs(True))

    def run(self) -> float:
        """Run it, several times where it is short."""
        if not self._runs:
            self._runs = 1
            taken = self._timed()
            self._runs = self._agreed_runs(taken)
            self._raise_error()
        seconds = self._timed()
        self._raise_error()
        return seconds

    def _agreed_runs(self, seconds: float) -> int:
        wanted = min(_RUNS_MAX, math.ceil(_LONG_S / max(seconds, 1e-6)))
        if self._groups.mesh.num_ranks == 1:
            return wanted
        said: list[int] = [wanted]
        distributed.broadcast_object_list(said, src=0)
        return said[0]

    def _timed(self) -> float:
        given = self._inputs(False)
        if self._groups.mesh.num_ranks > 1:
            distributed.barrier()
        _synchronize(given)
        start_s = time.perf_counter()
        for _ in range(self._runs):
            self.step(**given)
        _synchronize(given)
        return (time.perf_counter() - start_s) / self._runs

    def _raise_error(self) -> None:
        if self._errors:
            raise self._errors[0]

    def results(self) -> Values:
        """Return what it makes of the inputs, and of one batch of each source."""
        self.step.forget()  # What was begun with the states of the last run.
        given = self._inputs(True)
        self._stored.is_kept = True
        returned = [out.detach().clone() for out in self.step(**given)]
        self.step.forget()  # What is still being stored is here then.
        self._stored.is_kept = False
        self._raise_error()
        made = {f"returned {n}": RankValue(tensor=out) for n, out in enumerate(returned)}
        made |= {
            f"stored {at}": RankValue(tensor=value) for at, value in self._stored.values.items()
        }
        program, rank = self.step.program, self._groups.rank
        for name in program.states:
            bounds = program[name].type.bounds(program.mesh, rank)
            after = given[name].detach().clone()
            made[f"state {name}"] = RankValue(tensor=after, bounds=bounds, before=self._state(name))
        return made

    def times(self, num_runs: int) -> list[Sequence[TaskTime]]:
        """Return when each task was at work, in some runs; or nothing, if one has failed."""
        self.step.keeps_times = True
        out: list[Sequence[TaskTime]] = []
        for _ in range(num_runs):
            self.step(**self._inputs(False))
            out.append(self.step.times)
        self.step.keeps_times = False
        return out

    def close(self) -> None:
        """End its threads."""
        self.step.close()


def lanes_of(task: Task, program: Program) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the axes and lanes that a task communicates on."""
    moves = [program[name] for name in task.nodes if is_move(program[name].op)]
    if not moves:
        return
    if task.kind == "ring":
        names = [r.name for r in program.regions if r.kind == "ring" and moves[0].name in r.nodes]
        yield moves[0].axes, f"ring:{names[0]}"
        return
    yield moves[0].axes, task.lane
    if task.kind == "fused":
        yield from fused_lanes(task, program)


def _synchronize(given: Mapping[str, Any]) -> None:
    """Wait for what devices have been asked to do."""
    if any(isinstance(v, torch.Tensor) and v.is_cuda for v in given.values()):
        torch.cuda.synchronize()
