"""Fused tasks over sockets: moves together, and one pass over memory between them."""

from __future__ import annotations

from tests.step.programs import adam

import penstock.step as ps
from penstock.step.fusing import _runs


def runs(made: ps.Program) -> list[tuple[bool, tuple[str, ...]]]:
    return _runs(made, made.regions[-1].nodes)


def test_what_does_not_need_the_gradient_is_computed_with_what_does() -> None:
    made = adam.on(ps.mesh(dp=2), n=8).split("g").sink("g.gather").keep_sliced("m", "v")
    scatter, compute, gather, end = runs(made.fuse("g.scatter", "w.gather"))
    assert scatter == (True, ("g.scatter",))
    assert not compute[0]
    assert len(compute[1]) > 10
    assert gather == (True, ("w.gather",))
    assert end == (False, ("update.1",))


@ps.program
def two(g: ps.P["n"], h: ps.P["n"], w: ps.R["n"], u: ps.R["n"]):
    w = ps.update(w, w - ps.all_reduce(g))
    return w, ps.update(u, u - ps.all_reduce(h))


def test_moves_of_several_values_go_together() -> None:
    made = two.on(ps.mesh(dp=2), n=8)
    for name in ("all_reduce.1", "all_reduce.2"):
        made = made.split(name).sink(f"{name}.gather")
    scatters = [node.name for node in made.nodes if node.op == "reduce_scatter"]
    gathers = [node.name for node in made.nodes if node.op == "all_gather"]
    fused = made.fuse(*(node.name for node in made.nodes if node.inputs))
    moving = [nodes for is_moving, nodes in runs(fused) if is_moving]
    assert moving == [tuple(scatters), tuple(gathers)]
    assert len(runs(fused)) == 4


@ps.program
def old_values(g: ps.P["n"], w: ps.R["n"]):
    part = ps.reduce_scatter(g, dim=0)
    double = w * 2.0
    whole = ps.all_gather(part + w)
    return ps.update(w, whole), double


def test_old_values_are_read_before_a_gather_writes_over_them() -> None:
    made = old_values.on(ps.mesh(dp=2), n=8)
    gather = next(node for node in made.nodes if node.op == "all_gather")
    order = [name for _, nodes in _runs(made, tuple(made.by_name)[2:]) for name in nodes]
    assert order.index("double") < order.index(gather.name)
