"""What a task takes when it is alone follows from its bytes, its operations and its link."""

import math

import pytest

from penstock.errors import ProgramError
from penstock.step.program import P, Program, R, S, Type, language, mesh, program
from penstock.step.program.cost import Link, MachineCosts, unmeasured_calls, work_of
from penstock.step.program.lower import lower
from penstock.step.program.plan import Plan, Task


@program
def summed(g: P["n"], w: R["n"]):
    return language.update(w, w - language.all_reduce(g))


@program(axis="tp")
def product(x: R["t", "k"], w: S(1)["k", "h"]):
    return x @ w


@program
def asked(x: R["n"]):
    (y,) = language.call("heavy", x, outs=(Type(shape=(8,)),))
    (z,) = language.call("light", y, outs=(Type(shape=(8,)),), cost_s=0.25)
    return z


def _task(made: Program, kind: str) -> tuple[Task, Plan]:
    plan = lower(made)
    return next(task for task in plan.tasks if task.kind == kind), plan


def test_a_move_takes_its_latency_and_its_bytes() -> None:
    costs = MachineCosts(links=(("dp", Link(latency_s=0.5, bytes_s=1e6, cpu_s=0.0)),), task_s=0.0)
    task, plan = _task(summed.on(mesh(dp=2), n=1_000_000), "move")
    assert work_of(task, plan, costs).alone_s == pytest.approx(0.5 + 4.0)


def test_the_longest_name_that_fits_a_move_counts() -> None:
    named = ("", "dp", "dp/all_reduce", "dp/all_reduce/ring")
    costs = MachineCosts(links=tuple((name, Link(bytes_s=10.0**k)) for k, name in enumerate(named)))
    assert costs.link("dp", "all_reduce", "ring").bytes_s == 1000
    assert costs.link("dp", "all_reduce", "direct").bytes_s == 100
    assert costs.link("dp", "all_gather").bytes_s == 10
    assert costs.link("tp").bytes_s == 1


def test_several_axes_are_as_fast_as_the_slowest() -> None:
    costs = MachineCosts(links=(("dp", Link(bytes_s=1e6)), ("tp", Link(bytes_s=1e9))))
    assert costs.link("dp+tp", "all_reduce").bytes_s == 1e6


def test_a_product_takes_two_operations_an_element_and_inner_length() -> None:
    costs = MachineCosts(flops_s=1e6, memory_bytes_s=1e15, task_s=0.0)
    task, plan = _task(product.on(mesh(tp=2), t=10, k=20, h=30), "compute")
    assert work_of(task, plan, costs).alone_s == pytest.approx(2 * 10 * 20 * 15 / 1e6)


def test_what_was_measured_counts_more_than_what_is_reckoned() -> None:
    task, plan = _task(product.on(mesh(tp=2), t=10, k=20, h=30), "compute")
    costs = MachineCosts(kernels=(("matmul 10x20x15", 6e3),), task_s=0.0)
    assert work_of(task, plan, costs).alone_s == pytest.approx(1.0)


def test_bytes_that_cost_more_processor_than_wire_are_bound_by_it() -> None:
    link = Link(latency_s=0.0, bytes_s=1e9, cpu_s=4e-9)
    task, plan = _task(summed.on(mesh(dp=2), n=1 << 20), "move")
    work = work_of(task, plan, MachineCosts(links=(("dp", link),)))
    assert work.cores == pytest.approx(1.0)
    assert work.wire_share == pytest.approx(0.25)


def test_calls_take_what_was_measured_or_said() -> None:
    plan = lower(asked.on(mesh(dp=1), n=8))
    heavy, light = (task for task in plan.tasks if task.kind == "call")
    costs = MachineCosts(task_s=0.0)
    assert unmeasured_calls(plan.program, costs) == ("heavy",)
    assert work_of(light, plan, costs).alone_s == 0.25
    known = costs.with_calls({"heavy": 3.0})
    assert work_of(heavy, plan, known).alone_s == 3.0
    assert unmeasured_calls(plan.program, known) == ()


def test_costs_come_back_from_json() -> None:
    costs = MachineCosts(
        links=(("dp", Link(bytes_s=5.0, wire="eth0")),),
        kernels=(("add", 2.0),),
        calls=(("f", 1.0),),
        factors=(("gelu", 3.0),),
        cores=0.5,
    )
    assert MachineCosts.from_json(costs.to_json()) == costs


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"links": 3}',
        '{"nonsense": 1}',
        '{"cores": 0}',
        '{"flops_s": NaN}',
        '{"decode_bytes_s": 0}',
        '{"task_s": Infinity}',
        '{"kernels": [["add", 0]]}',
    ],
)
def test_what_is_not_costs_is_refused(text: str) -> None:
    with pytest.raises(ProgramError, match="costs"):
        MachineCosts.from_json(text)


@pytest.mark.parametrize(
    "said", [{"bytes_s": 0.0}, {"bytes_s": math.nan}, {"latency_s": math.nan}, {"cpu_s": -1.0}]
)
def test_links_refuse_nonsense(said: dict[str, float]) -> None:
    with pytest.raises(ProgramError, match="rates are above 0"):
        Link(**said)
