"""Engine and workers of a loop that runs: their number follows the work, and each ends in time."""

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from testkit.waiting import wait_until

import penstock
from penstock.testing.ports import HOST, free_ports

from .test_engine_run import all_of, all_pids, assert_same, command_of, doubled, engine_of

NUM_CORES, INTERVAL_S = 4, 0.1
CHANGE_S = 60.0
"""Time in which the number of workers must have changed; a quiet machine needs two seconds."""
JOB_S = 120.0
"""Time for a whole job of torchrun."""


class CostsByFile:
    """A transform that is dear while a file is there, on a machine that is always the same.

    It is unpickled before engine and workers are forked. There it sets the facts of the machine
    that the number of workers depends on, so that what else runs on this one changes nothing; and
    it has the engine measure ten times as often.
    """

    def __init__(self, dear: Path) -> None:
        self._dear = dear

    def __reduce__(self) -> Any:
        return _arrived, (self._dear,)

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if self._dear.exists():
            time.sleep(0.002)  # Work, to whoever measures; the cores of this machine stay free.
        return {"n": sample["cls"], "blob": sample["bin"]}


def _arrived(dear: Path) -> CostsByFile:
    from penstock.engine import worker_number

    worker_number._INTERVAL_S = INTERVAL_S
    worker_number.idle_s = lambda cores: NUM_CORES * time.monotonic()
    os.sched_getaffinity = lambda pid: set(range(NUM_CORES))  # type: ignore[assignment]
    return CostsByFile(dear)


def num_workers(loader: penstock.Loader) -> int:
    memory = loader.stats().memory
    assert memory is not None
    return memory.num_processes - 1


def looped_until(
    batches: Iterator[Any], condition: Callable[[], bool], *, step_s: float = 0.0
) -> list[dict[str, Any]]:
    """Take batches, with a step of some time between them, until a condition holds."""
    step, end_s, taken = threading.Event(), time.monotonic() + CHANGE_S, []
    while not condition():
        assert time.monotonic() < end_s, f"not within {len(taken)} batches"
        for _ in range(10):
            batch = next(batches)
            taken.append({"ids": batch.ids, "n": batch["n"], "num_blobs": len(batch["blob"])})
            step.wait(step_s)
    return taken


def test_the_number_of_workers_follows_what_the_loop_needs(
    blobs: penstock.Dataset, tmp_path: Path
) -> None:
    dear = tmp_path / "dear"
    options: dict[str, Any] = {"batch_size": 20, "epochs": None, "seed": 3, "output": "numpy"}
    with penstock.Loader(blobs, transform=CostsByFile(dear), look_ahead="1MB", **options) as loader:
        batches = iter(loader)
        dear.touch()
        taken = looped_until(batches, lambda: num_workers(loader) == NUM_CORES)
        dear.unlink()
        taken += looped_until(batches, lambda: num_workers(loader) <= 2, step_s=0.005)
        num_low = num_workers(loader)
        dear.touch()
        taken += looped_until(batches, lambda: num_workers(loader) > num_low)
        assert loader.stats().events == ()
    dear.unlink()
    here = penstock.Loader(blobs, transform=CostsByFile(dear), workers="here", **options)
    with here:
        for one, other in zip(taken, here, strict=False):
            expected = {"ids": other.ids, "n": other["n"], "num_blobs": len(other["blob"])}
            assert_same(one, expected)


# -- several loaders -------------------------------------------------------------------------


def alive(pids: list[int]) -> list[int]:
    """Those processes of some that have not ended."""
    return [pid for pid in pids if command_of(pid)]


def pids_of(loader: penstock.Loader) -> list[int]:
    assert loader._client is not None
    return [engine_of(loader), *loader._client._ask("pids")]


def test_a_loader_goes_on_when_another_of_the_same_process_is_closed(
    blobs: penstock.Dataset,
) -> None:
    def made(seed: int, workers: Any) -> penstock.Loader:
        return penstock.Loader(blobs, batch_size=20, transform=doubled, workers=workers, seed=seed)

    expected = [all_of(made(seed, "here")) for seed in (1, 2)]
    one, other = (made(seed, 1) for seed in (1, 2))
    batches = [iter(one), iter(other)]
    found: list[list[Any]] = [[], []]
    for number in (0, 1, 0, 1, 0, 1):
        batch = next(batches[number])
        found[number].append({"ids": batch.ids, **batch})
    pids, others = pids_of(one), pids_of(other)
    assert len({*pids, *others}) == 4
    one.close()
    wait_until(lambda: not alive(pids))
    found[1] += [{"ids": batch.ids, **batch} for batch in batches[1]]
    assert_same(found, [expected[0][:3], expected[1]])
    assert alive(others) == others
    other.close()
    wait_until(lambda: not alive(others))


CELL = """
import penstock
loader = penstock.Loader(dataset, batch_size=20, transform=doubled, workers=1, seed=4)
for number, batch in enumerate(loader):
    if number == stop_at:
        raise KeyboardInterrupt
"""


def test_a_cell_that_is_run_again_ends_the_processes_of_its_first_run(
    blobs: penstock.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook: dict[str, Any] = {"dataset": blobs, "doubled": doubled, "stop_at": 3}
    with pytest.raises(KeyboardInterrupt) as caught:
        exec(CELL, notebook)
    # A notebook keeps the latest error, and with it all frames that it has passed through.
    monkeypatch.setattr(sys, "last_value", caught.value, raising=False)
    old = pids_of(notebook["loader"])
    assert alive(old) == old
    notebook["stop_at"] = None
    exec(CELL, notebook)
    assert notebook["number"] == 14
    gc.collect()
    wait_until(lambda: not alive(old))
    new = pids_of(notebook["loader"])
    assert alive(new) == new
    del notebook["loader"]
    gc.collect()
    wait_until(lambda: not alive(new))


# -- several ranks ---------------------------------------------------------------------------

RANK = """
    import json, os, sys, time
    from pathlib import Path
    import penstock
    folder, again = Path(sys.argv[2]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    def transform(sample):
        if not again:
            time.sleep(0.001)
        return {"n": sample["cls"]}
    def say(what):
        path = folder / f"{again}-{os.environ['RANK']}"
        path.with_suffix(".new").write_text(json.dumps(what))
        path.with_suffix(".new").rename(path)
    options = dict(global_batch_size=20, workers=2, transform=transform, output="numpy")
    with penstock.Loader(penstock.open(sys.argv[1]), epochs=again or None, **options) as loader:
        numbers = []
        for batch in loader:
            numbers += batch["n"].tolist()
            if not again and len(numbers) == 100:
                say({"pid": os.getpid()})
        say({"pid": os.getpid(), "numbers": numbers})
"""


def ours_of(pids: list[int]) -> dict[int, int]:
    """How many processes of ours belong to each of some training processes."""
    commands = [command_of(pid) for pid in all_pids()]
    return {pid: sum(str(pid) in words for words in commands) for pid in pids}


def test_ranks_of_torchrun_have_engines_of_their_own_that_end_with_them(
    blobs: penstock.Dataset, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK))

    def said(again: int) -> list[dict[str, Any]]:
        paths = [tmp_path / f"{again}-{rank}" for rank in range(2)]
        return [json.loads(path.read_text()) for path in paths if path.exists()]

    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={HOST}:{free_ports(1)[0]}"]
    command += [f"--local-addr={HOST}", "--monitor-interval=0.1", "--max-restarts=1"]
    with (tmp_path / "log").open("wb") as log:
        job = subprocess.Popen(
            [*command, str(tmp_path / "rank.py"), blobs.uri, str(tmp_path)],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(lambda: len(said(0)) == 2 or job.poll() is not None, JOB_S)
        first = [each["pid"] for each in said(0)]
        # Starter, spawner, engine and two workers each.
        assert list(ours_of(first).values()) == [5, 5], (tmp_path / "log").read_text()
        os.kill(first[1], signal.SIGKILL)
        assert job.wait(JOB_S) == 0, (tmp_path / "log").read_text()
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    second = [each["pid"] for each in said(1)]
    assert sorted(n for each in said(1) for n in each["numbers"]) == list(range(300))
    assert not {*first} & {*second}
    wait_until(lambda: not any(ours_of([*first, *second]).values()))
