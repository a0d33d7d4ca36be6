"""The position of a DataLoader's worker: what it counts, and which states it refuses."""

import pytest

from penstock.errors import StateError

pytest.importorskip("torch")

from penstock.loader.torch.worker_position import WorkerPosition, worker_here

HERE = WorkerPosition(worker=1, num_workers=3, global_batch_size=8)


def test_workers_have_every_step_once() -> None:
    steps = [
        WorkerPosition(worker=w, num_workers=3, global_batch_size=8, steps=n).next_step
        for n in range(4)
        for w in range(3)
    ]
    assert steps == list(range(12))


def test_a_state_is_the_position_again() -> None:
    place = WorkerPosition(
        epoch=2, position=64, worker=1, num_workers=3, global_batch_size=8, steps=5, samples=3
    )
    assert WorkerPosition.from_state(place.to_state(), HERE) == place


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_workers": 4}, "for num_workers 4, this is num_workers 3"),
        ({"worker": 0}, "for worker 0, this is worker 1"),
        ({"global_batch_size": 16}, "a global batch of 16, this is a global batch of 8"),
        ({"steps": -1}, "damaged"),
        ({"epoch": "x"}, "damaged"),
    ],
)
def test_a_state_with_other_sizes_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(StateError, match=message):
        WorkerPosition.from_state({**HERE.to_state(), **change}, HERE)


def test_a_process_without_workers_is_the_only_one() -> None:
    assert worker_here() == (0, 1)
