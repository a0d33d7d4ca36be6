"""Bytes of moves are those of the table, and those that the elements themselves tell."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ProgramError
from penstock.step.program import L, P, Program, R, Region, S, language, mesh, program
from penstock.step.program.bytes import held_bytes, sent_bytes, sent_together
from penstock.step.program.chunks import chunk_places


@program
def moves(g: P["n", 3], x: S(0)["n", 3], y: R["n", 3], z: L["n", 3]):
    total = language.all_reduce(g)
    part = language.reduce_scatter(g)
    full = language.all_gather(x)
    turned = language.all_to_all(x, 1)
    one = language.reduce(g, root=0)
    given = language.broadcast(z)
    following = language.send(y)
    return total, part, full, turned, one, given, following


def _of(made: Program, op: str, **attrs: object) -> list[int]:
    node = next(n for n in made.nodes if n.op == op).with_attrs(**attrs)
    return [sent_bytes(node, made, rank) for rank in range(made.mesh.num_ranks)]


def test_even_parts_send_what_the_table_says() -> None:
    made = moves.on(mesh(dp=4), n=8)
    size = 8 * 3 * 4
    assert _of(made, "all_reduce") == [size * 3 // 2] * 4
    assert _of(made, "reduce_scatter") == [size * 3 // 4] * 4
    assert _of(made, "all_gather") == [size * 3 // 4] * 4
    assert _of(made, "reduce") == [0, size, size, size]
    assert _of(made, "broadcast") == [size, size, size, 0]
    assert _of(made, "send") == [size, size, size, 0]


def test_what_is_turned_sends_a_part_of_each_part() -> None:
    made = moves.on(mesh(dp=3), n=9)
    assert _of(made, "all_to_all") == [9 * 3 * 4 * 2 // 9] * 3


def test_a_wire_of_half_the_size_sends_half() -> None:
    made = moves.on(mesh(dp=2), n=8)
    for op in ("all_reduce", "reduce_scatter", "all_gather"):
        assert [2 * sent for sent in _of(made, op, wire="bf16")] == _of(made, op)


@given(n=st.integers(1, 40), num_ranks=st.sampled_from([2, 3, 4, 8]))
def test_all_ranks_together_send_the_same_by_any_algorithm(n: int, num_ranks: int) -> None:
    made = moves.on(mesh(dp=num_ranks), n=n)
    for op in ("all_reduce", "reduce_scatter", "all_gather"):
        assert sum(_of(made, op)) == sum(_of(made, op, algo="ring"))
    assert sum(_of(made, "reduce_scatter")) == (num_ranks - 1) * n * 12


@given(n=st.integers(1, 40), chunks=st.integers(1, 5), num_ranks=st.sampled_from([2, 3, 4]))
def test_chunks_have_the_elements_that_the_interpreter_moves(
    n: int, chunks: int, num_ranks: int
) -> None:
    made = moves.on(mesh(dp=num_ranks), n=n)
    scatter = next(node for node in made.nodes if node.op == "reduce_scatter")
    gather = next(node for node in made.nodes if node.op == "all_gather")
    region = Region(
        name="cut",
        kind="chunk",
        nodes=(scatter.name, gather.name),
        num_chunks=chunks,
        dims=(("g", 0), (scatter.name, 0), ("x", 0), (gather.name, 0)),
        axis="dp",
    )
    cut = replace(made, regions=(region,))
    for rank in range(num_ranks):
        for node in (scatter, gather):
            in_chunks = [sent_bytes(node, cut, rank, chunk) for chunk in range(chunks)]
            assert sum(in_chunks) == sent_bytes(node, cut, rank)
        for chunk in range(chunks):
            at = chunk_places(
                region, scatter.name, scatter.type, mesh=cut.mesh, rank=rank, chunk=chunk
            )
            size = 4 * np.prod([len(places) for places in at])
            assert held_bytes(scatter.name, cut, rank, chunk) == size


def test_sums_in_one_memory_are_cut_as_one() -> None:
    @program
    def two(a: P[3], b: P[5]):
        return language.all_reduce(a), language.all_reduce(b)

    made = two.on(mesh(dp=4))
    nodes = [n for n in made.nodes if n.op == "all_reduce"]
    assert sent_together(nodes, made) == 2 * 3 * 8 * 4 // 4
    assert sum(sent_bytes(node, made) for node in nodes) > sent_together(nodes, made)


def test_an_axis_of_one_rank_sends_nothing() -> None:
    made = moves.on(mesh(dp=1), n=8)
    ops = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send")
    assert all(_of(made, op) == [0] for op in ops)


def test_other_axes_make_the_value_smaller() -> None:
    @program(axis="dp")
    def sliced(g: (P.over("dp") & S(0).over("tp"))["n"]):
        return language.all_reduce(g, axis="dp")

    made = sliced.on(mesh(dp=2, tp=2), n=8)
    assert _of(made, "all_reduce") == [16] * 4


def test_what_does_not_move_is_refused() -> None:
    made = moves.on(mesh(dp=2), n=8)
    with pytest.raises(ProgramError, match="sends nothing"):
        sent_bytes(made["g"], made)
    with pytest.raises(ProgramError, match="in no region"):
        held_bytes("g", made, 0, 1)
