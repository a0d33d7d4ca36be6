"""The view for torch's DataLoader: the stream of one process, whoever makes it."""

import copy
import io
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import penstock
from penstock.errors import OptionError, StateError
from penstock.storage import open_store
from penstock.torch import IterableDataset

NUM_SAMPLES = 53


def ids_of(batches: Iterable[Any]) -> list[list[int]]:
    """Sample ids by batch, read from the samples themselves."""
    return [b["data"][:, 0].tolist() for b in batches]


def epochs_of(view: Any, num_epochs: int, **options: Any) -> list[list[list[int]]]:
    """Epochs of a view as a DataLoader brings them."""
    loader: DataLoader[Any] = DataLoader(view, **options)
    return [ids_of(loader) for _ in range(num_epochs)]


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_workers_bring_the_stream_of_a_single_process(
    dataset: penstock.Dataset, num_workers: int, num_ranks: int
) -> None:
    for rank in range(num_ranks):
        options: dict[str, Any] = {
            "batch_size": 4,
            "seed": 7,
            "world": penstock.World(rank, num_ranks),
        }
        loader = penstock.Loader(dataset, **options)
        expected = [ids_of(loader) for _ in range(3)]
        view = IterableDataset(dataset, **options)
        assert len(view) == len(expected[0])
        assert epochs_of(view, 3, batch_size=None, num_workers=num_workers) == expected


def test_batches_keep_ids_mask_and_place_on_their_way_from_a_worker(
    dataset: penstock.Dataset,
) -> None:
    view = IterableDataset(dataset, batch_size=8, seed=1)
    batches = list(DataLoader(view, batch_size=None, num_workers=2))
    assert [b.step for b in batches] == list(range(7))
    assert all(isinstance(b, penstock.Batch) and b.epoch == 0 for b in batches)
    assert all(b.ids.tolist() == b["data"][:, 0].tolist() for b in batches)
    assert sum(int(b.mask.sum()) for b in batches) == NUM_SAMPLES


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_workers_may_be_started_in_any_way(dataset: penstock.Dataset, context: str) -> None:
    view = IterableDataset(dataset, batch_size=4, seed=2, world=penstock.World(1, 2))
    expected = epochs_of(copy.deepcopy(view), 2, batch_size=None)
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": context}
    assert epochs_of(view, 2, batch_size=None, **options) == expected


@pytest.mark.parametrize("shuffle", ["global", "blocks"])
def test_forked_workers_read_from_a_remote_store_that_the_parent_is_reading_from(
    s3: Any, shuffle: Any
) -> None:
    rows = io.BytesIO()
    np.save(rows, np.repeat(np.arange(NUM_SAMPLES)[:, None], 3, axis=1))
    open_store(s3.uri, s3.options).write("rows.npy", rows.getvalue())
    remote = penstock.open(s3.uri, store=s3.options)
    loader = penstock.Loader(remote, batch_size=4, seed=7, shuffle=shuffle)
    expected = ids_of(loader)
    loader.set_epoch(0)
    running = iter(loader)
    next(running)  # Threads and connections are there when the workers are forked.
    view = IterableDataset(remote, batch_size=4, seed=7, shuffle=shuffle)
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
    assert epochs_of(view, 1, batch_size=None, **options) == [expected]
    assert ids_of(running) == expected[1:]


def test_a_spawned_worker_keeps_the_world_that_the_parent_knew(
    dataset: penstock.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = IterableDataset(dataset, batch_size=4, seed=2)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    sent = pickle.dumps(view)
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert pickle.loads(sent).world == penstock.World(1, 2)
    assert view.world == penstock.World()


def test_workers_that_stay_go_on_and_hear_of_set_epoch(dataset: penstock.Dataset) -> None:
    expected = epochs_of(IterableDataset(dataset, batch_size=4, seed=3), 3, batch_size=None)
    view = IterableDataset(dataset, batch_size=4, seed=3)
    loader: DataLoader[Any] = DataLoader(
        view, batch_size=None, num_workers=2, persistent_workers=True
    )
    assert [ids_of(loader), ids_of(loader)] == expected[:2]
    view.set_epoch(0)
    assert ids_of(loader) == expected[0]
    view.set_epoch(2)
    assert ids_of(loader) == expected[2]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_leaving_early_goes_on_with_the_next_epoch(
    dataset: penstock.Dataset, num_workers: int
) -> None:
    expected = epochs_of(IterableDataset(dataset, batch_size=4), 2, batch_size=None)
    loader: DataLoader[Any] = DataLoader(
        IterableDataset(dataset, batch_size=4), batch_size=None, num_workers=num_workers
    )
    assert ids_of([next(iter(loader))]) == expected[0][:1]
    assert ids_of(loader) == expected[1]


def test_the_number_of_workers_may_change_between_epochs(dataset: penstock.Dataset) -> None:
    expected = epochs_of(IterableDataset(dataset, batch_size=4), 4, batch_size=None)
    view = IterableDataset(dataset, batch_size=4)
    found = [epochs_of(view, 1, batch_size=None, num_workers=n)[0] for n in (0, 2, 3, 1)]
    assert found == expected


def test_several_epochs_in_one_iteration_run_through_the_workers(
    dataset: penstock.Dataset,
) -> None:
    expected = epochs_of(IterableDataset(dataset, batch_size=4, epochs=3), 2, batch_size=None)
    view = IterableDataset(dataset, batch_size=4, epochs=3)
    assert epochs_of(view, 2, batch_size=None, num_workers=3) == expected
    assert len(expected[0]) == len(view) == 42


@settings(max_examples=25, deadline=None)
@given(
    num_workers=st.integers(1, 5),
    batch_size=st.integers(1, 20),
    epochs=st.integers(1, 3),
    drop_last=st.booleans(),
)
def test_parts_of_a_loader_deal_out_the_whole(
    num_workers: int, batch_size: int, epochs: int, drop_last: bool, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    np.save(folder / "rows.npy", np.arange(23, dtype=np.int64)[:, None])
    loader = penstock.Loader(
        penstock.open(folder), batch_size=batch_size, epochs=epochs, drop_last=drop_last
    )
    whole = ids_of(loader)
    for w in range(num_workers):
        loader.set_epoch(0)
        assert ids_of(loader.part(w, num_workers)) == whole[w::num_workers]


# -- single samples ------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_samples_come_in_the_order_of_batches(
    dataset: penstock.Dataset, num_workers: int, num_ranks: int
) -> None:
    options: dict[str, Any] = {"seed": 5, "world": penstock.World(num_ranks - 1, num_ranks)}
    loader = penstock.Loader(dataset, batch_size=4, **options)
    whole = [b["data"][:, 0].tolist() for b in loader]
    if num_ranks == 1:
        whole[-1] = whole[-1][: NUM_SAMPLES % 4]
    view = IterableDataset(dataset, batch_size=4, samples=True, **options)
    batches: DataLoader[Any] = DataLoader(view, batch_size=4, num_workers=num_workers)
    assert ids_of(batches) == whole
    assert len(view) == sum(map(len, whole))
    assert len(batches) == len(whole)


def test_on_one_rank_single_samples_are_each_seen_once(dataset: penstock.Dataset) -> None:
    view = IterableDataset(dataset, batch_size=8, samples=True, output="numpy")
    found = [s["data"] for s in view]
    assert sorted(int(s[0]) for s in found) == list(range(NUM_SAMPLES))
    assert all(isinstance(s, np.ndarray) for s in found)


@pytest.mark.parametrize("asked", [None, 1, 3])
def test_another_batch_size_than_the_dataloaders_is_refused(
    dataset: penstock.Dataset, asked: int | None
) -> None:
    view = IterableDataset(dataset, batch_size=4, samples=True)
    with pytest.raises(OptionError, match=f"runs of 4 samples.*batch_size={asked}"):
        next(iter(DataLoader(view, batch_size=asked)))


def test_whole_batches_are_not_batched_again(dataset: penstock.Dataset) -> None:
    view = IterableDataset(dataset, batch_size=4)
    with pytest.raises(OptionError, match="batch_size=None"):
        next(iter(DataLoader(view)))
    with pytest.raises(OptionError, match="batch_size=None"):
        next(iter(DataLoader(view, num_workers=1)))


def test_options_that_cannot_work_with_samples_are_refused(dataset: penstock.Dataset) -> None:
    with pytest.raises(OptionError, match="collate_fn"):
        IterableDataset(dataset, batch_size=4, samples=True, collate=list)
    uneven = IterableDataset(dataset, global_batch_size=5, samples=True, world=penstock.World(0, 2))
    with pytest.raises(OptionError, match="2 ranks"):
        len(uneven)
    with pytest.raises(OptionError, match="next epoch"):
        iter(IterableDataset(dataset, batch_size=4, epochs=2, samples=True))
    with pytest.raises(OptionError, match="batch_size"):
        IterableDataset(dataset)


# -- trainers that split again ---------------------------------------------------------------------


class IterableDatasetShard:
    """Stands for accelerate's class of that name."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Any:
        yield from self.inner


def test_a_share_is_not_split_once_more(dataset: penstock.Dataset) -> None:
    share = IterableDataset(dataset, batch_size=4, world=penstock.World(0, 2))
    with pytest.raises(OptionError, match="split it among 2 ranks once more"):
        list(IterableDatasetShard(share))
    assert len(list(IterableDatasetShard(IterableDataset(dataset, batch_size=4)))) == 14


# -- states ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [False, True])
def test_the_view_itself_resumes_at_every_place(dataset: penstock.Dataset, samples: bool) -> None:
    options: dict[str, Any] = {"batch_size": 4, "seed": 9, "samples": samples}
    dataset = dataset[:11]  # Each place is tried, and each takes two runs.
    view = IterableDataset(dataset, **options)
    view.set_epoch(1)
    whole: list[Any] = []
    states = [view.state_dict()]
    for item in view:
        whole.append(item["data"].tolist())
        states.append(view.state_dict())
    following = [item["data"].tolist() for item in view]
    for done, state in enumerate(states):
        resumed = IterableDataset(dataset, **options)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        resumed.set_epoch(1)
        assert [item["data"].tolist() for item in resumed] == whole[done:]
        assert [item["data"].tolist() for item in resumed] == following


@pytest.mark.parametrize("num_workers", [0, 3])
def test_the_state_of_a_loader_can_be_gone_on_from(
    dataset: penstock.Dataset, num_workers: int
) -> None:
    loader = penstock.Loader(dataset, batch_size=4, seed=9)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    state = loader.state_dict()
    expected = [ids_of(batches), ids_of(loader)]
    view = IterableDataset(dataset, batch_size=4, seed=9)
    view.load_state_dict(state)
    assert epochs_of(view, 2, batch_size=None, num_workers=num_workers) == expected


def test_a_state_of_something_else_is_refused(dataset: penstock.Dataset) -> None:
    state = IterableDataset(dataset, batch_size=4, seed=9).state_dict()
    with pytest.raises(StateError, match="seed 9, this run has 8"):
        IterableDataset(dataset, batch_size=4, seed=8).load_state_dict(state)
    with pytest.raises(StateError, match="a global batch of 4, this is a global batch of 8"):
        IterableDataset(dataset, batch_size=8, seed=9).load_state_dict(state)
    with pytest.raises(StateError, match=r"num_workers 2.*penstock\.Loader"):
        IterableDataset(dataset, batch_size=4, seed=9).load_state_dict({**state, "num_workers": 2})


def test_nodes_do_not_lend_to_worker_processes(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(100))
    dataset = penstock.open(tmp_path / "rows.npy")
    with pytest.raises(OptionError, match=r"use penstock\.Loader"):
        IterableDataset(dataset, batch_size=8, peers=True)  # type: ignore[call-arg]
