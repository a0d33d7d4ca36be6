"""Loads as lanes of the step: fetched, decoded and copied at once; stores that end well."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.step.loads.test_shared_wire import LARGE_BYTES, Flying
from tests.step.ranks import run_ranks

import penstock
import penstock.step as ps
from penstock.errors import ProgramError
from penstock.step.loads.shared_wire import Wire
from penstock.step.loads.sources import Source
from penstock.step.program.picture import Picture, picture_html
from penstock.step.program.plan import DECODE, FETCH

MEET_S = 20.0
"""How long a stage waits for the one that must be at work beside it."""


@ps.program
def running(total: ps.R["n"]):
    x = ps.load("data.x", ps.R["n"])
    return ps.update(total, total + x)


class Meeting:
    """A source whose stages wait for each other: batch k is decoded while k + 1 is fetched."""

    def __init__(self, num_batches: int) -> None:
        self._num_batches = num_batches
        self._both = threading.Barrier(2, timeout=MEET_S)
        self._next = 0
        self.is_closed = False

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it has stages")

    def stages(self, *, only_asked: bool) -> Meeting:
        assert not only_asked
        return self

    def fetch(self) -> int:
        number, self._next = self._next, self._next + 1
        if number >= self._num_batches:
            raise StopIteration
        if number:
            self._both.wait()
        return number

    def decode(self, fetched: int) -> dict[str, Any]:
        if fetched + 1 < self._num_batches:
            self._both.wait()
        return {"x": np.full(2, fetched, np.float32)}

    def close(self) -> None:
        self.is_closed = True


def test_a_batch_is_decoded_while_the_next_is_fetched() -> None:
    program = running.on(ps.mesh(dp=1), n=2).rotate("x", 2)
    source, total = Meeting(5), torch.zeros(2)
    seen, pictures = [], []
    with (
        ps.Groups(program.mesh) as groups,
        ps.compile(program, groups, sources={"data": source}) as step,
    ):
        lanes = [(task.name, task.lane) for task in step.plan.tasks]
        assert lanes[:2] == [("x.fetch", FETCH), ("x", DECODE)]
        step.keeps_times = True
        for _ in range(5 - 2):
            step(total=total)
            seen += step.times
            pictures.append(Picture(name="x", timeline=step.timeline()))
        for _ in range(2):
            step(total=total)
        with pytest.raises(ProgramError, match="no more batches"):
            step(total=total)
    assert total.tolist() == [10.0, 10.0]
    assert source.is_closed
    spans = {(lived.lane, lived.task) for lived in seen if lived.lane in (FETCH, DECODE)}
    assert spans == {(FETCH, "x.fetch"), (DECODE, "x")}
    assert max(lived.ahead for lived in seen) > 0
    # The first batch is waited for: it was fetched in the first step.
    assert "x.fetch" in picture_html(pictures[:1], "the first step")


@pytest.mark.parametrize("workers", ["here", 1])
@pytest.mark.parametrize("over", [None, Wire()])
def test_a_loader_gives_a_step_the_batches_of_the_loop(
    tmp_path: Path, over: Wire | None, workers: Any
) -> None:
    np.save(tmp_path / "rows.npy", np.arange(24 * 16, dtype=np.float32).reshape(24, 16))
    dataset = penstock.open(tmp_path)
    options: dict[str, Any] = {"batch_size": 4, "seed": 5, "shuffle": "global"}
    expected = [batch["data"].clone() for batch in penstock.Loader(dataset, **options)]

    @ps.program
    def taken(n: ps.R[1]):
        x = ps.load("train.data", ps.R[4, 16])
        return x * 1.0, ps.update(n, n + 1.0)

    program = taken.on(ps.mesh(dp=1)).rotate("x", 2)
    with (
        penstock.Loader(dataset, workers=workers, **options) as loader,
        ps.Groups(program.mesh, over=over) as groups,
        ps.compile(program, groups, sources={"train": loader}) as step,
    ):
        step.keeps_times = True
        found, lanes = [], set()
        for _ in expected:
            found.append(step(n=torch.zeros(1))[0].clone())
            lanes |= {lived.lane for lived in step.times}
        assert DECODE in lanes
    assert len(found) == 6
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


class Counting:
    """A source in stages that does nothing but count."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.num_fetched = self.num_decoded = 0

    def stages(self, *, only_asked: bool) -> Counting:
        self.only_asked = only_asked
        return self

    def fetch(self) -> int:
        self.num_fetched += 1
        return self.num_fetched

    def decode(self, fetched: int) -> torch.Tensor:
        with self._changed:
            self.num_decoded += 1
            self._changed.notify_all()
        return torch.full((2,), float(fetched))

    def decodes(self, number: int, within_s: float = MEET_S) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.num_decoded >= number, within_s)

    def close(self) -> None: ...


@pytest.mark.parametrize("goes_first", [False, True])
def test_only_fetching_makes_way_for_communication(goes_first: bool) -> None:
    wire, batches, under_way = Wire(), Counting(), Flying()
    wire.begun(under_way, LARGE_BYTES)
    source = Source("data", batches, torch.device("cpu"), wire)
    source.want("x", "", 3, goes_first=goes_first)
    source.ask("x")
    # The one that is needed and one more are urgent; they are decoded though the wire is busy.
    assert batches.decodes(2)
    assert source.stage("x", "decode").result(MEET_S)["fields"][""].tolist() == [1.0, 1.0]
    assert batches.decodes(3, within_s=MEET_S if goes_first else 0.1) == goes_first
    assert wire.num_held == (not goes_first)
    under_way.land()
    assert batches.decodes(4)
    assert batches.only_asked
    assert source.take("x").tolist() == [1.0, 1.0]
    source.close()


def sums_that_wait(rank: int, size: int) -> int:
    """Return how often loads were held that are said to go before sums."""

    @ps.program
    def step(w: ps.R["n"]):
        x = ps.load("train.x", ps.P["n"])
        g = ps.all_reduce(x)
        return ps.update(w, w + g)

    program = step.on(ps.mesh(dp=size), n=LARGE_BYTES // 4).rotate("x", 2).priority("x", -1)
    wire, w = Wire(), torch.zeros(LARGE_BYTES // 4)
    batches = ({"x": np.full(LARGE_BYTES // 4, i, np.float32)} for i in range(8))
    with (
        ps.Groups(program.mesh, over=wire) as groups,
        ps.compile(program, groups, sources={"train": batches}) as compiled,
    ):
        for _ in range(6):
            compiled(w=w)
    assert w.unique().tolist() == [size * 15.0]
    return wire.num_held


def test_a_load_of_a_smaller_priority_goes_before_sums() -> None:
    assert run_ranks(sums_that_wait, 2) == [0, 0]


def test_an_error_of_a_stage_ends_the_step() -> None:
    class Bad(Meeting):
        def decode(self, fetched: int) -> dict[str, Any]:
            raise ValueError("not a picture")

    program = running.on(ps.mesh(dp=1), n=2)
    with (
        ps.Groups(program.mesh) as groups,
        ps.compile(program, groups, sources={"data": Bad(1)}) as step,
    ):
        with pytest.raises(ValueError, match="not a picture"):
            step(total=torch.zeros(2))
        with pytest.raises(ProgramError, match="earlier step"):
            step(total=torch.zeros(2))


# -- stores and the end ------------------------------------------------------------------------


@ps.program
def two_stores(a: ps.R["n"], b: ps.R["n"]):
    a = ps.update(a, a + 1.0)
    b = ps.update(b, b + 2.0)
    return ps.store(a * 1.0, "first"), ps.store(b * 1.0, "second")


def stores_of(program: ps.Program) -> list[str]:
    return [node.name for node in program.nodes if node.op == "store"]


def test_two_stores_of_a_value_last_into_the_next_iteration_at_once() -> None:
    @ps.program
    def twice(a: ps.R["n"], b: ps.R["n"]):
        a = ps.update(a, a + 1.0)
        new = a * 2.0
        return ps.store(new, "first"), ps.store(new, "second"), b * 2.0

    program = twice.on(ps.mesh(dp=1), n=3)
    first, second = stores_of(program)
    chosen = program.rotate(first).rotate(second)
    chosen = chosen.overlap(*(node.name for node in chosen.nodes if node.inputs))
    kept: dict[str, list[float]] = {"first": [], "second": []}
    calls = {name: lambda x, to=to: to.append(float(x[0])) for name, to in kept.items()}
    with ps.Groups(program.mesh) as groups, ps.compile(chosen, groups, calls=calls) as step:
        a = torch.zeros(3)
        for _ in range(50):
            step(a=a, b=a)
    assert kept == {name: [2.0 * i for i in range(1, 51)] for name in kept}


def test_what_is_stored_is_the_functions_to_keep_under_every_schedule() -> None:
    @ps.program
    def kept(a: ps.R["n"]):
        a = ps.update(a, a + 1.0)
        return ps.store(a, "place")

    program = kept.on(ps.mesh(dp=1), n=3)
    for chosen in (program, program.rotate(stores_of(program)[0])):
        found: list[torch.Tensor] = []
        a = torch.zeros(3)
        with (
            ps.Groups(program.mesh) as groups,
            ps.compile(chosen, groups, calls={"place": lambda x, to=found: to.append(x)}) as step,
        ):
            for _ in range(3):
                step(a=a)
        assert [float(one[0]) for one in found] == [1.0, 2.0, 3.0]
        found[-1].zero_()
        assert a.tolist() == [3.0] * 3


def test_a_store_that_failed_is_told_once_and_threads_end() -> None:
    program = two_stores.on(ps.mesh(dp=1), n=3)
    first, _ = stores_of(program)

    def full(x: torch.Tensor) -> None:
        raise OSError("disk full")

    with ps.Groups(program.mesh) as groups:
        before = {thread.name for thread in threading.enumerate()}
        calls = {"first": full, "second": lambda x: None}
        step = ps.compile(program.rotate(first), groups, calls=calls)
        step(a=torch.zeros(3), b=torch.zeros(3))
        with pytest.raises(OSError, match="disk full"):
            step.close()
        assert {thread.name for thread in threading.enumerate()} <= before
        step.close()
        with pytest.raises(ProgramError, match="is closed; compile"):
            step(a=torch.zeros(3), b=torch.zeros(3))


def sliced_stores(rank: int, size: int) -> list[list[float]]:
    @ps.program
    def kept(g: ps.P["n"], m: ps.R["n"]):
        g = ps.all_reduce(g)
        m = ps.update(m, m + g)
        return ps.store(m, "shard")

    program = kept.on(ps.mesh(dp=size), n=6).split("g").sink("g.gather").keep_sliced("m")
    chosen = program.rotate(stores_of(program)[0])
    out: list[list[float]] = []
    m = torch.zeros(program["m"].type.local_shape(program.mesh, rank))
    calls = {"shard": lambda x: out.append(x.tolist())}
    with ps.Groups(program.mesh) as groups, ps.compile(chosen, groups, calls=calls) as step:
        for _ in range(2):
            step(g=torch.arange(6.0) + rank, m=m)
    return out


def test_each_rank_stores_its_shard_once_an_iteration() -> None:
    both = run_ranks(sliced_stores, 2)
    assert both[0] == [[1.0, 3.0, 5.0], [2.0, 6.0, 10.0]]
    assert both[1] == [[7.0, 9.0, 11.0], [14.0, 18.0, 22.0]]
