"""What is said of a plan: bytes, times, memory, and what is approximate."""

from dataclasses import replace

import pytest

from penstock.program import P, Program, R, Region, Type, language, mesh, program
from penstock.program.cost import Costs, Link
from penstock.program.explain import WIDTH, explain
from penstock.program.lower import lower


@program
def step(g: P["n"], h: P["n"], w: R["n"]):
    scaled = h * 2.0
    (x,) = language.call("forward", w, outs=(Type(shape=(1000,)),))
    total = language.all_reduce(g)
    other = language.all_reduce(scaled)
    return language.update(w, w - total * other + x)


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


def test_a_program_and_its_plan_are_explained_alike() -> None:
    assert str(explain(_made())) == str(explain(lower(_made())))


def test_what_nobody_measured_is_said() -> None:
    assert "nobody has measured forward" in str(explain(_made()))
    known = Costs(calls=(("forward", 0.1),), measured="here, today")
    assert "nobody" not in str(explain(_made(), known))


def test_approximate_wires_are_named() -> None:
    assert "approximate" not in str(explain(_made()))
    said = explain(_made(wire="bf16"))
    assert len(said.approximate) == 2
    assert "on a wire of bf16" in str(said)


def test_overlap_is_a_share_of_what_could_be_hidden() -> None:
    made = _made()
    costs = Costs(links=(("dp", Link(bytes_s=1e6, cpu_s=0.0)),), calls=(("forward", 0.01),))
    assert explain(made, costs).overlap_share == pytest.approx(0.0)
    names = tuple(n.name for n in made.nodes if n.op in ("call", "all_reduce", "mul"))
    together = replace(made, regions=(Region(name="o", kind="overlap", nodes=names),))
    hidden = explain(together, costs).overlap_share
    assert hidden == pytest.approx(1.0, abs=0.01)


def test_chunks_of_a_task_are_one_line() -> None:
    made = _made()
    names = tuple(n.name for n in made.nodes if n.op == "mul" and n.inputs[0] == "h")
    cut = Region(name="c", kind="chunk", nodes=names, num_chunks=5, dims=((names[0], 0), ("h", 0)))
    assert f"{names[0]} ×5" in str(explain(replace(made, regions=(cut,))))
