"""Trials: programs that are run to see how long they take.

All trials use one set of copies of the inputs, since only time is measured. States that a schedule
keeps in slices are cut from those that were given whole. Trials load one batch again and again, and
what they store is dropped (`samples`).

A rank that fails must not leave the others waiting for it. So groups are opened before anything
that can fail on one rank only, and where computation fails in a step, the rank goes on with its
communication, for which others wait, and raises its error at the end. Ranks then tell each other
in a group of their own (`agree`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import distributed

from penstock.errors import ProgramError
from penstock.step.dtensor import local_of
from penstock.step.execute import Step
from penstock.step.execute import compile as compile_step
from penstock.step.fusing import fused_lanes
from penstock.step.groups import Groups
from penstock.step.lanes import TaskTime
from penstock.step.program.loads import source_of
from penstock.step.program.lower import lower
from penstock.step.program.nodes import Node, Program
from penstock.step.program.ops import is_move
from penstock.step.program.plan import Task
from penstock.step.tuner.agree import Team
from penstock.step.tuner.samples import Stored, sampled
from penstock.step.tuner.values import RankValue, Values

__all__ = ["CarriedTrial", "Measure", "MeasuredTrials", "Trial"]

_LONG_S = 0.02
"""A timing is made of several runs until it is at least this long."""
_RUNS_MAX = 64


class Trial(Protocol):
    """One program, ready to be run."""

    def run(self) -> float:
        """Run it once, together with all ranks, and return how long a step took here."""
        ...

    def results(self) -> Values | None:
        """Return the values that it makes of the given inputs; None where they are not known."""
        ...

    def close(self) -> None:
        """End its threads."""


Measure = Callable[[Program], Trial]


class MeasuredTrials:
    """Measures by carrying programs out.

    Args:
        groups: of this rank.
        inputs: of the program as it was written, by name; they are not changed.
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
        """The options on which the time of programs depends."""
        mesh, said = self.groups.mesh, self._options
        ways = [self.groups.backend_of(axis) for axis in mesh.names]
        device = torch.device(said.get("device", "cpu"))
        donated = sorted(said.get("donate", ()))
        return f"{ways} {said.get('backend', 'auto')} {device.type} {donated}"

    def check_given(self, program: Program) -> None:
        """Refuse a program that needs a source or a function which was not given."""
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
        """Take a batch of each source. It may fail on one rank, so no rank is in a step yet."""
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
        return CarriedTrial(step, self, stored)

    def _open(self, program: Program) -> None:
        """Open the groups that a program needs. torch makes groups on all ranks together."""
        for task in lower(program).tasks:
            for axes, lane in lanes_of(task, program):
                self.groups.comm(axes, lane)

    def inputs_of(self, program: Program, *, is_fresh: bool) -> dict[str, Any]:
        """Return copies of the inputs of a program; fresh ones have the given values again."""
        out: dict[str, Any] = {}
        for node in program.inputs:
            if node.name not in self._given:
                continue
            value = self._given[node.name]
            is_tensor = isinstance(value, torch.Tensor) and node.op != "scalar"
            out[node.name] = self._copy(program, node, value, is_fresh) if is_tensor else value
        return out

    def _copy(
        self, program: Program, node: Node, value: torch.Tensor, is_fresh: bool
    ) -> torch.Tensor:
        source = self._part(program, node, value)
        key = node.name, tuple(source.shape)
        if key not in self._copies:
            self._copies[key] = source.clone(memory_format=torch.contiguous_format)
        elif is_fresh:
            self._copies[key].copy_(source)
        return self._copies[key]

    def _part(self, program: Program, node: Node, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of an input in a program, a view of the given tensor."""
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

    def state_of(self, program: Program, name: str) -> torch.Tensor:
        """Return the given value of a state."""
        return self._part(program, program[name], self._given[name])


class CarriedTrial:
    """A trial that carries a compiled program out."""

    def __init__(self, step: Step, trials: MeasuredTrials, stored: Stored) -> None:
        self.step = step
        self._trials, self._groups, self._stored = trials, trials.groups, stored
        self._runs = 0
        self._errors: list[Exception] = []
        step.go_on_after_errors(self._errors.append)

    def check(self) -> None:
        """Refuse wrong inputs now: in a step, other ranks would be waiting already."""
        self.step.check(**self._trials.inputs_of(self.step.program, is_fresh=True))

    def run(self) -> float:
        """Run it, several times where it is short."""
        if not self._runs:
            self._runs = 1
            taken = self._timed()
            # Errors come after the meeting, in which the other ranks would wait for this one.
            self._runs = self._agreed_runs(taken)
            self._raise_error()
        seconds = self._timed()
        self._raise_error()
        return seconds

    def _agreed_runs(self, seconds: float) -> int:
        wanted = min(_RUNS_MAX, math.ceil(_LONG_S / max(seconds, 1e-6)))
        return Team(self._groups).from_first(wanted)

    def _timed(self) -> float:
        given = self._trials.inputs_of(self.step.program, is_fresh=False)
        # All ranks begin together, or the first would count the time that it waits for the others.
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
        """Return the values that it makes of the inputs and of one batch of each source."""
        self.step.forget()  # Work ahead was begun with the states of the last run.
        program, rank = self.step.program, self._groups.rank
        given = self._trials.inputs_of(program, is_fresh=True)
        self._stored.is_kept = True
        returned = [out.detach().clone() for out in self.step(**given)]
        self.step.forget()  # Stores may last into the next step; this waits for them.
        self._stored.is_kept = False
        self._raise_error()
        made = {f"returned {n}": RankValue(tensor=out) for n, out in enumerate(returned)}
        made |= {
            f"stored {at}": RankValue(tensor=value) for at, value in self._stored.values.items()
        }
        for name in program.states:
            bounds = program[name].type.bounds(program.mesh, rank)
            after, before = given[name].detach().clone(), self._trials.state_of(program, name)
            made[f"state {name}"] = RankValue(tensor=after, bounds=bounds, before=before)
        return made

    def times(self, num_runs: int) -> list[Sequence[TaskTime]]:
        """Return when each task was at work, in some runs."""
        self.step.keeps_times = True
        out: list[Sequence[TaskTime]] = []
        for _ in range(num_runs):
            self.step(**self._trials.inputs_of(self.step.program, is_fresh=False))
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
    """Wait for the work that devices have queued."""
    if any(isinstance(v, torch.Tensor) and v.is_cuda for v in given.values()):
        torch.cuda.synchronize()
