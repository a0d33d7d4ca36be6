"""The tuner: the fastest schedule of a program on the ranks that will run it, or the one it has.

    tuned = tune(adam, groups, dict(g=g, w=w, m=m, v=v, t=1, lr=1e-3))
    step = tuned.compile(groups)

It measures the machine and the network (`calibrate`) and the program as it is, lets the first rank
look for schedules that the simulator thinks fast (`search`), and runs the best few of them in
turns with the program as it was written (`race`); how far the simulator was off for those says
which to run next. A schedule is taken only if it makes the same values, is at least 3 % faster, and
is so outside of what measurements differ by; otherwise the program stays as it is. The first rank
decides; all ranks make the schedule for themselves and compare the digests of their plans before
anybody goes on. What fails on one rank is dropped by all.

What changes values is never tried unless it is allowed by name. A step of `Tuned.compile` watches
whether it takes as long as it did here (`watch`).
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from penstock.errors import ProgramError
from penstock.step.groups import Groups
from penstock.step.program.cost import MachineCosts
from penstock.step.program.language import Template
from penstock.step.program.lower import lower
from penstock.step.program.nodes import Program, Rewrite
from penstock.step.program.schedule import apply, schedule_text
from penstock.step.program.simulate import simulate
from penstock.step.tuner.agree import RankError, same, together
from penstock.step.tuner.bind import bound
from penstock.step.tuner.cache import keep, kept, key_of, versions
from penstock.step.tuner.calibrate import calibrate, is_like, learned, middle, speeds
from penstock.step.tuner.race import Heats, Race, Result
from penstock.step.tuner.samples import undisturbed
from penstock.step.tuner.search import Search, checked, search
from penstock.step.tuner.trial import (
    CarriedTrial,
    Measure,
    MeasuredTrials,
    Team,
    Trial,
    TrialRanks,
    TrialsAlone,
)
from penstock.step.tuner.values import Values, is_same, steady
from penstock.units import show_seconds

if TYPE_CHECKING:
    from penstock.step.tuner.watch import WatchedStep

__all__ = ["CACHE", "Tried", "Tuned", "tune", "tune_again"]

CACHE = "~/.cache/penstock"
_MEASURED = 12
"""Schedules that are run at most, and how many at once: those that follow know more."""
_AT_ONCE = 4
_RUNS_EACH = 8
"""About how often each is run in a race, and the baseline beside it."""
_SEARCH_SHARE = 0.3
_PREPARE_SHARE = 0.6
"""Of the budget, after which no further schedule is compiled."""
_OPTIONS = ("calls", "sources", "backend", "donate", "device")
"""Of `compile`."""
T = TypeVar("T")


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
    costs: MachineCosts | None = field(default=None, compare=False)

    allow: tuple[str, ...] = ()
    """What was allowed."""

    @property
    def is_changed(self) -> bool:
        """Whether something was faster than what was given."""
        return self.program.digest != self.baseline.digest

    @property
    def schedule(self) -> tuple[Rewrite, ...]:
        """The rewrites that make it of what was given."""
        return self.program.history[len(self.baseline.history) :]

    def compile(self, groups: Groups, **options: Any) -> WatchedStep:
        """Return a step that watches whether it takes as long as it did; options as `compile`."""
        from penstock.step.tuner.watch import WatchedStep

        return WatchedStep(self, groups, options)

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
            if self.ratio == 1.0 and not self.band:
                best = "nothing else was run"
            return f"{head}\n  stays as it is ({show_seconds(self.baseline_s)} a step): {best}\n"
        was, now = show_seconds(self.baseline_s), show_seconds(self.seconds)
        text = schedule_text(self.schedule).replace("\n", "\n    ").rstrip()
        return (
            f"{head}\n  {was} -> {now} a step ({1 / self.ratio:.2f}×, ± {self.band:.0%})"
            f"\n    {text}\n"
        )


def tune(
    program: Program | Template,
    groups: Groups | None = None,
    inputs: Mapping[str, Any] | None = None,
    *,
    budget_s: float = 30.0,
    allow: Iterable[str] = (),
    costs: MachineCosts | None = None,
    measure: Measure | None = None,
    cache: str | Path | None = CACHE,
    **options: Any,
) -> Tuned:
    """Return the program with the schedule that is fastest here. All ranks come together.

    Args:
        program: what `@program` makes, put on the mesh of the groups with the sizes of the inputs;
            or a program that is on it, whose schedule stays and is added to.
        groups: the communication of this rank; not needed with a `measure` that speaks for all.
        inputs: what the program is given, by name, in the layouts that it has; copies are used.
        budget_s: about how long it may take; a schedule that compiles slowly may take longer.
        allow: "sliced": states that are not returned may be kept in slices, and are given so then;
            "bf16", "f16": values may be sent with fewer bits.
        costs: of the machine; measured where they are not given.
        measure: runs programs; by default they are carried out with `inputs`.
        cache: the folder where results are kept by mesh, shapes, hosts, versions and options, and
            used while the network is about as fast as it was, unless they were looked for with a
            smaller budget; None: none. That of the first rank counts.
        options: of `compile`: calls, sources, backend, donate, device. Of each source one batch is
            looked at and used again and again, so a generator cannot be one, but a list of one of
            its batches can; nothing is stored.
    """
    team = _team(groups)
    try:
        with undisturbed():
            name = program.name
            ready = partial(_ready, groups, inputs, measure, options, allow)
            used, allowed = together(team, name, ready)
            names = None if inputs is None else ", ".join(sorted(inputs))
            key, kind = getattr(used, "key", None), type(program).__name__
            facts = {"programs": f"{kind} {name}", "inputs": names, "options": key}
            same(team, name, facts | {"allow": ", ".join(sorted(allowed))})
            if isinstance(program, Template):
                program = bound(program, groups, inputs, team)
            job = _TuningJob(program, groups, used, team=team, allow=allowed, budget_s=budget_s)
            return job.tuned(costs, cache)
    finally:
        team.close()


def tune_again(before: Tuned, groups: Groups | None, measure: Measure, *, budget_s: float) -> Tuned:
    """Return the schedule that is fastest now, for inputs as they are now. All ranks come together.

    What is used now is tried first: a search that has little time must not lose it. States that
    are kept in slices stay there.
    """
    types = ({node.name: node.type for node in p.inputs} for p in (before.program, before.baseline))
    is_cut = next(types) != next(types)
    program = before.program if is_cut else before.baseline
    allow = tuple(word for word in before.allow if word != "sliced")
    team = _team(groups)
    try:
        with undisturbed():
            job = _TuningJob(program, groups, measure, team=team, allow=allow, budget_s=budget_s)
            if before.is_changed and not is_cut:
                job.first = [schedule_text(before.schedule)]
            return job.tuned(None, None)
    finally:
        team.close()


def _team(groups: Groups | None) -> Team:
    return TrialsAlone() if groups is None or groups.mesh.num_ranks == 1 else TrialRanks()


def _ready(
    groups: Groups | None,
    inputs: Mapping[str, Any] | None,
    measure: Measure | None,
    options: Mapping[str, Any],
    allow: Iterable[str],
) -> tuple[Measure, tuple[str, ...]]:
    """Return what runs programs, and what is allowed, if all of that can be meant."""
    known = ", ".join(_OPTIONS)
    for name in options:
        if name not in _OPTIONS:
            raise ProgramError(f"tune has no option {name!r}; of compile it has {known}")
    allowed = checked(allow)
    if measure is not None:
        if options:
            raise ProgramError(f"tune with a measure needs no {', '.join(options)}; give it those")
        return measure, allowed
    if groups is None or inputs is None:
        raise ProgramError("tune needs groups and inputs to run programs, or a measure")
    return MeasuredTrials(groups, inputs, **options), allowed


def _here(groups: Groups | None) -> str:
    if groups is None:
        return ""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return f"{platform.node()} {device} {torch.get_num_threads()} {versions()}"


def _for_cache(tuned: Tuned, seen: Mapping[str, float], budget_s: float) -> str:
    numbers = {"seconds": tuned.seconds, "baseline_s": tuned.baseline_s, "ratio": tuned.ratio}
    numbers |= {"band": tuned.band, "budget_s": budget_s}
    said = {"schedule": schedule_text(tuned.schedule), "speeds": dict(seen), **numbers}
    return json.dumps(said)


def _from_cache(
    text: str,
    program: Program,
    seen: Mapping[str, float],
    allow: tuple[str, ...],
    budget_s: float,
) -> Tuned | None:
    """Return what was found before, if its rewrites and the network still are what they were.

    A search that had less time than there is now says nothing.
    """
    try:
        said = json.loads(text)
        if not is_like(seen, said["speeds"]) or said["budget_s"] < budget_s:
            return None
        made = apply(program, str(said.pop("schedule")))
        names = ("seconds", "baseline_s", "ratio", "band")
        seconds, baseline_s, ratio, band = (float(said[name]) for name in names)
    except (
        ProgramError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ):
        return None
    if not _is_allowed(made, program, allow) or not min(seconds, baseline_s, ratio) > 0:
        return None
    return Tuned(
        program=made,
        baseline=program,
        allow=allow,
        seconds=seconds,
        baseline_s=baseline_s,
        ratio=ratio,
        band=band,
        is_cached=True,
    )


def _is_allowed(made: Program, given: Program, allow: tuple[str, ...]) -> bool:
    """Whether a program differs from the one that was given in what was allowed only."""
    was, now = ({node.attr("wire") for node in p.nodes} for p in (given, made))
    is_cut = [node.type for node in made.inputs] != [node.type for node in given.inputs]
    return now - was <= set(allow) and (not is_cut or "sliced" in allow)


def _check_given(measure: Measure, program: Program) -> None:
    if isinstance(measure, MeasuredTrials):
        measure.check_given(program)


def _nothing() -> None:
    """There is nothing to look at."""


class _TuningJob:
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
        self.first: list[str] = []
        """Schedules in words that are tried before all others."""
        self._dropped: list[str] = []
        """Digests of programs that cannot be used here."""
        self._start_s = time.monotonic()

    def tuned(self, costs: MachineCosts | None, cache: str | Path | None) -> Tuned:
        """Return what was found before, or find it."""
        # What the first rank was told counts, where ranks need not be told the same.
        first = self._team.from_first((costs, cache is not None, self._budget_s))
        costs, has_cache, self._budget_s = first
        self.agree(self._program)
        self._together(partial(_check_given, self._measure, self._program))
        # What a measure of somebody else depends on nobody knows.
        said = getattr(self._measure, "key", None)
        is_kept = has_cache and said is not None
        shelf = cache if is_kept else None
        here = self._team.gathered(_here(self._groups))
        program = self._program
        allowed = sorted(self.allow)
        key = key_of("schedule", program.digest, program.mesh, allowed, here, said, costs)
        seen = speeds(self._groups) if is_kept and self._groups is not None else {}
        found = self._team.from_first(kept(shelf, key) if self._team.rank == 0 else None)
        before = None
        if found is not None:
            before = _from_cache(found, program, seen, self.allow, self._budget_s)
        if all(self._team.gathered(before is not None)):
            assert before is not None
            return before
        tuned = self._measured(costs, cache)
        if self._team.rank == 0:
            keep(shelf, key, _for_cache(tuned, seen, self._budget_s))
        return tuned

    def _measured(self, costs: MachineCosts | None, cache: str | Path | None) -> Tuned:
        """Measure, look, race, agree."""
        if costs is None:
            costs = MachineCosts() if self._groups is None else calibrate(self._groups, cache=cache)
        self._together(getattr(self._measure, "look", _nothing))
        trials: list[Trial] = [self._together(lambda: self._measure(self._program))]
        programs = [self._program]
        try:
            self._together(getattr(trials[0], "check", _nothing))
            wanted = self._wanted(trials[0])
            costs = self._with_learned(costs, trials[0])
            found = self._searched(costs)
            most = 1 + self._affordable(trials[0])
            heats = Heats(self._race(trials))
            is_first = True  # Some are always tried, however slow the machine is today.
            while len(trials) < most and (is_first or self._has_time(_PREPARE_SHARE)):
                is_first = False
                new = self._next(found, programs, heats, most - len(trials))
                made = [each for text in new if (each := self._made(text, wanted)) is not None]
                if not new:
                    break
                programs += [program for program, _ in made]
                trials += [trial for _, trial in made]
                heats.run(range(len(trials) - len(made), len(trials)))
            result = heats.final()
        finally:
            for trial in trials:
                trial.close()
        return self._outcome(programs, result, found, costs)

    def _wanted(self, trial: Trial) -> Values | None:
        """Return what all have to make: what the program as it was written makes each time."""
        made = self._together(trial.results)
        if made is None or all(node.op != "call" for node in self._program.nodes):
            return made
        again = self._together(trial.results)
        assert again is not None
        return steady(made, again)

    def _next(self, found: Search, programs: list[Program], heats: Heats, most: int) -> list[str]:
        """Return some schedules in words, as the first rank wants them to be run next."""
        if self.first:
            texts, self.first = self.first, []
            return texts

        def best() -> list[str]:
            known = {p.digest: heats.ratio(n) for n, p in enumerate(programs)}
            done = len(self._program.history)
            chosen = found.next(min(most, _AT_ONCE), known, but=self._dropped)
            return [schedule_text(c.schedule[done:]) for c in chosen]

        return self._of_first(best)

    def _with_learned(self, costs: MachineCosts, trial: Trial) -> MachineCosts:
        """Return costs with what the program's own tasks took."""
        if not isinstance(trial, CarriedTrial):
            return costs
        trial.times(1)
        calls, kernels = learned(trial.step.plan, trial.times(3), costs)
        everyones = self._team.gathered((calls, kernels))
        known_s = middle([said[0] for said in everyones])
        rates = middle([said[1] for said in everyones])
        passes = [rate for name, rate in rates.items() if "matmul" not in name]
        # What was measured in caches is too fast for tensors that the program has elsewhere.
        fastest = min([costs.memory_bytes_s, *([max(passes)] if passes else [])])
        costs = replace(costs, memory_bytes_s=fastest)
        return costs.with_kernels(rates).with_calls(known_s)

    def _affordable(self, trial: Trial) -> int:
        """Return how many schedules can be run often enough in the time there is."""
        run_s = max(self._team.gathered(self._together(trial.run)))
        runs = _PREPARE_SHARE * self._budget_s / max(run_s, 1e-9)
        return max(1, int(min(_MEASURED, runs / _RUNS_EACH)))

    def _searched(self, costs: MachineCosts) -> Search:
        """Return what the first rank has found; others have the number only."""
        found = Search()

        def look() -> int:
            nonlocal found
            budget_s = _SEARCH_SHARE * self._budget_s
            found = search(self._program, costs, allow=self.allow, budget_s=budget_s)
            return found.num_tried

        found.num_tried = self._of_first(look)
        return found

    def _made(self, text: str, wanted: Values | None) -> tuple[Program, Trial] | None:
        """Return a schedule ready to run, if all ranks have the same and it makes the same.

        What cannot be carried out here is no candidate; one rank is enough to say so.
        """
        program = self._together(lambda: apply(self._program, text))
        self.agree(program)
        self._dropped.append(program.digest)
        trial: Trial | None = None
        try:
            trial = self._together(lambda: self._measure(program))
            made = self._together(trial.results)
            is_good = wanted is None or is_same(program, wanted, made)
            if all(self._team.gathered(is_good)):
                self._dropped.remove(program.digest)
                return program, trial
        except ProgramError:
            pass
        if trial is not None:
            trial.close()
        return None

    def _together(self, work: Callable[[], T]) -> T:
        return together(self._team, self._program.name, work)

    def _of_first(self, work: Callable[[], T]) -> T:
        """Return what some work makes on the first rank; if it fails there, all are told."""
        is_first = self._team.rank == 0
        made = self._together(lambda: work() if is_first else None)
        said: T = self._team.from_first(made)
        return said

    def agree(self, program: Program) -> None:
        """Refuse to go on where ranks have made different plans of one schedule."""
        digests = self._team.gathered(self._together(lambda: lower(program).digest))
        odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if odd:
            raise ProgramError(
                f"ranks 0 and {odd[0]} have different plans of {program.name} "
                f"({digests[0][:8]} and {digests[odd[0]][:8]}); give all ranks the same program"
            )

    def _race(self, trials: list[Trial]) -> Race:
        errors: dict[int, str] = {}

        def run(number: int) -> float:
            try:
                return trials[number].run()
            except Exception as error:
                # Others are told in a moment; until then they must not wait for this rank.
                errors.setdefault(number, f"{type(error).__name__}: {error}")
                return math.inf

        def slowest(mine: Sequence[float]) -> list[float]:
            everyones = self._team.gathered((list(mine), errors.get(0)))
            for rank, (_, error) in enumerate(everyones):
                if error is not None:
                    raise RankError(f"rank {rank} cannot run {self._program.name}: {error}")
            return [max(several) for several in zip(*(s for s, _ in everyones), strict=True)]

        return Race(run=run, slowest=slowest, has_time=lambda: self._has_time(1.0))

    def _has_time(self, share: float) -> bool:
        """Whether some of the budget is left, by the clock of the first rank."""
        mine = time.monotonic() - self._start_s < share * self._budget_s
        return bool(self._team.from_first(mine))

    def _outcome(
        self, programs: list[Program], result: Result, found: Search, costs: MachineCosts
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
            allow=self.allow,
        )
