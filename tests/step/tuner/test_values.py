"""A schedule is taken only if it makes the same: what is returned, stored, and left in states."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.step.ranks import run_ranks
from tests.step.tuner import work as tune_work
from tests.step.tuner.simulated import Simulated

import penstock.step as ps
from penstock.errors import ProgramError
from penstock.step.program.cost import MachineCosts
from penstock.step.tuner import tune as tuning
from penstock.step.tuner.trial import CarriedTrial, MeasuredTrials
from penstock.step.tuner.tune import Tuned, tune
from penstock.step.tuner.values import RankValue, Values, is_same

HOW: dict[str, Any] = {"costs": MachineCosts(), "budget_s": 0.1, "cache": None}
BATCH = {"x": torch.arange(4.0)}


@ps.program
def stepped(w: ps.R[4], m: ps.R[4]):
    x = ps.load("data.x", ps.R[4])
    m = ps.update(m, m + x)
    ps.store(m * 2.0, "kept")
    return ps.update(w, w + 1.0), x * 1.0


@ps.program
def drawing(x: ps.R[4096]):
    (y,) = ps.call("draw", x, outs=(x.type,))
    return y * 2.0 + 1.0, (x + 1.0) * 3.0


def given() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(4), "m": torch.zeros(4)}


class Spoiling(MeasuredTrials):
    """Makes something wrong of every schedule that is not the program as it was written."""

    def __init__(self, *args: Any, what: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self._what = what

    def __call__(self, program: ps.Program) -> CarriedTrial:
        trial = super().__call__(program)
        if program.history:
            trial.results = self._spoiled(trial.results)  # type: ignore[method-assign]
        return trial

    def _spoiled(self, results: Callable[[], Values]) -> Callable[[], Values]:
        def spoiled() -> Values:
            made = dict(results())
            made[self._what] = RankValue(tensor=made[self._what].tensor + 1.0)
            return made

        return spoiled


@pytest.mark.parametrize("what", ["state m", "stored kept", "returned 1"])
def test_what_loads_and_stores_is_compared(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "search", tune_work.few("rotate('x', 1)\n"))
    program = stepped.on(ps.mesh(dp=1))
    options: dict[str, Any] = {"sources": {"data": [BATCH, {"x": torch.ones(1)}]}}
    with ps.Groups(program.mesh) as groups:
        assert tune(program, groups, given(), **HOW, **options).num_measured > 0
        trial = MeasuredTrials(groups, given(), **options)(program)
        assert what in trial.results()
        trial.close()
        spoiling = Spoiling(groups, given(), what=what, **options)
        assert tune(program, groups, given(), measure=spoiling, **HOW).num_measured == 0


def test_what_a_function_makes_anew_each_time_is_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "search", tune_work.few("fuse('add.2', 'mul.2')\n"))
    drawn = iter(range(1_000_000))
    program = drawing.on(ps.mesh(dp=1))
    options: dict[str, Any] = {"calls": {"draw": lambda x: x + next(drawn)}, "backend": "eager"}
    with ps.Groups(program.mesh) as groups:
        inputs = {"x": torch.ones(4096)}
        assert tune(program, groups, inputs, **options, **HOW).num_measured > 0
        spoiling = Spoiling(groups, inputs, what="returned 1", **options)
        assert tune(program, groups, inputs, measure=spoiling, **HOW).num_measured == 0


def test_slices_of_a_state_are_compared_with_their_part_of_the_whole() -> None:
    program = stepped.on(ps.mesh(dp=1))
    whole = {"state m": RankValue(tensor=torch.arange(8.0), bounds=((0, 8),))}
    part = torch.arange(4.0, 8.0)
    assert is_same(program, whole, {"state m": RankValue(tensor=part, bounds=((4, 8),))})
    assert not is_same(program, whole, {"state m": RankValue(tensor=part, bounds=((3, 7),))})
    assert not is_same(program, whole, {})


def test_what_is_no_number_is_the_same_only_as_itself() -> None:
    program = stepped.on(ps.mesh(dp=1))
    odd = {"returned 0": RankValue(tensor=torch.tensor([torch.nan, torch.inf, 1.0]))}
    assert is_same(program, odd, odd)
    assert not is_same(program, odd, {"returned 0": RankValue(tensor=torch.ones(3))})
    assert not is_same(program, {"returned 0": RankValue(tensor=torch.ones(3))}, odd)


def test_a_measure_that_depends_on_something_else_is_another_one(tmp_path: Path) -> None:
    program, keys = stepped.on(ps.mesh(dp=1)), set()
    for backend in ("gloo", "shm"):
        with ps.Groups(program.mesh, backend=backend) as groups:
            for options in ({}, {"backend": "eager"}, {"donate": ("w",)}, {"device": "meta"}):
                keys.add(MeasuredTrials(groups, {}, **options).key)
    assert len(keys) == 2 * 4
    slow, how = MachineCosts(memory_bytes_s=1e6), {**HOW, "cache": tmp_path}
    assert not tune(program, measure=Simulated(MachineCosts()), **how).is_cached
    assert tune(program, measure=Simulated(MachineCosts()), **how).is_cached
    assert not tune(program, measure=Simulated(slow), **how).is_cached
    for _ in range(2):  # Nobody knows what this one depends on.
        noisy = Simulated(MachineCosts(), noise=lambda made: 1.0)
        assert not tune(program, measure=noisy, **how).is_cached


def test_what_is_no_option_of_compile_or_is_lacking_is_told() -> None:
    program = stepped.on(ps.mesh(dp=1))
    with pytest.raises(ProgramError, match="tune has no option 'call'; of compile it has calls"):
        tune(program, call={})
    with ps.Groups(program.mesh) as groups:
        with pytest.raises(ProgramError, match=r"give tune sources=\{'data': ...\}"):
            tune(program, groups, given(), **HOW)
        with pytest.raises(ProgramError, match=r"give tune calls=\{'draw': ...\}"):
            tune(drawing.on(program.mesh), groups, {"x": torch.ones(4096)}, **HOW)


def test_a_tuned_step_is_a_step() -> None:
    program = stepped.on(ps.mesh(dp=1))
    options: dict[str, Any] = {"sources": {"data": [BATCH]}, "calls": {"kept": lambda x: None}}
    with (
        ps.Groups(program.mesh) as groups,
        Tuned(program=program, baseline=program).compile(groups, **options) as step,
    ):
        assert isinstance(step, ps.Step)
        step.keeps_times = True
        step(**given())
        assert {lived.task for lived in step.times} == set(step.plan.by_name)
        assert step.timeline().step_s > 0.0
        step.forget()
        with pytest.raises(TypeError, match="unexpected keyword argument 'source'"):
            Tuned(program=program, baseline=program).compile(groups, source={})


def test_ranks_tune_what_loads_calls_and_stores_and_are_told_of_a_source_that_fails() -> None:
    said = run_ranks(tune_work.tune_loading, 2)
    for each in said:
        assert each["num_measured"] == 1
        assert each["sliced"] == 0  # It would store slices of what it was written to store.
        assert each["wrong"] == 0
        assert each["stored"] == 0
        assert each["off"] < 1e-5
        assert "rank 1 cannot run trained: OSError: no data here" in each["failed"]
    assert said[0]["digest"] == said[1]["digest"]
