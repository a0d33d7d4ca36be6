"""What tuning leaves alone, what it does where there is nothing to tune, and what it keeps."""

from __future__ import annotations

import json
import pwd
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.step.tuner import work as tune_work

import penstock
import penstock.step as ps
from penstock.step.lanes import TaskTime
from penstock.step.program.cost import Link, MachineCosts, work_of
from penstock.step.program.lower import lower
from penstock.step.tuner.calibrate import learned
from penstock.step.tuner.race import Race, race
from penstock.step.tuner.trial import Simulated
from penstock.step.tuner.tune import Tuned, tune, tune_again
from penstock.step.tuner.values import RankValue, is_same

HOW: dict[str, Any] = {"costs": MachineCosts(), "budget_s": 0.1, "cache": None}
ONE = ps.mesh(dp=1)
SLOW = MachineCosts(links=(("", Link(bytes_s=120e6)),), flops_s=95e9)


@ps.program
def doubled(x: ps.R["n"]):
    return x * 2.0


@ps.program
def given_back(x: ps.R["n"]):
    return x


@ps.program
def drawn(w: ps.R[4]):
    x = ps.load("data.x", ps.R[2, 4])
    (y,) = ps.call("draw", ps.sum(x, 0), outs=(w.type,))
    return ps.update(w, w + y)


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((4,), float(index))}


class Resumed:
    """Goes on from where it is, and can be put back there."""

    def __init__(self) -> None:
        self.state = {"at": 5}

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.state["at"] += 1
            yield {"x": torch.ones(2, 4)}


def test_random_numbers_and_sources_stay_where_they_are() -> None:
    def draw(x: torch.Tensor) -> torch.Tensor:
        return torch.rand(4) * random.random() * np.random.rand() + x

    dice = torch.Generator()
    loader = torch.utils.data.DataLoader(Rows(), batch_size=2, shuffle=True, generator=dice)
    resumed = Resumed()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state(), dice.get_state()
    with ps.Groups(ONE) as groups:
        for source in (loader, resumed, torch.utils.data.DataLoader(Rows(), 2, shuffle=True)):
            options = {"calls": {"draw": draw}, "sources": {"data": source}}
            tune(drawn.on(ONE), groups, {"w": torch.zeros(4)}, **options, **HOW)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2][1])
    assert torch.equal(dice.get_state(), states[3])
    assert resumed.state == {"at": 5}


@pytest.mark.parametrize("budget_s", [0.0, float("inf")])
def test_what_has_nothing_to_tune_is_timed_and_stays_as_it_is(budget_s: float) -> None:
    how = {**HOW, "budget_s": budget_s}
    with ps.Groups(ONE) as groups:
        for template, count in ((doubled, 64), (doubled, 0), (given_back, 64)):
            tuned = tune(template, groups, {"x": torch.ones(count)}, **how)
            assert not tuned.is_changed
            assert tuned.seconds > 0.0
            assert "nothing else was run" in str(tuned)


def test_nobody_has_to_have_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(number: int) -> Any:
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    args = {"costs": MachineCosts(), "measure": Simulated(MachineCosts()), "budget_s": 0.0}
    assert not tune(tune_work.block_on(2), **args).is_cached


def _kept(folder: Path, **how: Any) -> Tuned:
    args = {
        "costs": MachineCosts(),
        "measure": Simulated(MachineCosts()),
        "budget_s": 0.1,
        "cache": folder,
    }
    return tune(tune_work.block_on(2), **{**args, **how})


def test_a_short_search_does_not_stand_for_a_longer_one(tmp_path: Path) -> None:
    assert _kept(tmp_path, budget_s=0.0).num_tried == 0
    assert not _kept(tmp_path).is_cached
    assert _kept(tmp_path).is_cached
    assert _kept(tmp_path, budget_s=0.0).is_cached


def test_another_version_tunes_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kept() -> bool:
        with ps.Groups(ONE) as groups:
            how = {**HOW, "cache": tmp_path, "budget_s": 0.0}
            return tune(doubled, groups, {"x": torch.ones(8)}, **how).is_cached

    assert (kept(), kept()) == (False, True)
    monkeypatch.setattr(penstock, "__version__", "0.0.0")
    assert not kept()
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    assert not kept()


def test_what_was_not_allowed_is_not_taken_from_a_file(tmp_path: Path) -> None:
    _kept(tmp_path)
    (path,) = tmp_path.iterdir()  # Nothing is left beside it.
    good = json.loads(path.read_text())
    odd: list[dict[str, Any]] = [
        {"schedule": "wire(dtype='bf16')"},
        {"schedule": "", "seconds": 10**400},
        {"seconds": -1.0},
        {"ratio": 0.0},
    ]
    texts = ["[" * 100_000, *(json.dumps(good | each) for each in odd)]
    for text in texts:
        path.write_text(text)
        tuned = _kept(tmp_path)
        assert not tuned.is_cached, text[:100]
        assert not tuned.program.is_approximate


def test_a_state_that_does_not_move_is_not_the_same() -> None:
    program = doubled.on(ONE, n=8)
    before = torch.linspace(-4.0, 4.0, 8)
    wanted = {"state w": RankValue(tensor=before - 1e-3, bounds=((0, 8),), before=before)}
    slight = before - 1e-3 * (1 + 1e-5)
    assert is_same(program, wanted, {"state w": RankValue(tensor=slight)})
    assert not is_same(program, wanted, {"state w": RankValue(tensor=before)})
    part = RankValue(tensor=before[4:] - 1e-3, bounds=((4, 8),))
    assert is_same(program, wanted, {"state w": part})
    assert not is_same(program, wanted, {"state w": RankValue(tensor=before[4:], bounds=((4, 8),))})


def test_what_is_used_now_is_not_lost_where_there_is_no_time_to_find_it_again() -> None:
    block = tune_work.block_on(2, t=2048, k=2048, h=1024)
    names = ["matmul.1", *(node.name for node in block.nodes[-3:])]
    fast = block.chunk(8, *names).overlap()
    before = Tuned(program=fast, baseline=block, allow=("bf16",))
    again = tune_again(before, None, Simulated(SLOW), budget_s=0.0)
    assert again.num_tried == 0
    assert again.program.digest == fast.digest
    assert again.baseline_s > 1.2 * again.seconds
    assert again.allow == ("bf16",)
    # A network on which it does not pay takes it away again.
    punished = Simulated(SLOW, lambda made: 3.0 if made.regions else 1.0)
    assert not tune_again(before, None, punished, budget_s=0.0).is_changed


def test_seconds_are_of_the_runs_that_decided() -> None:
    # The gain is small until the final, for which there is little time.
    runs: list[int] = []

    def run(number: int) -> float:
        runs.append(number)
        return (0.9 if len(runs) <= 35 else 0.5) if number == 1 else 1.0

    result = race(5, Race(run=run, slowest=list, has_time=lambda: len(runs) < 35))
    assert (result.winner, len(runs)) == (1, 35 + 3 * 3)
    assert result.seconds[1] / result.seconds[0] == pytest.approx(result.ratio)


def test_a_function_in_chunks_is_learned_whole() -> None:
    @ps.program
    def called(x: ps.R[64]):
        (y,) = ps.call("f", x, outs=(x.type,), batch=((0,), (0,)))
        return y * 2.0

    made = called.on(ONE)
    plan = lower(made.chunk(4, *(n.name for n in made.nodes if n.op in ("call", "pick", "mul"))))
    tasks = [task for task in plan.tasks if task.kind == "call"]
    assert len(tasks) == 4
    lived = [TaskTime(task=t.name, lane=t.lane, start_s=0.0, stop_s=0.25) for t in tasks]
    calls, _ = learned(plan, [lived], MachineCosts())
    costs = MachineCosts().with_calls(calls)
    assert sum(work_of(t, plan, costs).seconds for t in tasks) == pytest.approx(1.0, rel=1e-3)
