"""Plans that can go wrong are refused, and those that are not refused go right in any order."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.step.program.any_order import run_in_any_order

from penstock.errors import ProgramError
from penstock.step.program import P, Program, R, S, interpret, mesh, program
from penstock.step.program.check import check_orders, check_plan
from penstock.step.program.language import (
    all_gather,
    all_reduce,
    gelu,
    load,
    reduce_scatter,
    relu,
    store,
    sum,
    update,
)
from penstock.step.program.lower import lower
from penstock.step.program.plan import Access, Plan, Task


@program
def momentum(g: P["n"], w: R["n"], m: R["n"], lr):
    g = all_reduce(g, "mean")
    m = update(m, 0.9 * m + g)
    return update(w, w - lr * m)


@program(axis="tp")
def mlp(x: R["t", "d"], w1: S(1)["d", "h"], w2: S(0)["h", "d"], b: R["d"]):
    h = gelu(x @ w1)
    y = all_reduce(h @ w2)
    return relu(y + b) + x


@program
def train(w: R["n"], m: R["n"], lr):
    x = load("data", S(0)["b", "n"])
    y = sum(x * w, 1, keep=True)
    g = all_reduce(sum(y * x, 0), "mean")
    m = update(m, 0.9 * m + g)
    return update(w, w - lr * m), store(m, "kept")


def sliced(made: Program) -> Program:
    return made.split("g").sink("g.gather").keep_sliced("m")


def schedules(ranks: int) -> list[Program]:
    plain = momentum.on(mesh(dp=ranks), n=11)
    step = sliced(plain)
    block = mlp.on(mesh(tp=ranks), t=7, d=3, h=5)
    whole = sliced(train.on(mesh(dp=ranks), b=5, n=6))
    return [
        plain,
        step,
        step.chunk(3, "g.scatter", "w.gather").overlap() if ranks < 4 else step,
        step.fuse("g.scatter", "w.gather").chunk(2).overlap(),
        block.chunk(3, "matmul.2", block.outputs[0]).overlap(),
        block.chunk(2, "matmul.1", block.outputs[0], dim=0).overlap(),
        whole,
        whole.rotate("w.gather").rotate("x", 2),
    ]


def inputs(made: Program) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    out: dict[str, Any] = {"lr": 0.1}
    for node in made.inputs:
        shape = node.type.shape
        if node.type.axes("P"):
            out[node.name] = [rng.normal(size=shape) for _ in range(made.mesh.num_ranks)]
        elif node.op == "input":
            out[node.name] = rng.normal(size=shape)
    return {name: value for name, value in out.items() if name in made}


SOURCES = {"data": lambda step: np.random.default_rng(step).normal(size=(5, 6))}


def differs(plan: Plan, want: Any, *, seed: int, iterations: int = 2) -> bool:
    """Whether a plan, carried out in some order, makes something else than its program says."""
    given = inputs(plan.program)
    got = run_in_any_order(plan, given, seed=seed, iterations=iterations, sources=SOURCES)
    pairs = [*zip(got.outputs, want.outputs, strict=True)]
    pairs += [(got.states[s], want.states[s]) for s in want.states]
    return not all(
        np.allclose(one, other, rtol=1e-10, atol=1e-12)
        for held, wanted in pairs
        for one, other in zip(held, wanted, strict=True)
    )


def meaning(made: Program, iterations: int = 2) -> Any:
    return interpret(made, inputs(made), iterations=iterations, sources=SOURCES)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_plans_of_schedules_pass_and_are_right_in_any_order(ranks: int) -> None:
    for made in schedules(ranks):
        plan = lower(made)
        check_plan(plan)
        want = meaning(made)
        assert not any(differs(plan, want, seed=seed) for seed in range(3)), str(made)


def without(plan: Plan, task: str, before: str) -> Plan:
    """Return a plan in which one task does not wait for another."""
    return replace(
        plan,
        tasks=tuple(
            replace(t, after=tuple(n for n in t.after if n != before)) if t.name == task else t
            for t in plan.tasks
        ),
    )


def refusal(plan: Plan) -> str:
    try:
        check_plan(plan)
    except ProgramError as error:
        return str(error)
    return ""


def test_what_is_refused_without_a_wait_is_what_can_go_wrong() -> None:
    """Each wait of each plan is left out; what passes all the same must be right in any order."""
    refused = wrong = passed = 0
    for made in schedules(2):
        plan, want = lower(made), meaning(made, 1)
        waits = [(task.name, name) for task in plan.tasks for name in task.after]
        for task, before in waits[:: max(1, len(waits) // 25)]:
            broken = without(plan, task, before)
            bad = any(differs(broken, want, seed=seed, iterations=1) for seed in range(4))
            reason = refusal(broken)
            if not reason:
                passed += 1
                assert not bad, f"{task} without {before} passed and goes wrong"
                continue
            refused += 1
            wrong += bad
            assert task in reason or before in reason
    assert passed
    assert refused
    # Not every order shows a race; most are shown by one of a few.
    assert wrong > refused / 2


# -- plans made by hand ------------------------------------------------------------------------


@program
def small(m: R["n"], x: R["n"]):
    y = relu(x)
    new = update(m, m + y)
    return new, m * 2.0


def task(name: str, *nodes: str, **more: Any) -> Task:
    reads = [Access(**a) if isinstance(a, dict) else Access(value=a) for a in more.pop("reads", ())]
    writes = [
        Access(**a) if isinstance(a, dict) else Access(value=a) for a in more.pop("writes", ())
    ]
    how = {"lane": "compute", "kind": "compute", **more}
    return Task(name=name, nodes=nodes, reads=tuple(reads), writes=tuple(writes), **how)


NEW = {"value": "new", "state": "m"}


def hand_made(*, add: tuple[str, ...], new: tuple[str, ...], old: tuple[str, ...]) -> Plan:
    made = small.on(mesh(dp=1), n=4)
    tasks = {
        "relu": task("relu", "y", reads=["x"], writes=["y"]),
        "add": task("add", "add.1", reads=["m", "y"], writes=["add.1"], after=add),
        "old": task("old", "mul.1", reads=["m"], writes=["mul.1"], after=old),
        "new": task("new", "new", reads=["m", "add.1"], writes=[NEW], after=new),
    }
    order = ["relu", "add", *(["old", "new"] if "old" in new else ["new", "old"])]
    return Plan(program=made, tasks=tuple(tasks[name] for name in order))


def test_a_plan_made_by_hand_passes() -> None:
    plan = hand_made(add=("relu",), new=("add", "old"), old=())
    check_plan(plan)
    assert not differs(plan, meaning(plan.program), seed=1)


def test_reading_what_is_not_waited_for_is_a_race() -> None:
    with pytest.raises(ProgramError, match="add reads y, which relu writes, and does not wait"):
        check_plan(hand_made(add=(), new=("add", "old"), old=()))


def test_a_state_is_not_written_while_somebody_reads_it() -> None:
    with pytest.raises(ProgramError, match="old reads m while new may be writing new over it"):
        check_plan(hand_made(add=("relu",), new=("add",), old=()))


def test_a_state_is_not_read_after_it_was_written_over() -> None:
    with pytest.raises(ProgramError, match="old reads m after new has written new over it"):
        check_plan(hand_made(add=("relu",), new=("add",), old=("new",)))


def test_what_nobody_writes_is_not_read_and_not_returned() -> None:
    plan = hand_made(add=("relu",), new=("add", "old"), old=())
    tasks = {t.name: t for t in plan.tasks}
    left = replace(plan, tasks=(tasks["old"], replace(tasks["add"], after=())))
    with pytest.raises(ProgramError, match="add reads y, which no task writes"):
        check_plan(left)
    with pytest.raises(ProgramError, match="no task writes new, a result of program small"):
        check_plan(replace(plan, tasks=tuple(t for t in plan.tasks if t.name != "new")))


def test_a_state_is_not_returned_as_it_was_before_its_update() -> None:
    plan = hand_made(add=("relu",), new=("add", "old"), old=())
    kept = replace(plan.program, outputs=("m", "mul.1"))
    with pytest.raises(ProgramError, match="returns m, over which new has written new"):
        check_plan(replace(plan, program=kept))


def test_two_tasks_do_not_write_the_same_at_once() -> None:
    plan = hand_made(add=("relu",), new=("add", "old"), old=())
    again = replace(plan.by_name["relu"], name="again")
    with pytest.raises(ProgramError, match="relu and again both write y"):
        check_plan(replace(plan, tasks=(plan.tasks[0], again, *plan.tasks[1:])))


def test_chunks_of_one_region_are_apart_and_a_missing_one_is_missed() -> None:
    made = mlp.on(mesh(tp=2), t=6, d=3, h=4)
    made = made.chunk(3, "matmul.2", made.outputs[0]).overlap()
    plan = lower(made)
    check_plan(plan)
    gone = tuple(t for t in plan.tasks if t.name != "y[1]")
    kept = tuple(replace(t, after=tuple(n for n in t.after if n != "y[1]")) for t in gone)
    with pytest.raises(ProgramError, match=r"reads chunk 1 of y, which no task writes"):
        check_plan(replace(plan, tasks=kept))


def test_a_task_does_not_write_over_what_it_still_reads() -> None:
    @program
    def squared(m: R["n", "n"]):
        return update(m, m @ m)

    made = squared.on(mesh(dp=1), n=3)
    both = task("both", "matmul.1", reads=["m"], writes=[{"value": "matmul.1", "state": "m"}])
    new = task("new", "update.1", reads=["matmul.1"], writes=[{"value": "update.1", "state": "m"}])
    plan = Plan(program=made, tasks=(both, replace(new, after=("both",))))
    with pytest.raises(ProgramError, match="still reads other elements"):
        check_plan(plan)


def test_what_is_done_ahead_reads_nothing_of_its_own_iteration() -> None:
    made = sliced(train.on(mesh(dp=2), b=4, n=6)).rotate("w.gather").rotate("x")
    plan = lower(made)
    check_plan(plan)
    early = tuple(replace(t, ahead=1) if t.name == "mul.1" else t for t in plan.tasks)
    check_plan(replace(plan, tasks=early))
    early = tuple(replace(t, ahead=1) if t.name == "g.scatter" else t for t in plan.tasks)
    with pytest.raises(ProgramError, match=r"g\.scatter is 1 iterations ahead and reads"):
        check_plan(replace(plan, tasks=early))
    early = tuple(replace(t, ahead=2) if t.name == "w.gather" else t for t in plan.tasks)
    with pytest.raises(ProgramError, match="which every iteration changes"):
        check_plan(replace(plan, tasks=early))


# -- orders and memory -------------------------------------------------------------------------


@program
def two_moves(a: P["n"], b: P["n"]):
    first = all_reduce(a)
    second = reduce_scatter(b)
    return all_gather(second + first), first


def test_lanes_that_wait_for_each_other_are_refused() -> None:
    plan = lower(two_moves.on(mesh(dp=2), n=4))
    check_plan(plan)
    check_orders(plan, {"net:dp": ["first", "second"]})
    with pytest.raises(ProgramError, match="all ranks would wait for ever"):
        check_orders(plan, {"net:dp": ["second", "first"]})
    with pytest.raises(ProgramError, match="every task has one place"):
        check_orders(plan, {"net:dp": ["first"]})
