"""The tuner: the fastest schedule of a program on the ranks that will run it, or the one it has.

    tuned = tune(adam.on(mesh(dp=2), n=1 << 22), groups, dict(g=g, w=w, m=m, v=v, t=1, lr=1e-3))
    step = compile(tuned.program, groups)

It measures the machine and the network (`calibrate`) and the program as it is, lets the first rank
look for schedules that the simulator thinks fast (`tune_search`), and runs the best few of them in
turns with the program as it was written (`tune_race`). A schedule is taken only if it makes the
same values, is at least 3 % faster, and is so outside of what measurements differ by; otherwise
the program stays as it is. The first rank decides; all ranks make the schedule for themselves and
compare the digests of their plans before anybody goes on.

What changes values is never tried unless it is allowed by name.
"""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.cost import Costs
from penstock.program.lower import lower
from penstock.program.nodes import Program
from penstock.program.nodes import Step as Rewrite
from penstock.program.schedule import apply, schedule_text
from penstock.program.simulate import simulate
from penstock.step.calibrating import calibrate, learned, middle
from penstock.step.groups import Groups
from penstock.step.tune_cache import keep, kept, key_of
from penstock.step.tune_race import Race, Result, race
from penstock.step.tune_search import Search, search
from penstock.step.tune_trial import Alone, Carried, CarriedTrial, Measure, Ranks, Team, Trial
from penstock.units import show_seconds

__all__ = ["CACHE", "Tried", "Tuned", "tune"]

CACHE = "~/.cache/penstock"
_MEASURED = 8
"""Schedules that are run."""
_RUNS_EACH = 10
"""About how often each is run in a race, and the baseline beside it."""
_SEARCH_SHARE = 0.3
_PREPARE_SHARE = 0.7
"""Of the budget, after which no further schedule is compiled."""
_SAME_SHARE = 1e-3
_APPROXIMATE_SHARE = 0.1
"""How far results may be from those of the program as it was written, beside their largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A schedule that was measured."""

    schedule: tuple[Rewrite, ...]
    predicted_s: float
    seconds: float
    """The middle of what was measured; who left a race early was measured less often."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What came out."""

    program: Program
    """To be used from now on."""
    baseline: Program
    """As it was given."""
    seconds: float = float("nan")
    """Of a step, as measured."""
    baseline_s: float = float("nan")
    ratio: float = 1.0
    """Time of the best schedule over that of the baseline, in pairs; `band` is its uncertainty."""
    band: float = 0.0
    took_s: float = 0.0
    num_tried: int = 0
    num_measured: int = 0
    is_cached: bool = False
    tried: tuple[Tried, ...] = field(default=(), compare=False)
    """What was measured, the program as it was given first."""
    costs: Costs | None = field(default=None, compare=False)

    @property
    def is_changed(self) -> bool:
        """Whether something was faster than what was given."""
        return self.program.digest != self.baseline.digest

    @property
    def schedule(self) -> tuple[Rewrite, ...]:
        """The rewrites that make it of what was given."""
        return self.program.history[len(self.baseline.history) :]

    def __str__(self) -> str:
        if self.is_cached:
            head = f"{self.program.name}: as found before"
        else:
            head = (
                f"{self.program.name}: {self.num_tried} schedules tried, {self.num_measured} "
                f"measured, {show_seconds(self.took_s)}"
            )
        if not self.is_changed:
            best = f"the best one took {self.ratio:.0%} ± {self.band:.0%} of its time"
            return f"{head}\n  stays as it is ({show_seconds(self.baseline_s)} a step): {best}\n"
        was, now = show_seconds(self.baseline_s), show_seconds(self.seconds)
        text = schedule_text(self.schedule).replace("\n", "\n    ").rstrip()
        return (
            f"{head}\n  {was} -> {now} a step ({1 / self.ratio:.2f}×, ± {self.band:.0%})"
            f"\n    {text}\n"
        )


def tune(
    program: Program,
    groups: Groups | None = None,
    inputs: Mapping[str, Any] | None = None,
    *,
    budget_s: float = 30.0,
    allow: Iterable[str] = (),
    costs: Costs | None = None,
    measure: Measure | None = None,
    cache: str | Path | None = CACHE,
) -> Tuned:
    """Return the program with the schedule that is fastest here. All ranks come together.

    Args:
        program: on the mesh of the groups.
        groups: the communication of this rank; not needed with a `measure` that speaks for all.
        inputs: what the program is given, by name, in the layouts that it has; copies are used.
        budget_s: about how long it may take; a schedule that compiles slowly may take longer.
        allow: "sliced": states that are not returned may be kept in slices, and are given so then;
            "bf16", "f16": values may be sent with fewer bits.
        costs: of the machine; measured where they are not given.
        measure: runs programs; by default they are carried out with `inputs`. Give
            `Carried(groups, inputs, calls=..., backend=...)` for options of `compile`.
        cache: the folder where results are kept by mesh, shapes, hosts and versions; None: none.
    """
    if measure is None:
        if groups is None or inputs is None:
            raise ProgramError("tune needs groups and inputs to run programs, or a measure")
        measure = Carried(groups, inputs)
    alone = groups is None or groups.mesh.num_ranks == 1
    team: Team = Alone() if alone else Ranks()
    job = _Job(program, groups, measure, team=team, allow=tuple(allow), budget_s=budget_s)
    job.agree(program)
    key = key_of(
        "schedule", program.digest, program.mesh, sorted(job.allow), *team.gathered(_here(groups))
    )
    found = team.from_first(kept(cache, key) if team.rank == 0 else None)
    if found is not None and (tuned := _from_cache(found, program)) is not None:
        return tuned
    tuned = job.tuned(costs, cache)
    if team.rank == 0:
        keep(cache, key, _for_cache(tuned))
    return tuned


def _here(groups: Groups | None) -> str:
    if groups is None:
        return ""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return f"{platform.node()} {device} {torch.get_num_threads()} {torch.__version__}"


def _for_cache(tuned: Tuned) -> str:
    numbers = {"seconds": tuned.seconds, "baseline_s": tuned.baseline_s, "ratio": tuned.ratio}
    numbers |= {"band": tuned.band}
    return json.dumps({"schedule": schedule_text(tuned.schedule), **numbers})


def _from_cache(text: str, program: Program) -> Tuned | None:
    """Return what was found before, if its rewrites still are what they were."""
    try:
        said = json.loads(text)
        made = apply(program, str(said.pop("schedule")))
        names = ("seconds", "baseline_s", "ratio", "band")
        seconds, baseline_s, ratio, band = (float(said[name]) for name in names)
    except (ProgramError, ValueError, KeyError, AttributeError):
        return None
    return Tuned(
        program=made,
        baseline=program,
        seconds=seconds,
        baseline_s=baseline_s,
        ratio=ratio,
        band=band,
        is_cached=True,
    )


class _Job:
    """One tuning, on one rank."""

    def __init__(
        self,
        program: Program,
        groups: Groups | None,
        measure: Measure,
        *,
        team: Team,
        allow: tuple[str, ...],
        budget_s: float,
    ) -> None:
        self._program, self._groups, self._measure, self._team = program, groups, measure, team
        self.allow, self._budget_s = allow, budget_s
        self._start_s = time.monotonic()

    def tuned(self, costs: Costs | None, cache: str | Path | None) -> Tuned:
        """Measure, look, race, agree."""
        if costs is None:
            costs = Costs() if self._groups is None else calibrate(self._groups, cache=cache)
        trials: list[Trial] = [self._measure(self._program)]
        programs = [self._program]
        try:
            wanted = trials[0].results()
            costs = self._with_learned(costs, trials[0])
            found, texts = self._searched(costs)
            for text in texts[: self._affordable(trials[0])]:
                # One is always tried, however slow the machine is today.
                if len(trials) > 1 and not self._has_time(_PREPARE_SHARE):
                    break
                made = self._made(text, wanted)
                if made is not None:
                    programs.append(made[0])
                    trials.append(made[1])
            result = race(len(trials), self._race(trials))
        finally:
            for trial in trials:
                trial.close()
        return self._outcome(programs, result, found, costs)

    def _with_learned(self, costs: Costs, trial: Trial) -> Costs:
        """Return costs with what the program's own tasks took."""
        if not isinstance(trial, CarriedTrial):
            return costs
        trial.times(1)
        calls, kernels = learned(trial.step.plan, trial.times(3), costs)
        everyones = self._team.gathered((calls, kernels))
        known_s = middle([said[0] for said in everyones])
        return costs.with_kernels(middle([said[1] for said in everyones])).with_calls(known_s)

    def _affordable(self, trial: Trial) -> int:
        """Return how many schedules can be run often enough in the time there is."""
        run_s = max(self._team.gathered(trial.run()))
        runs = _PREPARE_SHARE * self._budget_s / max(run_s, 1e-9)
        return max(1, min(_MEASURED, int(runs / _RUNS_EACH)))

    def _searched(self, costs: Costs) -> tuple[Search, list[str]]:
        """Return what the first rank has found, as schedules in words."""
        found, texts = Search(), list[str]()
        if self._team.rank == 0:
            found = search(
                self._program,
                costs,
                allow=self.allow,
                budget_s=_SEARCH_SHARE * self._budget_s,
            )
            done = len(self._program.history)
            best = found.best(_MEASURED, but=self._program.digest)
            texts = [schedule_text(c.schedule[done:]) for c in best]
        found.num_tried, texts = self._team.from_first((found.num_tried, texts))
        return found, texts

    def _made(
        self, text: str, wanted: Sequence[torch.Tensor] | None
    ) -> tuple[Program, Trial] | None:
        """Return a schedule ready to run, if all ranks have the same and it makes the same."""
        program = apply(self._program, text)
        self.agree(program)
        trial: Trial | None = None
        # What cannot be carried out here is no candidate; one rank is enough to say so.
        with contextlib.suppress(ProgramError, RuntimeError, NotImplementedError, ValueError):
            trial = self._measure(program)
        if not all(self._team.gathered(trial is not None)):
            if trial is not None:
                trial.close()
            return None
        assert trial is not None
        is_same = wanted is None or _is_same(program, wanted, trial.results())
        if not all(self._team.gathered(is_same)):
            trial.close()
            return None
        return program, trial

    def agree(self, program: Program) -> None:
        """Refuse to go on where ranks have made different plans of one schedule."""
        digests = self._team.gathered(lower(program).digest)
        odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if odd:
            raise ProgramError(
                f"ranks 0 and {odd[0]} have different plans of {program.name} "
                f"({digests[0][:8]} and {digests[odd[0]][:8]}); give all ranks the same program"
            )

    def _race(self, trials: list[Trial]) -> Race:
        def slowest(mine: Sequence[float]) -> list[float]:
            return [max(several) for several in zip(*self._team.gathered(list(mine)), strict=True)]

        return Race(
            run=lambda number: trials[number].run(),
            slowest=slowest,
            has_time=lambda: self._has_time(1.0),
        )

    def _has_time(self, share: float) -> bool:
        """Whether some of the budget is left, by the clock of the first rank."""
        mine = time.monotonic() - self._start_s < share * self._budget_s
        return bool(self._team.from_first(mine))

    def _outcome(
        self, programs: list[Program], result: Result, found: Search, costs: Costs
    ) -> Tuned:
        winner = self._team.from_first(result.winner)
        self.agree(programs[winner])
        return Tuned(
            program=programs[winner],
            baseline=self._program,
            seconds=result.seconds[winner],
            baseline_s=result.seconds[0],
            ratio=result.ratio,
            band=result.band,
            took_s=time.monotonic() - self._start_s,
            num_tried=found.num_tried,
            num_measured=len(programs) - 1,
            tried=tuple(
                Tried(
                    schedule=program.history[len(self._program.history) :],
                    predicted_s=simulate(lower(program), costs).step_s,
                    seconds=seconds,
                )
                for program, seconds in zip(programs, result.seconds, strict=True)
            ),
            costs=costs,
        )


def _is_same(
    program: Program, wanted: Sequence[torch.Tensor], made: Sequence[torch.Tensor] | None
) -> bool:
    """Whether results are those of the program as it was written, up to the order of sums."""
    if made is None or len(made) != len(wanted):
        return False
    is_exact = all(node.attr("wire") is None for node in program.nodes)
    share = _SAME_SHARE if is_exact else _APPROXIMATE_SHARE
    for one, other in zip(made, wanted, strict=True):
        if one.shape != other.shape:
            return False
        if one.numel():
            off = (one.double() - other.double()).abs().max().item()
            if not off <= share * max(1e-30, other.double().abs().max().item()):
                return False
    return True
