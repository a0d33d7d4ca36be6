"""torchdata's StatefulDataLoader: killed at any place, it goes on as if nothing had happened."""

import json
from collections.abc import Iterable
from typing import Any

import pytest

import penstock
from penstock.errors import StateError
from penstock.torch import IterableDataset

torchdata = pytest.importorskip(
    "torchdata.stateful_dataloader", reason="torchdata is not installed: pip install torchdata"
)

BATCH_SIZE = 4


def rows_of(batches: Iterable[Any]) -> list[list[int]]:
    """Sample ids by batch, read from the samples themselves."""
    return [b["data"][:, 0].tolist() for b in batches]


def stateful(dataset: penstock.Dataset, *, samples: bool, **options: Any) -> Any:
    view = IterableDataset(dataset, batch_size=BATCH_SIZE, seed=7, samples=samples)
    size = BATCH_SIZE if samples else None
    return torchdata.StatefulDataLoader(view, batch_size=size, **options)


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_it_resumes_at_every_place(
    dataset: penstock.Dataset, num_workers: int, samples: bool
) -> None:
    loader = stateful(dataset, samples=samples, num_workers=num_workers)
    first = rows_of(loader)
    whole, states = [], []
    for batch in loader:
        whole += rows_of([batch])
        states.append(json.dumps(loader.state_dict()))
    third = rows_of(loader)
    assert first != whole != third
    for done in (0, 1, 2, 6, len(states) - 2):
        resumed = stateful(dataset, samples=samples, num_workers=num_workers)
        resumed.load_state_dict(json.loads(states[done]))
        assert rows_of(resumed) == whole[done + 1 :]
        assert rows_of(resumed) == third


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_between_epochs_goes_on_with_the_next(
    dataset: penstock.Dataset, num_workers: int
) -> None:
    loader = stateful(dataset, samples=False, num_workers=num_workers)
    rows_of(loader)
    state = loader.state_dict()
    second, third = rows_of(loader), rows_of(loader)
    resumed = stateful(dataset, samples=False, num_workers=num_workers)
    resumed.load_state_dict(state)
    assert [rows_of(resumed), rows_of(resumed)] == [second, third]


def test_workers_that_stay_resume_too(dataset: penstock.Dataset) -> None:
    options: dict[str, Any] = {"samples": False, "num_workers": 2, "persistent_workers": True}
    loader = stateful(dataset, **options)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    state = loader.state_dict()
    expected = [rows_of(batches), rows_of(loader)]
    resumed = stateful(dataset, **options)
    resumed.load_state_dict(state)
    assert [rows_of(resumed), rows_of(resumed)] == expected


def test_another_number_of_workers_is_refused(dataset: penstock.Dataset) -> None:
    loader = stateful(dataset, samples=False, num_workers=2)
    batches = iter(loader)
    next(batches)
    resumed = stateful(dataset, samples=False, num_workers=1)
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match=r"penstock\.Loader"):
        next(iter(resumed))
