"""The tuner: the fastest schedule of a program on the ranks that will run it, or the one it has.

    tuned = tune(adam, groups, dict(g=g, w=w, m=m, v=v, t=1, lr=1e-3))
    step = tuned.compile(groups)

It measures the machine and the network (`calibrate`) and the program as it is, lets the first rank
look for schedules that the simulator predicts to be fast (`search`), and runs the best few of them
in turns with the program as it was written (`race`); the errors of those predictions decide which
to run next. A schedule is taken only if it makes the same values and is faster by at least 3 % and
by more than the noise of the measurements; otherwise the program stays as it is. The first rank
decides; all ranks apply the schedule themselves and compare the digests of their plans before they
go on. A schedule that fails on one rank is dropped by all.

Rewrites that change values are never tried unless they are allowed by name. A step of
`Tuned.compile` watches whether it takes as long as it did here (`watch`).
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from penstock.errors import ProgramError
from penstock.step.groups import Groups
from penstock.step.program.cost import MachineCosts
from penstock.step.program.language import Template
from penstock.step.program.lower import lower
from penstock.step.program.nodes import Program, Rewrite
from penstock.step.program.schedule import apply, schedule_text
from penstock.step.program.simulate import simulate
from penstock.step.tuner.agree import RankError, Team, same, together
from penstock.step.tuner.bind import bound
from penstock.step.tuner.cache import UNREADABLE, keep, kept, key_of, versions
from penstock.step.tuner.calibrate import calibrate, is_like, learned, middle, speeds
from penstock.step.tuner.race import Heats, Race, Result
from penstock.step.tuner.samples import undisturbed
from penstock.step.tuner.search import Search, checked, search
from penstock.step.tuner.trial import CarriedTrial, Measure, MeasuredTrials, Trial
from penstock.step.tuner.values import Values, is_same, steady
from penstock.units import show_seconds

if TYPE_CHECKING:
    from penstock.step.tuner.watch import WatchedStep

__all__ = ["CACHE", "Tried", "Tuned", "tune", "tune_again"]

CACHE = "~/.cache/penstock"
_MEASURED = 12
"""Schedules that are run at most."""
_AT_ONCE = 4
"""Schedules that enter a race together; later ones are chosen with more measurements."""
_RUNS_EACH = 8
"""About how often each is run in a race, and the baseline beside it."""
_SEARCH_SHARE = 0.3
_PREPARE_SHARE = 0.6
"""Of the budget, after which no further schedule is compiled."""
_OPTIONS = ("calls", "sources", "backend", "donate", "device")
"""Of `compile`."""
_NUMBERS = ("seconds", "baseline_s", "ratio", "band")
"""Fields of `Tuned` that are kept in the cache."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A schedule that was measured."""

    schedule: tuple[Rewrite, ...]
    predicted_s: float
    seconds: float
    """The median of its runs; schedules that leave a race early have fewer."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The result of tuning."""

    program: Program
    """With the chosen schedule."""
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
    """The schedules that were measured; the program as it was given is the first."""
    costs: MachineCosts | None = field(default=None, compare=False)
    allow: tuple[str, ...] = ()
    """What the user allowed, of `search.ALLOWED`."""

    @property
    def is_changed(self) -> bool:
        """Whether a schedule was faster than the program as it was given."""
        return self.program.digest != self.baseline.digest

    @property
    def schedule(self) -> tuple[Rewrite, ...]:
        """The rewrites that make it from the baseline."""
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
    """Return the program with the schedule that is fastest here. All ranks call it together.

    Args:
        program: what `@program` makes, put on the mesh of the groups with the sizes of the inputs;
            or a program that is on it, whose schedule stays and is added to.
        groups: the communication of this rank; not needed with a `measure` that speaks for all.
        inputs: of the program, by name, in its layouts; copies are used.
        budget_s: about how long it may take; a schedule that compiles slowly may take longer.
        allow: "sliced": states that are not returned may be kept in slices, and are given so then;
            "bf16", "f16": values may be sent with fewer bits.
        costs: of the machine; measured by default.
        measure: runs programs; by default they are carried out with `inputs`.
        cache: the folder where results are kept by mesh, shapes, hosts, versions and options, and
            used while the network is about as fast as it was, unless their budget was smaller;
            None keeps nothing. The first rank's folder counts.
        options: of `compile`: calls, sources, backend, donate, device. Of each source one batch is
            taken and used again and again, so a generator cannot be a source here, but a list of
            one of its batches can; nothing is stored.
    """
    with closing(Team(groups, is_apart=True)) as team, undisturbed():
        name = program.name
        ready = partial(_ready, groups, inputs, measure, options, allow)
        used, allowed = together(team, name, ready)
        names = None if inputs is None else ", ".join(sorted(inputs))
        key, kind = getattr(used, "key", None), type(program).__name__
        facts = {"programs": f"{kind} {name}", "inputs": names, "options": key}
        # Before any other meeting: ranks with different options would wait in different ones.
        same(team, name, facts | {"allow": ", ".join(sorted(allowed))})
        if isinstance(program, Template):
            program = bound(program, groups, inputs, team)
        how: dict[str, Any] = {"team": team, "allow": allowed, "budget_s": budget_s}
        return _TuningJob(program=program, groups=groups, measure=used, **how).tuned(costs, cache)


def tune_again(before: Tuned, groups: Groups | None, measure: Measure, *, budget_s: float) -> Tuned:
    """Return the schedule that is fastest now, for the present inputs. All ranks call it together.

    The schedule in use is tried first: a search that has little time must not lose it. States that
    are kept in slices stay in slices.
    """
    types = ({node.name: node.type for node in p.inputs} for p in (before.program, before.baseline))
    is_cut = next(types) != next(types)
    program = before.program if is_cut else before.baseline
    allow = tuple(word for word in before.allow if word != "sliced")
    first = [schedule_text(before.schedule)] if before.is_changed and not is_cut else []
    with closing(Team(groups, is_apart=True)) as team, undisturbed():
        how: dict[str, Any] = {"team": team, "allow": allow, "budget_s": budget_s, "first": first}
        job = _TuningJob(program=program, groups=groups, measure=measure, **how)
        return job.tuned(None, None)


def _ready(
    groups: Groups | None,
    inputs: Mapping[str, Any] | None,
    measure: Measure | None,
    options: Mapping[str, Any],
    allow: Iterable[str],
) -> tuple[Measure, tuple[str, ...]]:
    """Return what runs programs and what is allowed; refuse arguments that do not go together."""
    known = ", ".join(_OPTIONS)
    for name in options:
        if name not in _OPTIONS:
            raise ProgramError(f"tune has no option {name!r}; of compile it has {known}")
    allowed = checked(allow)
    if measure is not None:
        if options:
            raise ProgramError(f"tune with a measure takes no {', '.join(options)}; give it those")
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
    numbers = {name: getattr(tuned, name) for name in _NUMBERS} | {"budget_s": budget_s}
    said = {"schedule": schedule_text(tuned.schedule), "speeds": dict(seen), **numbers}
    return json.dumps(said)


def _from_cache(
    text: str,
    program: Program,
    seen: Mapping[str, float],
    allow: tuple[str, ...],
    budget_s: float,
) -> Tuned | None:
    """Return a result of before, if its rewrites still apply and the network is as fast as then.

    A result of a search with a smaller budget does not count.
    """
    try:
        said = json.loads(text)
        if not is_like(seen, said["speeds"]) or said["budget_s"] < budget_s:
            return None
        made = apply(program, str(said.pop("schedule")))
        numbers: dict[str, Any] = {name: float(said[name]) for name in _NUMBERS}
    except UNREADABLE:
        return None
    is_sound = all(numbers[name] > 0 for name in ("seconds", "baseline_s", "ratio"))
    if not _is_allowed(made, program, allow) or not is_sound:
        return None
    return Tuned(program=made, baseline=program, allow=allow, is_cached=True, **numbers)


def _is_allowed(made: Program, given: Program, allow: tuple[str, ...]) -> bool:
    """Whether a program differs from the given one only in what the user allowed."""
    was, now = ({node.attr("wire") for node in p.nodes} for p in (given, made))
    is_cut = [node.type for node in made.inputs] != [node.type for node in given.inputs]
    return now - was <= set(allow) and (not is_cut or "sliced" in allow)


@dataclass(kw_only=True)
class _TuningJob:
    """One tuning, on one rank."""

    program: Program
    groups: Groups | None
    measure: Measure
    team: Team
    allow: tuple[str, ...]
    budget_s: float
    first: list[str] = field(default_factory=list)
    """Schedules, as text, that are tried before all others."""
    dropped: list[str] = field(default_factory=list)
    """Digests of programs that cannot be used here."""
    start_s: float = field(default_factory=time.monotonic)

    def tuned(self, costs: MachineCosts | None, cache: str | Path | None) -> Tuned:
        """Return the result of before from the cache, or tune."""
        # Ranks may have different caches and budgets: those of the first rank count.
        first = self.team.from_first((costs, cache is not None, self.budget_s))
        costs, has_cache, self.budget_s = first
        self.agree(self.program)
        if isinstance(self.measure, MeasuredTrials):
            self._together(partial(self.measure.check_given, self.program))
        # A measure of the user's without a key: nobody knows what its times depend on.
        said = getattr(self.measure, "key", None)
        is_kept = has_cache and said is not None
        shelf = cache if is_kept else None
        here = self.team.gathered(_here(self.groups))
        program, allowed = self.program, sorted(self.allow)
        key = key_of("schedule", program.digest, program.mesh, allowed, here, said, costs)
        seen = speeds(self.groups) if is_kept and self.groups is not None else {}
        found = self.team.from_first(kept(shelf, key) if self.team.rank == 0 else None)
        before = None
        if found is not None:
            before = _from_cache(found, program, seen, self.allow, self.budget_s)
        # All or none: a rank whose program refuses the rewrites must not tune alone.
        if all(self.team.gathered(before is not None)):
            assert before is not None
            return before
        tuned = self._measured(costs, cache)
        if self.team.rank == 0:
            keep(shelf, key, _for_cache(tuned, seen, self.budget_s))
        return tuned

    def _measured(self, costs: MachineCosts | None, cache: str | Path | None) -> Tuned:
        """Measure the machine and the program, search, race, and agree on the winner."""
        if costs is None:
            costs = MachineCosts() if self.groups is None else calibrate(self.groups, cache=cache)
        if isinstance(self.measure, MeasuredTrials):
            self._together(self.measure.look)
        trials: list[Trial] = [self._together(lambda: self.measure(self.program))]
        programs = [self.program]
        try:
            if isinstance(trials[0], CarriedTrial):
                self._together(trials[0].check)
            wanted = self._wanted(trials[0])
            costs = self._with_learned(costs, trials[0])
            found = self._searched(costs)
            most = 1 + self._affordable(trials[0])
            heats = Heats(self._race(trials))
            is_first = True  # A slow machine tries some schedules too, however late it is.
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
        """Return the values that schedules have to make: those that the program makes each time."""
        made = self._together(trial.results)
        if made is None or all(node.op != "call" for node in self.program.nodes):
            return made
        again = self._together(trial.results)
        assert again is not None
        return steady(made, again)

    def _next(self, found: Search, programs: list[Program], heats: Heats, most: int) -> list[str]:
        """Return the schedules, as text, that the first rank wants to be run next."""
        if self.first:
            texts, self.first = self.first, []
            return texts

        def best() -> list[str]:
            known = {p.digest: heats.ratio(n) for n, p in enumerate(programs)}
            done = len(self.program.history)
            chosen = found.next(min(most, _AT_ONCE), known, but=self.dropped)
            return [schedule_text(c.schedule[done:]) for c in chosen]

        return self._of_first(best)

    def _with_learned(self, costs: MachineCosts, trial: Trial) -> MachineCosts:
        """Return costs with the measured times of the program's own tasks."""
        if not isinstance(trial, CarriedTrial):
            return costs
        trial.times(1)
        calls, kernels = learned(trial.step.plan, trial.times(3), costs)
        everyones = self.team.gathered((calls, kernels))
        known_s = middle([said[0] for said in everyones])
        rates = middle([said[1] for said in everyones])
        passes = [rate for name, rate in rates.items() if "matmul" not in name]
        # Calibration may measure the processor's caches; the program's tensors lie in memory.
        fastest = min([costs.memory_bytes_s, *([max(passes)] if passes else [])])
        costs = replace(costs, memory_bytes_s=fastest)
        return costs.with_kernels(rates).with_calls(known_s)

    def _affordable(self, trial: Trial) -> int:
        """Return how many schedules can be run often enough within the budget."""
        run_s = max(self.team.gathered(self._together(trial.run)))
        runs = _PREPARE_SHARE * self.budget_s / max(run_s, 1e-9)
        return max(1, int(min(_MEASURED, runs / _RUNS_EACH)))

    def _searched(self, costs: MachineCosts) -> Search:
        """Return the search of the first rank; other ranks get the number of tries only."""
        found = Search()

        def look() -> int:
            nonlocal found
            budget_s = _SEARCH_SHARE * self.budget_s
            found = search(self.program, costs, allow=self.allow, budget_s=budget_s)
            return found.num_tried

        found.num_tried = self._of_first(look)
        return found

    def _made(self, text: str, wanted: Values | None) -> tuple[Program, Trial] | None:
        """Return a schedule ready to run, if its plans and values are right on all ranks.

        A schedule that one rank cannot carry out is dropped by all.
        """
        program = self._together(lambda: apply(self.program, text))
        self.agree(program)
        # Dropped until it has proved right: an error on the way leaves it on the list.
        self.dropped.append(program.digest)
        trial: Trial | None = None
        try:
            trial = self._together(lambda: self.measure(program))
            made = self._together(trial.results)
            is_good = wanted is None or is_same(program, wanted, made)
            if all(self.team.gathered(is_good)):
                self.dropped.remove(program.digest)
                return program, trial
        except ProgramError:
            pass
        if trial is not None:
            trial.close()
        return None

    def _together(self, work: Callable[[], T]) -> T:
        return together(self.team, self.program.name, work)

    def _of_first(self, work: Callable[[], T]) -> T:
        """Return the result of work on the first rank; if it fails there, all ranks raise."""
        is_first = self.team.rank == 0
        made = self._together(lambda: work() if is_first else None)
        return cast("T", self.team.from_first(made))

    def agree(self, program: Program) -> None:
        """Refuse to go on where ranks have made different plans of one schedule."""
        digests = self.team.gathered(self._together(lambda: lower(program).digest))
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
                # This rank must reach `slowest`, where the others wait and hear of the error.
                errors.setdefault(number, f"{type(error).__name__}: {error}")
                return math.inf

        def slowest(mine: Sequence[float]) -> list[float]:
            everyones = self.team.gathered((list(mine), errors.get(0)))
            for rank, (_, error) in enumerate(everyones):
                if error is not None:
                    raise RankError(f"rank {rank} cannot run {self.program.name}: {error}")
            return [max(several) for several in zip(*(s for s, _ in everyones), strict=True)]

        return Race(run=run, slowest=slowest, has_time=lambda: self._has_time(1.0))

    def _has_time(self, share: float) -> bool:
        """Whether some of the budget is left, by the clock of the first rank."""
        # Ranks that disagree would part here and wait for each other in different calls.
        mine = time.monotonic() - self.start_s < share * self.budget_s
        return self.team.from_first(mine)

    def _outcome(
        self, programs: list[Program], result: Result, found: Search, costs: MachineCosts
    ) -> Tuned:
        winner = self.team.from_first(result.winner)
        self.agree(programs[winner])
        return Tuned(
            program=programs[winner],
            baseline=self.program,
            seconds=result.seconds[winner],
            baseline_s=result.seconds[0],
            ratio=result.ratio,
            band=result.band,
            took_s=time.monotonic() - self.start_s,
            num_tried=found.num_tried,
            num_measured=len(programs) - 1,
            tried=tuple(
                Tried(
                    schedule=program.history[len(self.program.history) :],
                    predicted_s=simulate(lower(program), costs).step_s,
                    seconds=seconds,
                )
                for program, seconds in zip(programs, result.seconds, strict=True)
            ),
            costs=costs,
            allow=self.allow,
        )
