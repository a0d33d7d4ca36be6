"""What a source is told and asked: a state that loses nothing, errors with names, an end."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock
import penstock.step as ps
from penstock.errors import ProgramError, StateError
from penstock.step.loads import sources as loading
from penstock.step.loads.shared_wire import Wire

BATCH, NUM_BATCHES = 4, 8
LoaderOf = Callable[[penstock.Dataset], penstock.Loader]


@pytest.fixture
def dataset(tmp_path: Path) -> penstock.Dataset:
    rows = np.arange(BATCH * NUM_BATCHES, dtype=np.float32).reshape(-1, 1)
    np.save(tmp_path / "rows.npy", rows)
    return penstock.open(tmp_path)


@pytest.fixture(params=["here", 1])
def loader_of(request: pytest.FixtureRequest) -> LoaderOf:
    """A loader whose batches are made in this process, and one that has an engine."""
    options: dict[str, Any] = {"batch_size": BATCH, "seed": 7, "shuffle": "global", "epochs": 1}
    return lambda dataset: penstock.Loader(dataset, workers=request.param, **options)


def loading_program(*names: str, ahead: int = 0) -> ps.Program:
    @ps.program
    def loads():
        x = ps.load(names[0], ps.R[BATCH, 1])
        y = ps.load(names[-1], ps.R[BATCH, 1])
        return x * 1.0, y * 1.0

    made = loads.on(ps.mesh(dp=1))
    # One of them asks for its batches earlier than the other one.
    return made.rotate("x", ahead) if ahead else made


@ps.program
def returning():
    x = ps.load("data.x", ps.R[BATCH, 1])
    return x, x * 1.0


def taken(program: ps.Program, sources: dict[str, Any], num_steps: int) -> list[list[float]]:
    """Return the first load of each step."""
    with ps.Groups(program.mesh) as groups, ps.compile(program, groups, sources=sources) as step:
        return [step()[0].flatten().tolist() for _ in range(num_steps)]


@pytest.mark.parametrize("ahead", [0, 2])
def test_what_is_ahead_of_a_step_is_not_lost_when_a_loader_is_resumed(
    dataset: penstock.Dataset, loader_of: LoaderOf, ahead: int
) -> None:
    expected = [batch["data"].flatten().tolist() for batch in loader_of(dataset)]
    program = loading_program("data.data", ahead=ahead)
    with loader_of(dataset) as loader:
        found = taken(program, {"data": loader}, 3)
        state = loader.state_dict()
        assert loader.stats().batches == 3
    with loader_of(dataset) as again:
        again.load_state_dict(state)
        found += taken(program, {"data": again}, NUM_BATCHES - 3)
        assert found == expected
        # That was the epoch: the next step begins another one.
        assert again.epoch == 1
        assert taken(program, {"data": again}, 1) != expected[:1]


def test_an_epoch_whose_last_batches_were_only_ahead_is_not_done(
    dataset: penstock.Dataset, loader_of: LoaderOf
) -> None:
    program = loading_program("data.data", ahead=2)
    with loader_of(dataset) as loader:
        found = taken(program, {"data": loader}, NUM_BATCHES - 1)
        assert loader.epoch == 0
        assert taken(program, {"data": loader}, 1) == found[:1]


def test_batches_that_a_wire_has_taken_ahead_are_not_lost(
    dataset: penstock.Dataset, loader_of: LoaderOf
) -> None:
    expected = [batch["data"].flatten().tolist() for batch in loader_of(dataset)]
    with loader_of(dataset) as loader, Wire().ahead(loader, batches_ahead=3) as batches:
        found = [next(batches)["data"].flatten().tolist() for _ in range(2)]
        while len(batches._queue.ready) != 3:  # They are there, and nobody has them.
            threading.Event().wait(0.01)
        state = loader.state_dict()
    with loader_of(dataset) as again:
        again.load_state_dict(state)
        found += [batch["data"].flatten().tolist() for batch in again]
    assert found == expected


def test_a_loader_that_goes_elsewhere_stays_there(
    dataset: penstock.Dataset, loader_of: LoaderOf
) -> None:
    with loader_of(dataset) as loader:
        stages = loader.stages()
        first = loader.state_dict()
        for _ in range(2):
            stages.decode(stages.fetch())
        loader.load_state_dict(first)
        stages.used()
        assert loader.state_dict() == first
        with pytest.raises(StateError, match="a Loader of its own"):
            stages.decode(stages.fetch())


def zeros(length: int = BATCH) -> Any:
    return np.zeros((length, 1), np.float32)


@pytest.mark.parametrize(
    ("batch", "name", "said"),
    [
        ({"x": zeros(), "z": zeros()}, "data.y", r"data\.y: .*'data' is a dict with x, z"),
        ((zeros(),), "data.x", r"tuple of 1 without names; load data\.0 .* a dict with 'x'"),
        ([zeros()], "data.1", "list of 1 without names"),
        ({"x": zeros(3)}, "data.x", r"load of data\.x: .*\(3, 1\), should be \(4, 1\); .* short"),
        ({"x": {"a": 1}}, "data.x", r"data\.x: no tensor can be made of the dict"),
        ({"x": zeros()}, "data", "load of data: no tensor can be made of the dict"),
    ],
)
def test_what_cannot_be_loaded_is_told_by_name(batch: Any, name: str, said: str) -> None:
    with pytest.raises(ProgramError, match=said):
        taken(loading_program(name), {"data": [batch]}, 1)


def test_what_is_no_source_is_refused(dataset: penstock.Dataset, loader_of: LoaderOf) -> None:
    program, once = loading_program("a.data", "b.data"), iter([{"data": zeros()}] * 3)
    with loader_of(dataset) as loader:
        for one in (loader, once):
            with pytest.raises(ProgramError, match="sources 'a' and 'b' are one"):
                taken(program, {"a": one, "b": one}, 1)
    several = [{"data": zeros()}]
    assert taken(program, {"a": several, "b": several}, 1) == [[0.0] * BATCH]
    with pytest.raises(ProgramError, match="'data' is a function; give something that yields"):
        taken(loading_program("data.x"), {"data": lambda: several}, 1)

    class Bad:
        def __iter__(self) -> Iterator[Any]:
            raise TypeError("cannot pickle it")

    with pytest.raises(TypeError, match="cannot pickle it"):
        taken(loading_program("data.x"), {"data": Bad()}, 1)


def test_a_source_may_use_its_memory_again() -> None:
    def same() -> Iterator[dict[str, Any]]:
        room = zeros()
        for number in range(8):
            room[:] = number
            yield {"x": room}

    found = taken(loading_program("data.x", ahead=2), {"data": same()}, 5)
    assert [one[0] for one in found] == [0.0, 1.0, 2.0, 3.0, 4.0]
    # What a step returns is the caller's to keep, and what was looked at is still to be taken.
    with ps.Groups(ps.mesh(dp=1)) as groups:
        step = ps.compile(returning.on(groups.mesh), groups, sources={"data": same()})
        kept = [step()[0] for _ in range(3)]
        sources = step.hand_over()
        sources["data"].looked_at()
        ahead = returning.on(groups.mesh).rotate("x", 2)
        with ps.compile(ahead, groups, sources=sources) as other:
            kept += [other()[0] for _ in range(3)]
    assert [float(one[0]) for one in kept] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_what_a_step_returns_is_not_the_memory_of_a_batch() -> None:
    batches = [{"x": torch.zeros(BATCH, 1)}]
    with (
        ps.Groups(ps.mesh(dp=1)) as groups,
        ps.compile(returning.on(groups.mesh), groups, sources={"data": batches}) as step,
    ):
        step()[0].add_(1.0)
    assert not batches[0]["x"].any()


def test_fields_of_a_tuple_are_its_places() -> None:
    both = torch.utils.data.TensorDataset(torch.ones(8, 1), torch.full((8, 1), 2.0))
    batches = torch.utils.data.DataLoader(both, batch_size=BATCH)
    program = loading_program("data.0", "data.1", ahead=1)
    with (
        ps.Groups(program.mesh) as groups,
        ps.compile(program, groups, sources={"data": batches}) as step,
    ):
        found = [[float(one[0]) for one in step()] for _ in range(2)]
    assert found == [[1.0, 2.0], [1.0, 2.0]]


def test_a_step_ends_though_its_source_waits_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_JOIN_S", 0.1)
    is_asked, more = threading.Event(), threading.Event()

    def slow() -> Iterator[dict[str, Any]]:
        yield {"x": zeros()}
        is_asked.set()
        more.wait(60)

    program = loading_program("data.x", ahead=1)
    with ps.Groups(program.mesh) as groups:
        step = ps.compile(program, groups, sources={"data": slow()})
        step()
        assert is_asked.wait(60)  # A batch that is not begun by the end would be cancelled.
        with pytest.warns(UserWarning, match="source 'data' is still in load"):
            step.close()
    (left,) = [t for t in threading.enumerate() if t.name == "penstock-load-data"]
    assert left.daemon
    more.set()
    left.join(10)
    assert not left.is_alive()


def test_a_step_that_is_closed_holds_no_batch_and_no_iterator() -> None:
    class Endless:
        """As a DataLoader's iterator, which has processes until it is gone."""

        def __iter__(self) -> Endless:
            return self

        def __next__(self) -> dict[str, Any]:
            return {"x": zeros()}

    batches = Endless()
    held = weakref.ref(batches)
    program = loading_program("data.x", ahead=3)
    with ps.Groups(program.mesh) as groups:
        step = ps.compile(program, groups, sources={"data": batches})
        del batches
        step()
        gc.collect()
        assert held() is not None
        step.close()
        gc.collect()
        assert held() is None
        assert not step.sources["data"]._coming


def test_a_source_is_handed_on_with_what_is_ahead() -> None:
    batches = iter([{"x": torch.full((BATCH, 1), float(i))} for i in range(9)])
    seen = []
    program = loading_program("data.x", ahead=3)
    with ps.Groups(program.mesh) as groups:
        step = ps.compile(program, groups, sources={"data": batches})
        seen += [float(step()[0][0]) for _ in range(2)]
        sources = step.hand_over()
        looked = sources["data"].looked_at()[0]["x"]
        with ps.compile(loading_program("data.x"), groups, sources=sources) as other:
            seen += [float(other()[0][0]) for _ in range(4)]
    assert float(looked[0]) == 2.0
    assert seen == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
