"""Hooks for torch's DataLoader, in one process and without a launcher: what jobs do to loaders."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchdata")

from penstock.trace import Kind, Trace, read_trace
from penstock.trace.foreign import fetching, library

STARTUP = Path(library.__file__).with_name("startup")

JOB = """
import json, sys
from contextlib import suppress
import torch
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __init__(self, num): self.num = num
    def __len__(self): return self.num
    def __getitem__(self, index): return torch.tensor([float(index)])

class Many(Rows):
    def __getitems__(self, indices): return [self[i] for i in indices]

class Late(Rows):
    def __getitem__(self, index):
        if index == 4 and not hasattr(self, "is_asked_again"):
            self.is_asked_again = True
            raise TimeoutError("the store is slow")
        return super().__getitem__(index)

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)

def train(*batches):
    optimizer.zero_grad()
    sum(model(batch).sum() for batch in batches).backward()
    optimizer.step()

def left_in_the_midst():
    '''Validation that is left early, as trainers do with a limit.'''
    rows, checks = DataLoader(Rows(8), batch_size=2), DataLoader(Rows(8), batch_size=1)
    for epoch in range(2):
        for batch in rows:
            train(batch)
        with torch.no_grad():
            for number, batch in enumerate(checks):
                if number == 2: break

def two_at_a_time():
    left, right = DataLoader(Rows(8), batch_size=2), DataLoader(Rows(8), batch_size=2)
    for epoch in range(2):
        for pair in zip(left, right):
            train(*pair)

def asked_again():
    batches = iter(DataLoader(Late(8), batch_size=2))
    for _ in range(4):
        with suppress(TimeoutError):
            train(next(batches))

def in_one_go():
    for batch in DataLoader(Many(8), batch_size=4):
        train(batch)

def resumed():
    from torchdata.stateful_dataloader import StatefulDataLoader
    class Stream(torch.utils.data.IterableDataset):
        at = 0
        def __iter__(self): return self
        def __next__(self):
            if self.at == 8: raise StopIteration
            self.at += 1
            return self.at
        def state_dict(self): return {"at": self.at}
        def load_state_dict(self, state): self.at = state["at"]
    loader = StatefulDataLoader(Stream(), batch_size=2)
    next(iter(loader))
    return loader.state_dict()

if __name__ == "__main__":
    in_one_go(); two_at_a_time(); asked_again(); left_in_the_midst()
    print(json.dumps(resumed()))
"""


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Any]:
    folder = tmp_path_factory.mktemp("hooked")
    more = {"OMP_NUM_THREADS": "1", "PENSTOCK_TRACE": str(folder), "PYTHONPATH": str(STARTUP)}
    done = subprocess.run(
        [sys.executable, "-c", JOB],
        env={**os.environ, **more}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (folder / "problems.txt").exists(), (folder / "problems.txt").read_text()
    return read_trace(folder), json.loads(done.stdout)


def of_loaders(trace: Trace, kind: Kind, *numbers: int) -> Any:
    """Return rows of some loaders, numbered in the order in which they were iterated."""
    wanted = [f"loader {number} " for number in numbers]
    rows = trace.of(kind)
    return rows[[name.startswith(tuple(wanted)) for name in trace.names_of(rows["object"])]]


def test_samples_that_are_made_in_one_go_are_one_row(hooked: tuple[Trace, Any]) -> None:
    samples = hooked[0].of(Kind.SAMPLE)
    made = samples[[name.endswith("Many") for name in hooked[0].names_of(samples["object"])]]
    assert made["count"].tolist() == [4, 4]
    assert made["offset"].tolist() == [0, 4]


def test_two_loaders_of_one_step_are_both_trained_on(hooked: tuple[Trace, Any]) -> None:
    assert len(of_loaders(hooked[0], Kind.NEXT, 1, 2)) == 2 * 2 * 4
    assert not len(of_loaders(hooked[0], Kind.VALIDATE, 1, 2))


def test_a_loop_that_catches_an_error_and_asks_again_is_recorded_on(
    hooked: tuple[Trace, Any],
) -> None:
    # torch gives up the batch that failed.
    assert len(of_loaders(hooked[0], Kind.NEXT, 3)) == 3


def test_validation_that_is_left_in_the_midst_is_a_row(hooked: tuple[Trace, Any]) -> None:
    trace, _ = hooked
    assert of_loaders(trace, Kind.VALIDATE, 5)["count"].tolist() == [3, 3]
    assert len(of_loaders(trace, Kind.NEXT, 4)) == 2 * 4
    roles = [state["role"] for state in trace.facts()["loaders"].values()]
    assert roles[4:6] == ["train", "validate"]


def test_the_state_of_a_loader_is_the_same_with_and_without_a_trace(
    hooked: tuple[Trace, Any],
) -> None:
    plain: dict[str, Any] = {"__name__": "job"}
    exec(JOB, plain)
    assert plain["resumed"]() == hooked[1]


class Tasks:
    """A worker's queue, as one epoch after the other fills it."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = list(numbers)

    def get(self) -> tuple[int, list[int]]:
        return self._numbers.pop(0), []


def test_a_worker_with_one_batch_in_a_pass_knows_which_pass_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = iter([(0, 0), (1, 1), (2, 2)])
    monkeypatch.setattr(fetching, "_pass_of", lambda pid: next(told))
    queue = fetching._WatchedQueue(Tasks(0, 0, 0))
    steps = []
    for _ in range(3):
        queue.get()
        steps.append((fetching.WORK.epoch, fetching.WORK.step))
    assert steps == [(0, 0), (1, 1), (2, 2)]
