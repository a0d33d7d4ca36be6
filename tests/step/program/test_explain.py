"""What is said of a plan: bytes, times, memory, and what is approximate."""

from dataclasses import replace

import pytest

from penstock.step.program import L, P, Program, R, Region, Type, language, mesh, program
from penstock.step.program.bytes import sent_bytes
from penstock.step.program.cost import Link, MachineCosts, work_of
from penstock.step.program.explain import WIDTH, explain
from penstock.step.program.lower import lower


@program
def step(g: P["n"], h: P["n"], w: R["n"]):
    scaled = h * 2.0
    (x,) = language.call("forward", w, outs=(Type(shape=(1000,)),))
    total = language.all_reduce(g)
    other = language.all_reduce(scaled)
    return language.update(w, w - total * other + x)


@program
def momentum(g: P["n"], w: R["n"], lr):
    sum = language.all_reduce(g, "mean")
    return language.update(w, w - lr * sum)


def _made(**attrs: str) -> Program:
    made = step.on(mesh(dp=2), n=1000)
    nodes = [n.with_attrs(**attrs) if n.op == "all_reduce" else n for n in made.nodes]
    return made.with_nodes(nodes)


def test_it_says_what_each_lane_sends_and_how_long_it_takes() -> None:
    said = explain(_made())
    text = str(said)
    assert "net:dp" in text
    assert "8 kB" in text
    assert f"plan {lower(_made()).digest[:12]}" in text
    assert "In short" in text
    assert max(map(len, text.splitlines())) <= WIDTH


@program
def both_ways(x: L["n"]):
    return language.broadcast(x, root=0) + language.broadcast(x * 2.0, root=1)


def test_bytes_are_those_of_one_rank_and_not_of_whoever_sends_most_each_time() -> None:
    said = explain(both_ways.on(mesh(dp=2), n=1000))
    assert said.plan.sent_bytes() == {"net:dp": 8000}
    assert said.sent_bytes == {"net:dp": 4000}
    assert "4 kB" in str(said)
    made = momentum.on(mesh(dp=3), n=1003)
    cut = made.chunk(4, "sum", *(node.name for node in made.nodes[-4:] if node.type.ndim))
    each = [
        sum(sent_bytes(cut["sum"], cut, rank, chunk) for chunk in range(4)) for rank in range(3)
    ]
    assert explain(cut).sent_bytes == {"net:dp": max(each)}


def test_a_program_and_its_plan_are_explained_alike() -> None:
    assert str(explain(_made())) == str(explain(lower(_made())))


def test_what_nobody_measured_is_said() -> None:
    assert "not measured: forward" in str(explain(_made()))
    known = MachineCosts(calls=(("forward", 0.1),), measured="here, today")
    assert "nobody" not in str(explain(_made(), known))


def test_approximate_wires_are_named() -> None:
    assert "approximate" not in str(explain(_made()))
    said = explain(_made(wire="bf16"))
    assert len(said.approximate) == 2
    assert "on a wire of bf16" in str(said)


def test_overlap_is_a_share_of_what_could_be_hidden() -> None:
    made = _made()
    costs = MachineCosts(links=(("dp", Link(bytes_s=1e6, cpu_s=0.0)),), calls=(("forward", 0.01),))
    assert explain(made, costs).overlap_share == pytest.approx(0.0)
    names = tuple(n.name for n in made.nodes if n.op in ("call", "all_reduce", "mul"))
    together = replace(made, regions=(Region(name="o", kind="overlap", nodes=names),))
    hidden = explain(together, costs).overlap_share
    assert hidden == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("cores", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("num_chunks", [2, 16])
def test_a_step_lies_between_all_hidden_and_nothing_hidden(num_chunks: int, cores: float) -> None:
    # Two lanes on one wire, latencies under each other's bytes: as in the tutorial.
    made = momentum.on(mesh(dp=4), n=1 << 20).split("sum").sink("sum.gather")
    plain = explain(made, MachineCosts(cores=cores))
    assert plain.step_s == pytest.approx(plain.one_after_the_other_s)
    cut = made.chunk(num_chunks, "sum.scatter", "w.gather").overlap()
    said = explain(cut, MachineCosts(cores=cores))
    assert len([lane for lane in said.plan.lanes if lane.startswith("net:")]) == 2
    assert 0.0 < said.ideal_s <= said.step_s <= said.one_after_the_other_s
    wires = [work_of(task, said.plan, said.costs) for task in said.plan.tasks if task.sent_bytes]
    sent_s = sum(work.seconds * work.wire_share for work in wires)
    assert sent_s <= said.ideal_s * (1 + 1e-9)
    share = said.overlap_share
    assert share is None or 0.0 <= share <= 1.0


def test_chunks_of_a_task_are_one_line() -> None:
    made = _made()
    names = tuple(n.name for n in made.nodes if n.op == "mul" and n.inputs[0] == "h")
    cut = Region(name="c", kind="chunk", nodes=names, num_chunks=5, dims=((names[0], 0), ("h", 0)))
    assert f"{names[0]} ×5" in str(explain(replace(made, regions=(cut,))))
