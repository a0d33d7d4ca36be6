"""Tuning a program that loads and stores: nothing is used up, nothing is written, all compared."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.step.tuner.simulated import Simulated

import penstock
import penstock.step as ps
from penstock.errors import ProgramError
from penstock.step.program.cost import MachineCosts
from penstock.step.tuner.trial import MeasuredTrials
from penstock.step.tuner.tune import Tuned, tune
from penstock.step.tuner.watch import WatchedStep

N = 4


@ps.program
def counted(w: ps.R[1], m: ps.R[1]):
    x = ps.load("data.data", ps.R[N, 1])
    m = ps.update(m, m + ps.sum(x, 0))
    ps.store(m * 2.0, "kept")
    return ps.update(w, w + 1.0), x * 1.0


def given() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(1), "m": torch.zeros(1)}


def test_tuning_uses_up_no_batch_and_writes_nothing(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(16 * N, dtype=np.float32).reshape(-1, 1))
    dataset, program = penstock.open(tmp_path), counted.on(ps.mesh(dp=1))
    options: dict[str, Any] = {"batch_size": N, "shuffle": None}
    stored: list[float] = []
    calls = {"kept": lambda x: stored.append(float(x))}
    with penstock.Loader(dataset, **options) as loader, ps.Groups(program.mesh) as groups:
        said = {"calls": calls, "sources": {"data": loader}}
        tuned = tune(
            program, groups, given(), costs=MachineCosts(), budget_s=0.3, cache=None, **said
        )
        assert tuned.num_measured > 0
        assert stored == []
        assert loader.state_dict()["position"] == 0
        with tuned.compile(groups, **said) as step:
            assert step(**given())[1].flatten().tolist() == [0.0, 1.0, 2.0, 3.0]
            assert step(**given())[1].flatten().tolist() == [4.0, 5.0, 6.0, 7.0]
        with pytest.raises(ProgramError, match="which yields each batch once"):
            tune(program, groups, given(), cache=None, calls=calls, sources={"data": iter([])})
        with pytest.raises(ProgramError, match="takes no sources"):
            tune(program, groups, measure=Simulated(MachineCosts()), sources={"data": loader})


def test_states_and_batches_are_compared_too() -> None:
    program = counted.on(ps.mesh(dp=1))
    batch = {"data": torch.arange(4.0).reshape(N, 1)}
    calls = {"kept": lambda x: pytest.fail("it was written")}
    with ps.Groups(program.mesh) as groups:
        measure = MeasuredTrials(groups, given(), calls=calls, sources={"data": [batch]})
        trial = measure(program)
        found = trial.results()
        trial.close()
    assert found is not None
    assert {name: value.tensor.flatten().tolist() for name, value in found.items()} == {
        "returned 0": [1.0],
        "returned 1": [0.0, 1.0, 2.0, 3.0],
        "stored kept": [12.0],
        "state w": [1.0],
        "state m": [6.0],
    }


@pytest.mark.filterwarnings("ignore:steps of counted")
def test_a_step_that_is_tuned_again_goes_on_with_the_next_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tuned_otherwise(was: Tuned, groups: ps.Groups, measure: Any, **how: Any) -> Tuned:
        before = was.baseline
        trial = measure(before)
        made = trial.results()
        trial.close()
        assert made["returned 1"].tensor[0] == 3.0, (
            "a trial has the batch that is next, and leaves it there"
        )
        return Tuned(program=before.rotate("x", 1), baseline=before)

    monkeypatch.setattr(WatchedStep, "has_drifted", True)
    monkeypatch.setattr("penstock.step.tuner.watch.tune_again", tuned_otherwise)
    program = counted.on(ps.mesh(dp=1))
    batches = ({"data": torch.full((N, 1), float(i))} for i in range(100))
    tuned = Tuned(program=program.rotate("x", 2), baseline=program)
    options: dict[str, Any] = {"sources": {"data": batches}, "calls": {"kept": lambda x: None}}
    with ps.Groups(program.mesh) as groups, tuned.compile(groups, **options) as step:
        step.keeps_times = True
        seen = [float(step(**given())[1][0]) for _ in range(3)]
        assert step.retune(given())
        assert step.program.history == step.tuned.program.history != tuned.program.history
        seen += [float(step(**given())[1][0]) for _ in range(3)]
        step.forget()
        assert step.keeps_times
        assert step.times
        assert step.timeline().plan.by_name.keys() >= step.plan.by_name.keys()
    assert seen == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_what_is_found_is_kept_for_the_costs_that_were_said(tmp_path: Path) -> None:
    program = counted.on(ps.mesh(dp=1))
    slow = dataclasses.replace(MachineCosts(), memory_bytes_s=MachineCosts().memory_bytes_s / 1000)
    args: dict[str, Any] = {"cache": tmp_path, "budget_s": 0.2, "allow": ["bf16"]}
    first = tune(program, costs=MachineCosts(), measure=Simulated(MachineCosts()), **args)
    again = tune(program, costs=MachineCosts(), measure=Simulated(MachineCosts()), **args)
    other = tune(program, costs=slow, measure=Simulated(slow), **args)
    assert (first.is_cached, again.is_cached, other.is_cached) == (False, True, False)
    assert again.allow == ("bf16",)
