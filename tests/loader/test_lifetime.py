"""Threads and processes: none before the first batch, none after the last, whatever happened."""

import gc
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

import penstock
from penstock.errors import StateError
from penstock.testing.forks import in_child

from .conftest import MakeRows

BEFORE: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _before() -> None:
    """Leave out what other tests of this process have left."""
    BEFORE.clear()
    BEFORE.update(threading.enumerate())


def penstock_threads() -> list[str]:
    now = (t for t in threading.enumerate() if t not in BEFORE)
    return [t.name for t in now if t.name.startswith("penstock")]


def test_nothing_runs_before_the_first_batch_is_asked_for(make_rows: MakeRows) -> None:
    loader = penstock.Loader(make_rows(100), batch_size=10)
    len(loader), loader.state_dict(), loader.stats()
    assert penstock_threads() == []
    next(iter(loader))


def test_threads_end_with_the_last_batch(make_rows: MakeRows) -> None:
    assert len(list(penstock.Loader(make_rows(100), batch_size=10))) == 10
    assert penstock_threads() == []


def test_threads_end_with_the_block(make_rows: MakeRows) -> None:
    with penstock.Loader(make_rows(10_000), batch_size=10) as loader:
        batches = iter(loader)
        next(batches)
        assert penstock_threads()
    assert penstock_threads() == []


def test_an_exception_in_the_loop_ends_the_threads(make_rows: MakeRows) -> None:
    loader = penstock.Loader(make_rows(10_000), batch_size=10)
    with pytest.raises(KeyError):
        for _ in loader:
            raise KeyError("the user's own")
    assert penstock_threads() == []


def test_a_forgotten_iteration_is_collected_with_its_threads(make_rows: MakeRows) -> None:
    batches = iter(penstock.Loader(make_rows(10_000), batch_size=10))
    next(batches)
    assert penstock_threads()
    del batches
    gc.collect()
    assert penstock_threads() == []


def test_a_new_iteration_ends_the_one_before(make_rows: MakeRows) -> None:
    loader = penstock.Loader(make_rows(10_000), batch_size=10)
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(StopIteration):
        while True:
            next(first)
    assert next(second).step == 1
    loader.close()
    assert penstock_threads() == []


def test_ctrl_c_ends_the_program_at_once(make_rows: MakeRows) -> None:
    program = """
import sys, penstock
loader = penstock.Loader(penstock.open(sys.argv[1]), batch_size=10, epochs=None)
for batch in loader:
    print("going", flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, make_rows(1000).uri],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "going\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
    assert "Fatal" not in errors


def test_a_forked_child_has_its_own_iteration_and_refuses_its_parents(
    make_rows: MakeRows,
) -> None:
    dataset = make_rows(1000)
    loader = penstock.Loader(dataset, batch_size=10, seed=1, output="numpy")
    batches = iter(loader)
    first = next(batches).ids.tolist()

    def child() -> Any:
        try:
            next(batches)
        except StateError:
            own = penstock.Loader(dataset, batch_size=10, seed=1, output="numpy")
            return [next(iter(own)).ids.tolist(), len(list(loader))]
        return "used the parent's"

    own_first, whole = in_child(child)
    assert own_first == first
    assert whole == 100
    assert len(list(batches)) == 99, "the parent goes on undisturbed"
