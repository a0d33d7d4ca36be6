"""A loader in stages: the bytes of a batch, then the batch; only what was asked for, if need be."""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import StateError
from penstock.storage.locate import open_store
from penstock.testing.forks import in_child

from .conftest import MakeRows, write_tar

BATCH, BLOB_BYTES = 8, 20_000
both = pytest.mark.parametrize("workers", ["here", 2])


class Unhurried:
    """A transform that does nothing. Where it is unpickled, no late request is asked for twice."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return sample

    def __reduce__(self) -> Any:
        return _unhurried, ()


def _unhurried() -> Unhurried:
    from penstock.flow import flow, hedge, source

    source.TOKENS_FIRST = flow.TOKEN_SHARE = 0.0
    hedge.WAITED_S = float("inf")
    return Unhurried()


def threads_of_loaders() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("penstock")}


def engine_of(loader: penstock.Loader) -> int:
    assert loader._client is not None
    return loader._client.engine_pid


@pytest.fixture
def remote(s3: Any, tmp_path: Path) -> penstock.Dataset:
    samples = [{"bin": bytes([i]) * BLOB_BYTES} for i in range(64)]
    write_tar(tmp_path / "far" / "x.tar", samples)
    store = open_store(s3.uri, s3.options)
    store.write("far/x.tar", (tmp_path / "far" / "x.tar").read_bytes())
    return penstock.open(f"{s3.uri.rstrip('/')}/far/", store=s3.options)


@both
@pytest.mark.parametrize("only_asked", [False, True])
def test_batches_in_stages_are_those_of_the_loop(
    make_rows: MakeRows, only_asked: bool, workers: Any
) -> None:
    dataset = make_rows(64)  # So small that several batches are one job.
    loader = penstock.Loader(dataset, batch_size=5, seed=3, output="numpy", epochs=2)
    expected = [batch.ids.tolist() for batch in loader]
    again = penstock.Loader(
        dataset, batch_size=5, seed=3, output="numpy", epochs=2, workers=workers
    )
    stages = again.stages(only_asked=only_asked)
    found, asked = [], [stages.fetch()]
    with pytest.raises(StopIteration):
        while True:
            asked.append(stages.fetch())
            found.append(stages.decode(asked.pop(0)).ids.tolist())
    found.append(stages.decode(asked.pop()).ids.tolist())
    again.close()
    assert found == expected


@both
def test_nothing_is_read_that_was_not_asked_for(remote: penstock.Dataset, workers: Any) -> None:
    options: dict[str, Any] = {"shuffle": None, "output": "numpy", "transform": Unhurried()}
    with penstock.Loader(remote, batch_size=BATCH, workers=workers, **options) as loader:
        stages, tickets = loader.stages(only_asked=True), []
        for num_asked in (1, 2, 3):
            tickets.append(stages.fetch())
            read_bytes = loader.stats().store_bytes
            assert read_bytes // (BATCH * BLOB_BYTES) == num_asked
        for number, ticket in enumerate(tickets):
            assert stages.decode(ticket)["bin"][0][0] == number * BATCH
            for start_ns, stop_ns in (ticket.fetch_ns, ticket.decode_ns):
                assert 0 < start_ns < stop_ns
            assert ticket.fetch_ns[1] <= ticket.decode_ns[0]


@both
def test_an_iteration_in_stages_cannot_cross_a_fork(blobs: penstock.Dataset, workers: Any) -> None:
    def fetched_in_child() -> str:
        with pytest.raises(StateError) as caught:
            stages.fetch()
        return str(caught.value)

    with penstock.Loader(blobs, batch_size=20, workers=workers) as loader:
        stages = loader.stages()
        expected = stages.fetch()
        assert "belongs to the process that started it" in in_child(fetched_in_child)
        assert len(stages.decode(expected).ids) == 20
        assert len(stages.decode(stages.fetch()).ids) == 20


# -- with an engine in a process of its own --------------------------------------------------


def test_batches_in_stages_are_made_outside_of_this_process(blobs: penstock.Dataset) -> None:
    before = threads_of_loaders()
    with penstock.Loader(blobs, batch_size=20, transform=Unhurried(), workers=1) as loader:
        stages = loader.stages()
        stages.decode(stages.fetch())
        assert threads_of_loaders() == before
        stages.fetch()
        assert "engine" in loader.stats().workers
        assert loader.state_dict()["position"] == 0
        stages.used()
        assert loader.state_dict()["position"] == 20


@pytest.mark.parametrize("only_asked", [False, True])
def test_an_engine_that_dies_between_two_stages_is_started_again(
    blobs: penstock.Dataset, only_asked: bool
) -> None:
    options: dict[str, Any] = {"batch_size": 7, "seed": 2, "transform": Unhurried(), "epochs": 1}
    with penstock.Loader(blobs, workers="here", **options) as here:
        expected = [batch.ids.tolist() for batch in here]
    with penstock.Loader(blobs, workers=1, **options) as loader:
        stages, found, tickets = loader.stages(only_asked=only_asked), [], []
        killed_at = {"fetch": (0, 9, 43), "decode": (3, 20)}
        for number in range(len(expected) + 2):
            if number in killed_at["fetch"]:
                os.kill(engine_of(loader), signal.SIGKILL)
            if number < len(expected):
                tickets.append(stages.fetch())
            if number in killed_at["decode"]:  # Its bytes were fetched by the one that dies.
                os.kill(engine_of(loader), signal.SIGKILL)
            if number >= 2:
                found.append(stages.decode(tickets.pop(0)).ids.tolist())
                stages.used()
        with pytest.raises(StopIteration):
            stages.fetch()
        assert found == expected
        assert len(loader.stats().events) == 5
        assert loader.epoch == 1


def test_two_threads_have_their_stages_from_an_engine_that_is_killed_now_and_then(
    blobs: penstock.Dataset,
) -> None:
    options: dict[str, Any] = {"batch_size": 3, "seed": 2, "transform": Unhurried()}
    with penstock.Loader(blobs, workers="here", **options) as here:
        expected = [batch.ids.tolist() for batch in here]
    with (
        penstock.Loader(blobs, workers=1, **options) as loader,
        ThreadPoolExecutor(1) as fetching,
        ThreadPoolExecutor(1) as decoding,
    ):
        stages = loader.stages(only_asked=True)

        def decode(ticket: Future[Any]) -> Any:
            return stages.decode(ticket.result()).ids.tolist()

        tickets = [fetching.submit(stages.fetch) for _ in expected]
        batches = [decoding.submit(decode, ticket) for ticket in tickets]
        for number in (10, 35, 60, 85):
            batches[number].result()
            os.kill(engine_of(loader), signal.SIGKILL)
        assert [batch.result() for batch in batches] == expected


def large(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.full(100_000, sample["cls"], np.float32)}


def test_batches_in_stages_are_taken_as_they_are_used(blobs: penstock.Dataset) -> None:
    with penstock.Loader(
        blobs, batch_size=10, transform=large, workers=1, look_ahead="1MB", output="numpy"
    ) as loader:
        stages = loader.stages()
        for _ in range(30):
            batch = stages.decode(stages.fetch())
            assert (batch["x"][:, 0] == batch["x"][:, -1]).all()
            stages.used()
        memory = loader.stats().memory
        assert memory is not None
        assert memory.shared_bytes < 60 << 20  # 120 MB have come through it.


class Waits:
    """A transform that waits for a file, with another one that tells so."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        (self._folder / "waits").touch()
        while not (self._folder / "go").exists():
            threading.Event().wait(0.01)
        return sample


@both
@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda loader, stages: stages.close(), id="stages"),
        pytest.param(lambda loader, stages: loader.close(), id="loader"),
        pytest.param(lambda loader, stages: iter(loader), id="another"),
    ],
)
def test_who_waits_in_a_stage_is_told_of_the_end(
    blobs: penstock.Dataset,
    tmp_path: Path,
    workers: Any,
    end: Callable[[penstock.Loader, Any], Any],
) -> None:
    loader = penstock.Loader(
        blobs, batch_size=100, epochs=None, transform=Waits(tmp_path), workers=workers
    )
    with loader, ThreadPoolExecutor(2) as lanes:
        stages = loader.stages()
        made = lanes.submit(stages.decode, stages.fetch())
        fetched = lanes.submit(lambda: [stages.fetch() for _ in range(1_000_000)])
        while not (tmp_path / "waits").exists():
            threading.Event().wait(0.01)
        ended = threading.Thread(target=end, args=(loader, stages))
        ended.start()
        for each in (made, fetched):
            with pytest.raises(StateError, match="a Loader of its own"):
                each.result(60)
        (tmp_path / "go").touch()  # A worker inside of a transform ends when that does.
        ended.join(60)
        assert not ended.is_alive()


def test_an_iteration_that_replaces_one_that_is_waited_for_brings_everything(
    blobs: penstock.Dataset,
) -> None:
    """The thread that waits for the old one may receive the first batches of the new one."""
    options: dict[str, Any] = {"batch_size": 20, "seed": 2, "transform": Unhurried(), "epochs": 1}
    with penstock.Loader(blobs, workers="here", **options) as here:
        expected = [batch.ids.tolist() for batch in here]

    def take(stages: Any) -> list[Any]:
        found = []
        try:
            while True:
                found.append(stages.decode(stages.fetch()).ids.tolist())
        except (StopIteration, StateError):
            return found

    with penstock.Loader(blobs, workers=1, **options) as loader, ThreadPoolExecutor(4) as lanes:
        replaced = []
        for number in range(20):
            stages = loader.stages()
            replaced.append(lanes.submit(take, stages))
            threading.Event().wait(0.001 * number)
        for each in replaced:
            found = each.result(60)
            assert found == expected[: len(found)]
        assert replaced[-1].result() == expected


@pytest.mark.parametrize("end", ["close", "replace"])
def test_an_iteration_may_end_while_its_dead_engine_is_replaced(
    blobs: penstock.Dataset, end: str
) -> None:
    options: dict[str, Any] = {"batch_size": 20, "seed": 2, "transform": Unhurried(), "epochs": 1}

    def take(stages: Any) -> None:
        try:
            while True:
                stages.decode(stages.fetch())
        except (StopIteration, StateError):
            return

    for number in range(4):
        with penstock.Loader(blobs, workers=1, **options) as loader, ThreadPoolExecutor(1) as lane:
            taken = lane.submit(take, loader.stages())
            os.kill(engine_of(loader), signal.SIGKILL)
            threading.Event().wait(0.01 * number)
            if end == "replace":
                assert sum(len(batch.ids) for batch in loader) == len(blobs)
            else:
                loader.close()
            taken.result(60)
