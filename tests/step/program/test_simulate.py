"""Lanes in virtual time: order, sharing, what is ahead, and memory."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.step.program import P, Program, R, Region, S, language, mesh, program
from penstock.step.program.cost import Link, MachineCosts
from penstock.step.program.lower import lower
from penstock.step.program.plan import Access, Plan, Task
from penstock.step.program.simulate import simulate
from penstock.step.program.timeline import Timeline

FREE = MachineCosts(
    links=(("", Link(latency_s=0.0, bytes_s=1.0, cpu_s=0.0)),), memory_bytes_s=1.0, task_s=0.0
)
"""A byte on a wire or in memory takes a second."""


@program
def empty(x: R[1]):
    return x


@program(axis="tp")
def block(x: S(1)["t", 2048], w: S(0)[2048, "h"], b: R["h"], r: R["t", "h"], seed: int):
    y = language.all_reduce(x @ w)
    return language.dropout(y + b, 0.1, seed) + r


def _compute(name: str, size_bytes: int, *after: str, **more: object) -> Task:
    base = Task(name=name, lane="compute", nodes=(), kind="compute", touched_bytes=size_bytes)
    return replace(base, after=after, **more)


def _load(name: str, size_bytes: int, *after: str, **more: object) -> Task:
    base = Task(name=name, lane="io", nodes=(), kind="load", touched_bytes=size_bytes)
    return replace(base, after=after, **more)


def _timeline(tasks: Sequence[Task], costs: MachineCosts = FREE, **more: int) -> Timeline:
    made = Plan(program=empty.on(mesh(dp=1)), tasks=tuple(tasks))
    io = Link(latency_s=0.0, bytes_s=1.0, cpu_s=costs.io.cpu_s, wire="io")
    return simulate(made, replace(costs, io=io), **more)


def _ends(timeline: Timeline) -> dict[str, float]:
    return {span.task.name: round(span.end_s, 9) for span in timeline.spans}


def _chunked(made: Program, num_chunks: int) -> Program:
    names = tuple(n.name for n in made.nodes if n.inputs)
    dims = tuple((name, 0) for name in (*names, "x", "r"))
    cut = Region(name="c", kind="chunk", nodes=names, num_chunks=num_chunks, dims=dims)
    return replace(made, regions=(cut, Region(name="o", kind="overlap", nodes=names)))


# -- order -------------------------------------------------------------------------------------


def test_lanes_do_one_task_at_a_time_and_each_waits_for_what_it_needs() -> None:
    costs = replace(FREE, io=replace(FREE.io, cpu_s=0.0))
    timeline = _timeline([_load("a", 3), _compute("b", 2), _compute("c", 4, "a")], costs)
    assert _ends(timeline) == {"a": 3, "b": 2, "c": 7}
    assert timeline.step_s == pytest.approx(7)


def test_computation_takes_what_is_ready_and_among_that_the_most_urgent() -> None:
    costs = replace(FREE, io=replace(FREE.io, cpu_s=0.0))
    late = [_load("a", 5), _compute("b", 1, "a"), _compute("c", 2), _compute("d", 2, priority=-1)]
    assert _ends(_timeline(late, costs)) == {"a": 5, "d": 2, "c": 4, "b": 6}


def test_lanes_of_communication_keep_the_order_of_the_plan() -> None:
    @program
    def two(a: P[4], b: P[4]):
        return language.all_reduce(a * 2.0), language.all_reduce(b)

    names = tuple(n.name for n in two.on(mesh(dp=2)).nodes if n.inputs)
    made = replace(two.on(mesh(dp=2)), regions=(Region(name="o", kind="overlap", nodes=names),))
    timeline = simulate(lower(made), FREE)
    first, second = (s for s in timeline.spans if s.task.kind == "move")
    assert first.task.reads[0].value.startswith("mul")
    assert second.start_s >= first.end_s


def test_what_is_ahead_after_something_of_the_step_does_not_hold_up_its_lane() -> None:
    @program
    def held(w: R[1]):
        return language.update(w, w * 2.0)

    tasks = (
        replace(_compute("cast", 1, ahead=1), reads=(Access(value="w"),)),
        _load("gather", 1, "cast", ahead=1, lane="net:dp"),
        _load("scatter", 1, lane="net:dp"),
        replace(_compute("write", 1, "scatter"), writes=(Access(value="u", state="w"),)),
    )
    timeline = simulate(Plan(program=held.on(mesh(dp=1)), tasks=tasks), FREE)
    assert len(timeline.spans) == (len(timeline.ends_s) + 1) * 4


# -- sharing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("cores", "ends"), [(2.0, {"a": 10, "b": 10}), (1.0, {"a": 10, "b": 12})])
def test_communication_takes_processor_time_from_computation(
    cores: float, ends: dict[str, float]
) -> None:
    costs = replace(FREE, cores=cores, io=replace(FREE.io, cpu_s=0.2))
    assert _ends(_timeline([_load("a", 10), _compute("b", 10)], costs)) == ends


def test_computation_slows_communication_that_needs_half_a_core_and_more() -> None:
    costs = replace(FREE, io=replace(FREE.io, cpu_s=1.0))
    assert _ends(_timeline([_load("a", 10), _compute("b", 10)], costs)) == {"a": 20, "b": 20}


def test_two_lanes_on_one_wire_share_it() -> None:
    @program
    def two(a: P[4], b: S(0)[8]):
        return language.all_reduce(a), language.all_gather(b)

    made = two.on(mesh(dp=2))
    names = tuple(n.name for n in made.nodes if n.inputs)
    made = replace(made, regions=(Region(name="o", kind="overlap", nodes=names),))
    timeline = simulate(lower(made), FREE)
    assert len({span.task.lane for span in timeline.spans}) == 2
    assert [round(span.end_s, 6) for span in timeline.spans] == [32, 32]


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    cores=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_no_step_is_shorter_than_its_busiest_lane_or_longer_than_all_in_a_row(
    sizes: list[int], cores: float
) -> None:
    tasks: list[Task] = []
    for number, size in enumerate(sizes):
        make = _load if number % 2 else _compute
        after = (f"t{number - 2}",) if number > 1 and number % 3 == 0 else ()
        tasks.append(make(f"t{number}", size, *after))
    timeline = _timeline(tasks, replace(FREE, cores=cores, io=replace(FREE.io, cpu_s=0.3)))
    alone = max(sum(sizes[::2]), sum(sizes[1::2]))
    assert alone - 1e-6 <= timeline.step_s <= sum(sizes) / min(cores, 1.0) + 1e-6


# -- steps -------------------------------------------------------------------------------------


def test_what_is_loaded_a_step_ahead_is_hidden() -> None:
    costs = replace(FREE, io=replace(FREE.io, cpu_s=0.0))
    plain = _timeline([_load("a", 6), _compute("b", 10, "a")], costs)
    ahead = _timeline([_load("a", 6, ahead=1), _compute("b", 10, "a")], costs)
    assert plain.step_s == pytest.approx(16)
    assert ahead.step_s == pytest.approx(10)


def test_what_is_ahead_and_longer_than_a_step_sets_the_pace() -> None:
    costs = replace(FREE, io=replace(FREE.io, cpu_s=0.0))
    timeline = _timeline([_load("a", 16, ahead=2), _compute("b", 10, "a")], costs)
    assert timeline.step_s == pytest.approx(16)


def test_a_task_ahead_that_reads_a_state_waits_for_the_step_that_writes_it() -> None:
    @program
    def held(w: R[1]):
        return language.update(w, w * 2.0)

    made = held.on(mesh(dp=1))
    costs = replace(FREE, io=replace(FREE.io, cpu_s=0.0), links=FREE.links)
    tasks = (
        replace(_load("gather", 3, ahead=1), reads=(Access(value="w"),)),
        _compute("forward", 5),
        _compute("use", 2, "forward", "gather"),
        replace(_compute("write", 1, "use"), writes=(Access(value="u", state="w"),)),
    )
    io = Link(latency_s=0.0, bytes_s=1.0, cpu_s=0.0, wire="io")
    timeline = simulate(Plan(program=made, tasks=tasks), replace(costs, io=io))
    # Forward, which does not need it, hides it.
    assert timeline.step_s == pytest.approx(8)
    spans = {(s.step, s.task.name): s for s in timeline.spans}
    assert spans[2, "gather"].start_s == pytest.approx(spans[1, "write"].end_s)


def test_what_is_behind_lasts_into_the_next_step_and_no_further() -> None:
    costs = replace(FREE, io=replace(FREE.io, cpu_s=0.0))
    for size, step_s in ((6, 10), (16, 16)):
        late = _load("store", size, "b", kind="store", ahead=-1)
        timeline = _timeline([_compute("b", 10), late], costs)
        assert timeline.step_s == pytest.approx(step_s)


# -- what a timeline says ----------------------------------------------------------------------


def test_communication_is_exposed_where_nothing_is_computed() -> None:
    made = block.on(mesh(tp=2), t=64, h=32)
    apart = simulate(lower(made), MachineCosts())
    assert apart.exposed_s == pytest.approx(apart.communication_s)
    together = simulate(lower(_chunked(made, 4)), MachineCosts())
    assert together.exposed_s < together.communication_s


def test_memory_is_counted_while_values_are_needed() -> None:
    @program
    def chain(x: R["n"]):
        for _ in range(6):
            x = language.relu(x)
        return x

    # One is read and one is written.
    assert simulate(lower(chain.on(mesh(dp=1), n=100)), MachineCosts()).peak_bytes == 2 * 100 * 4


def test_chunks_need_less_memory_than_the_whole() -> None:
    made = block.on(mesh(tp=2), t=2048, h=1024)
    whole = simulate(lower(made), MachineCosts())
    chunks = simulate(lower(_chunked(made, 8)), MachineCosts())
    assert whole.peak_bytes == 2 * 2048 * 1024 * 4
    assert chunks.peak_bytes < whole.peak_bytes
    # x and w as one rank has them, b, r and the seed.
    assert whole.given_bytes == (2048 * 1024 + 1024 * 1024 + 1024 + 2048 * 1024) * 4 + 8


@pytest.mark.parametrize(
    ("num_chunks", "measured_ms"), [(1, 122.5), (2, 94.6), (4, 81.7), (8, 78.7), (16, 79.9)]
)
def test_predictions_are_near_what_was_measured_at_a_gigabit(
    num_chunks: int, measured_ms: float
) -> None:
    # Two ranks on one core each: product, all-reduce, bias, dropout and residual, in chunks.
    # A product of 46 ms and an all-reduce of 70 ms, measured alone, are all that it is told.
    costs = MachineCosts(
        links=(("tp", Link(latency_s=200e-6, bytes_s=8.39e6 / 0.070, cpu_s=0.3e-9)),),
        flops_s=2 * 2048 * 1024 * 1024 / 0.046,
    )
    made = block.on(mesh(tp=2), t=2048, h=1024)
    if num_chunks > 1:
        made = _chunked(made, num_chunks)
    assert simulate(lower(made), costs).step_s == pytest.approx(measured_ms / 1e3, rel=0.06)
