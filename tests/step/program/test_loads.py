"""Loads in stages: tasks, lanes, what they cost, and how much of them is waited for."""

from __future__ import annotations

import json

import pytest

from penstock.errors import ProgramError
from penstock.step.program import Program, R, language, mesh, program
from penstock.step.program.check import check_plan
from penstock.step.program.cost import Link, MachineCosts, work_of
from penstock.step.program.explain import explain
from penstock.step.program.loads import STAGES, staged
from penstock.step.program.lower import lower
from penstock.step.program.picture import Picture, perfetto_json
from penstock.step.program.plan import COPY, DECODE, FETCH
from penstock.step.program.simulate import simulate

COSTS = MachineCosts(
    io=Link(latency_s=0.0, bytes_s=1e6, cpu_s=0.0, wire="io"),
    copy=Link(latency_s=0.0, bytes_s=10e6, cpu_s=0.0, wire="pcie"),
    decode_bytes_s=2e6,
    memory_bytes_s=1e15,
    calls=(("forward", 0.004),),
    task_s=0.0,
    cores=2.0,
)
"""A thousand floats are fetched in 4 ms, decoded in 2, copied in 0.4, and used for 4."""


@program
def train(w: R["n"]):
    x = language.load("train.x", R["n"])
    (y,) = language.call("forward", x, outs=(x.type,))
    return language.update(w, w + language.sum(y))


def made(**stages: tuple[str, ...]) -> Program:
    return staged(train.on(mesh(dp=1), n=1000), stages)


def test_each_stage_of_a_load_is_a_task_on_its_own_lane() -> None:
    plan = lower(made(train=STAGES))
    fetch, decode, copy = plan.tasks[:3]
    assert [t.lane for t in (fetch, decode, copy)] == [FETCH, DECODE, COPY]
    assert [t.name for t in (fetch, decode, copy)] == ["x.fetch", "x.decode", "x"]
    assert decode.after == ("x.fetch",)
    assert "x.decode" in copy.after
    assert [bool(t.writes) for t in (fetch, decode, copy)] == [False, False, True]
    check_plan(plan)
    staged_bytes, plain_bytes = (
        simulate(one, MachineCosts()).peak_bytes for one in (plan, lower(made()))
    )
    assert staged_bytes == plain_bytes


def test_what_is_not_said_to_have_stages_is_one_task() -> None:
    plan = lower(made(other=STAGES))
    assert [(t.name, t.lane, t.kind) for t in plan.tasks[:1]] == [("x", FETCH, "load")]
    assert lower(made(train=STAGES)).digest != plan.digest


def test_a_program_says_what_lies_in_the_store() -> None:
    @program
    def pictures(w: R[1]):
        x = language.load("train", R["n"], stages=STAGES, stored=0.1)
        return language.update(w, w + language.sum(x))

    fetch, decode, copy = lower(pictures.on(mesh(dp=1), n=1000)).tasks[:3]
    assert (fetch.touched_bytes, decode.touched_bytes, copy.touched_bytes) == (400, 4000, 4000)
    split = lower(pictures.on(mesh(tp=2), n=1000).split("x")).tasks[:3]
    assert [task.touched_bytes for task in split] == [200, 2000, 2000]


def test_stages_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ProgramError, match="in the stages decode, fetch"):
        lower(made(train=("decode", "fetch")))
    with pytest.raises(ProgramError, match="bytes stored for one"):

        @program
        def empty(w: R[1]):
            return language.update(w, language.load("x", R[1], stored=0.0))

        empty.on(mesh(dp=1))


@pytest.mark.parametrize(
    ("ahead", "call_ms", "step_ms", "waited_ms"),
    [(0, 4.0, 10.4, 6.4), (1, 8.0, 8.0, 0.0), (2, 4.0, 4.0, 0.0), (2, 2.0, 4.0, 2.0)],
)
def test_stages_hide_behind_steps(
    ahead: int, call_ms: float, step_ms: float, waited_ms: float
) -> None:
    chosen = made(train=STAGES)
    chosen = chosen.rotate("x", ahead) if ahead else chosen
    timeline = simulate(lower(chosen), COSTS.with_calls({"forward": call_ms / 1e3}))
    assert 1e3 * timeline.step_s == pytest.approx(step_ms, rel=0.01)
    assert 1e3 * timeline.alone_s(*timeline.load_lanes) == pytest.approx(waited_ms, rel=0.01)
    # The last step loads for those after it, as all do.
    assert [round(1e3 * timeline.busy_s(n), 2) for n in timeline.load_lanes] == [4.0, 2.0, 0.4]
    if ahead == 0:
        assert [round(1e3 * timeline.alone_s(n), 2) for n in timeline.load_lanes] == [4.0, 2.0, 0.4]


def test_what_was_measured_of_a_source_counts() -> None:
    plan = lower(made(train=STAGES))
    known = MachineCosts.from_json(COSTS.to_json())
    assert known == COSTS
    known = MachineCosts(loads=(("train/fetch", 4e3), ("train/decode", 8e3)), task_s=0.0)
    seconds = [work_of(task, plan, known).seconds for task in plan.tasks[:2]]
    assert seconds == pytest.approx([1.0, 0.5])


def test_stages_are_told_and_drawn() -> None:
    said = explain(made(train=STAGES), COSTS)
    text = " ".join(str(said).split())
    assert "fetching 4 ms, decoding 2 ms, copying to the device 0.4 ms" in text
    assert "for 6.4 ms something is loaded and nothing is computed" in text
    events = json.loads(perfetto_json([Picture(name="x", timeline=said.timeline)]))["traceEvents"]
    lanes = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert lanes == ["compute", COPY, DECODE, FETCH]
