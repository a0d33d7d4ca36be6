"""Engine and workers in processes of their own: the same batches, whatever happens to them."""

import gc
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from testkit.waiting import wait_until

import penstock
from penstock.errors import EngineError, OptionError, WorkerError
from penstock.testing.forks import in_child

from .conftest import MakeRows

torch = pytest.importorskip("torch")


def doubled(sample: dict[str, Any]) -> dict[str, Any]:
    data = np.frombuffer(sample["bin"], np.uint8)
    return {"mean": data.mean(), "head": data[:500].astype(np.float32) * 2, "cls": sample["cls"]}


def drawn(sample: dict[str, Any]) -> dict[str, Any]:
    """As stock transforms do: numbers from the generators that everybody shares."""
    return {
        "python": random.random(),
        "numpy": np.random.rand(),
        "torch": torch.rand(3),
        "cls": sample["cls"],
    }


def all_of(loader: penstock.Loader) -> list[dict[str, Any]]:
    with loader:
        return [{"ids": batch.ids, **batch} for batch in loader]


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_same(one[name], other[name])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    else:
        assert one == other


def descendants() -> list[str]:
    """Names of all processes below this one."""
    parents: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = int(stat.parent.name), stat.read_text()
        except (OSError, ValueError):
            continue
        if rest.rpartition(")")[2].split()[0] == "Z":
            continue
        names[pid] = rest.partition("(")[2].rpartition(")")[0]
        parents.setdefault(int(rest.rpartition(")")[2].split()[1]), []).append(pid)
    out, below = [], [os.getpid()]
    while below:
        children = parents.get(below.pop(), [])
        out += [names[pid] for pid in children]
        below += children
    return [name for name in out if name.startswith("penstock-")]


# -- the same batches ------------------------------------------------------------------------


def test_batches_are_those_of_one_process(blobs: penstock.Dataset) -> None:
    options: dict[str, Any] = {"batch_size": 70, "seed": 2, "transform": doubled, "epochs": 2}
    here = all_of(penstock.Loader(blobs, workers="here", **options))
    for workers in (1, 3, "auto"):
        assert_same(all_of(penstock.Loader(blobs, workers=workers, **options)), here)


def test_random_numbers_belong_to_the_sample_whatever_the_number_of_workers(
    blobs: penstock.Dataset,
) -> None:
    options: dict[str, Any] = {"global_batch_size": 50, "seed": 5, "transform": drawn}
    one = all_of(penstock.Loader(blobs, workers=1, **options))
    assert_same(all_of(penstock.Loader(blobs, workers=3, **options)), one)
    halves = [
        all_of(
            penstock.Loader(blobs, workers=2, world=penstock.World(rank=r, num_ranks=2), **options)
        )
        for r in range(2)
    ]
    joined = [torch.cat([a["torch"], b["torch"]]) for a, b in zip(*halves, strict=True)]
    assert_same(joined, [batch["torch"] for batch in one])
    with penstock.Loader(blobs, workers=2, **options) as first:
        batches = iter(first)
        next(batches), next(batches)
        state = first.state_dict()
    resumed = penstock.Loader(blobs, workers=1, **options)
    resumed.load_state_dict(state)
    assert_same(all_of(resumed), one[2:])


def odd(sample: dict[str, Any]) -> dict[str, Any]:
    i = int(sample["cls"])
    return {
        "ragged": np.full((i % 4 + 1, 9000), i, np.int32),
        "half": torch.full((20_000,), float(i), dtype=torch.bfloat16),
        "text": f"number {i}",
        "maybe": None if i % 3 else np.arange(4),
        "bytes": b"x" * (i % 7),
        "set": {i, i + 1},
        "tall": torch.full((3, 5), i).T,
        "nested": {"a": [i, torch.tensor(i)]},
    }


def test_ragged_and_odd_values_arrive_as_they_are(blobs: penstock.Dataset) -> None:
    for output in ("torch", "numpy"):
        options: dict[str, Any] = {"batch_size": 64, "transform": odd, "output": output}
        here = all_of(penstock.Loader(blobs, workers="here", threads=1, **options))
        apart = penstock.Loader(blobs, workers=2, **options)
        assert_same(all_of(apart), here)
        assert apart.stats().sent_bytes > 0


def joined(samples: list[Any]) -> Any:
    return torch.stack([s["head"] for s in samples]), [s["cls"] for s in samples]


def test_the_users_own_collate_and_padding_run_in_a_worker(blobs: penstock.Dataset) -> None:
    def collated(workers: Any) -> list[Any]:
        with penstock.Loader(
            blobs, batch_size=64, workers=workers, transform=as_tensor, collate=joined
        ) as loader:
            return list(loader)

    assert_same(collated(2), collated("here"))
    options: dict[str, Any] = {"batch_size": 64, "transform": odd_only, "pad": {"ragged": -1}}
    here = all_of(penstock.Loader(blobs, workers="here", **options))
    assert_same(all_of(penstock.Loader(blobs, workers=2, **options)), here)


def as_tensor(sample: dict[str, Any]) -> dict[str, Any]:
    return {"head": torch.from_numpy(doubled(sample)["head"]), "cls": sample["cls"]}


def odd_only(sample: dict[str, Any]) -> dict[str, Any]:
    return {"ragged": odd(sample)["ragged"]}


def test_batches_that_need_no_work_are_copied_by_the_engine(make_rows: MakeRows) -> None:
    rows = make_rows(5000)
    options: dict[str, Any] = {"batch_size": 512, "seed": 1}
    apart = penstock.Loader(rows, workers="processes", **options)
    assert_same(all_of(apart), all_of(penstock.Loader(rows, workers="here", **options)))


def test_blocks_tiers_and_mixtures_are_read_by_the_engine(
    blobs: penstock.Dataset, tmp_path: Path
) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    table = pa.table(
        {
            "bin": [bytes([i % 251]) * (1000 + i) for i in range(400)],
            "cls": list(range(400)),
            "words": [["a"] * (i % 3) for i in range(400)],
        }
    )
    (tmp_path / "table").mkdir()
    pq.write_table(table, tmp_path / "table" / "t.parquet", row_group_size=50)
    blocks = penstock.open(tmp_path / "table")
    (tmp_path / "tier").mkdir()
    tiers = [penstock.Disk(tmp_path / "tier", "100%")]
    for dataset, more in (
        (blocks, {"shuffle": "blocks"}),
        (blobs, {"tiers": tiers}),
        (blocks, {"tiers": tiers, "shuffle": "blocks"}),
        (penstock.Mixture([blobs, blobs[:50]]), {}),
    ):
        options: dict[str, Any] = {"batch_size": 64, "transform": doubled, "epochs": 2, **more}
        here = all_of(penstock.Loader(dataset, workers="here", **options))
        assert_same(all_of(penstock.Loader(dataset, workers=2, **options)), here)


def test_batches_stay_as_they_are_for_as_long_as_they_are_kept(blobs: penstock.Dataset) -> None:
    options: dict[str, Any] = {"batch_size": 60, "transform": odd, "epochs": 3}
    here = all_of(penstock.Loader(blobs, workers="here", **options))
    with penstock.Loader(blobs, workers=2, look_ahead="1MB", **options) as loader:
        kept = [dict(batch) for batch in loader]
    gc.collect()
    for one, other in zip(kept, here, strict=True):
        other.pop("ids")
        assert_same(one, other)


class Remembers:
    """A transform that keeps what it was given, as mix-up does."""

    def __init__(self) -> None:
        self.last: Any = None

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        before, self.last = self.last, np.frombuffer(sample["bin"], np.uint8)
        is_whole = before is None or bool((before == before[0]).all())
        return {"is_whole": is_whole}


def test_a_transform_may_keep_what_it_was_given(blobs: penstock.Dataset, tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    tiers = [penstock.Disk(tmp_path / "tier", "100%")]
    with penstock.Loader(
        blobs, batch_size=10, epochs=4, transform=Remembers(), tiers=tiers, workers=1
    ) as loader:
        for batch in loader:
            assert all(batch["is_whole"])


# -- it just works ---------------------------------------------------------------------------

SCRIPT = """
    import penstock, sys
    factor = int(sys.argv[2])
    class Scaled:
        def __init__(self, n): self.n = n
    def transform(sample):
        return {{"n": sample["cls"] * factor, "scaled": Scaled(sample["cls"])}}
    dataset = penstock.open(sys.argv[1])
    loader = penstock.Loader(dataset, batch_size=100, workers=2, {how})
    total = 0
    for batch in loader:
        total += int(sum(batch["n"]))
        assert all(type(s) is Scaled for s in batch.get("scaled", []))
    print(total)
"""


@pytest.mark.parametrize(
    "how", ["transform=transform", "transform=lambda s: {'n': s['cls'] * factor}"]
)
def test_functions_of_a_script_without_a_guard_work(blobs: penstock.Dataset, how: str) -> None:
    script = textwrap.dedent(SCRIPT.format(how=how))
    run = subprocess.run(
        [sys.executable, "-c", script, blobs.uri, "3"], capture_output=True, text=True, check=True
    )
    assert run.stdout == f"{3 * sum(range(300))}\n"
    assert run.stderr == ""


def test_an_error_in_a_transform_arrives_with_its_traceback(blobs: penstock.Dataset) -> None:
    class OwnError(Exception):
        pass

    def failing(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] == 123:
            raise OwnError(f"cannot use {sample['cls']}")
        return {"n": sample["cls"]}

    loader = penstock.Loader(blobs, batch_size=50, transform=failing, workers=2)
    with pytest.raises(OwnError, match="cannot use 123") as caught:
        list(loader)
    assert "in failing" in str(caught.value.__cause__)
    assert any("sample 123" in note for note in caught.value.__notes__)
    with pytest.raises(OwnError):
        list(loader)  # The same epoch, and the engine still works.
    loader.close()


def test_a_transform_that_cannot_travel_stays_here(
    blobs: penstock.Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    lock = threading.Lock()

    def locked(sample: dict[str, Any]) -> dict[str, Any]:
        with lock:
            return {"n": sample["cls"]}

    loader = penstock.Loader(blobs, batch_size=50, transform=locked)
    assert "in this process (something that the user gave cannot be sent" in repr(loader)
    assert len(list(loader)) == 6
    assert "cannot be sent to another process" in caplog.text
    with pytest.raises(OptionError, match="workers=2 is not possible"):
        next(iter(penstock.Loader(blobs, batch_size=50, transform=locked, workers=2)))


def test_warnings_of_the_engine_reach_the_log_of_the_loop(
    make_rows: MakeRows, blobs: penstock.Dataset, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    flag = tmp_path / "killed"

    def once(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] == 77 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"n": sample["cls"]}

    with penstock.Loader(blobs, batch_size=50, transform=once, workers=2) as loader:
        found = sorted(n for batch in loader for n in batch["n"].tolist())
        events = loader.stats().events
    assert found == list(range(300))
    assert len(events) == 1
    assert "was ended by SIGKILL" in events[0]
    assert "its samples are made by another" in caplog.text


def test_a_worker_that_dies_of_a_sample_every_time_is_an_error(blobs: penstock.Dataset) -> None:
    def dying(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] == 77:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"n": sample["cls"]}

    loader = penstock.Loader(blobs, batch_size=50, transform=dying, workers=1, shuffle=None)
    with pytest.raises(WorkerError, match=r"was ended by SIGKILL.*samples .*the 2 that tried"):
        list(loader)
    loader.close()


def engine_of(loader: penstock.Loader) -> int:
    assert loader._client is not None
    return loader._client.engine_pid


def test_an_engine_that_dies_is_started_again_where_the_loop_stands(
    blobs: penstock.Dataset,
) -> None:
    options: dict[str, Any] = {"batch_size": 10, "transform": drawn, "epochs": 2}
    here = all_of(penstock.Loader(blobs, workers=1, **options))
    loader = penstock.Loader(blobs, workers=2, **options)
    found = []
    for n, batch in enumerate(loader):
        found.append({"ids": batch.ids, **batch})
        if n in (0, 31, 44):
            os.kill(engine_of(loader), signal.SIGKILL)
    assert_same(found, here)
    assert loader.stats().samples == 600
    events = loader.stats().events
    assert len(events) == 3
    assert "was ended by SIGKILL; another goes on at epoch 0, position" in events[0]
    loader.close()


def test_an_engine_that_dies_again_and_again_is_an_error(blobs: penstock.Dataset) -> None:
    loader = penstock.Loader(blobs, batch_size=1, transform=doubled, workers=1, look_ahead="1KB")
    with pytest.raises(EngineError, match="SIGKILL, the 6th within an hour"):
        for _ in loader:
            os.kill(engine_of(loader), signal.SIGKILL)
    loader.close()


def test_formats_that_the_user_has_added_are_known_to_workers() -> None:
    example = Path(__file__).parents[2] / "examples" / "custom_format.py"
    script = example.read_text().replace('output="numpy"', 'output="numpy", workers=1')
    assert "workers=1" in script
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("pairs: 30 samples")


def test_a_loader_whose_engine_has_just_died_can_be_closed(blobs: penstock.Dataset) -> None:
    loader = penstock.Loader(blobs, batch_size=10, transform=doubled, workers=1)
    next(iter(loader))
    os.kill(engine_of(loader), signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{engine_of(loader)}").exists())
    assert loader.stats().samples == 10
    loader.close()


def test_descriptors_above_a_thousand_are_no_obstacle(blobs: penstock.Dataset) -> None:
    script = """
        import os, resource, sys, penstock
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
        held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
        dataset = penstock.open(sys.argv[1])
        options = dict(batch_size=100, workers=1, transform=lambda s: {"n": s["cls"]})
        with penstock.Loader(dataset, **options) as loader:
            print(sum(int(batch["n"].sum()) for batch in loader))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), blobs.uri]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.stdout == f"{sum(range(300))}\n", run.stderr


# -- ends ------------------------------------------------------------------------------------


def test_nothing_of_it_runs_in_this_process_and_nothing_is_left(blobs: penstock.Dataset) -> None:
    def threads() -> set[str]:
        return {t.name for t in threading.enumerate() if t.name.startswith("penstock")}

    next(iter(penstock.Loader(blobs, batch_size=50, transform=doubled, workers=1)))
    gc.collect()
    before, num_files = threads(), num_open()
    for _ in range(3):
        with penstock.Loader(blobs, batch_size=50, transform=doubled, workers=1) as loader:
            batches = iter(loader)
            next(batches)
            assert threads() == before
            assert {"penstock-engine", "penstock-worker"} <= set(descendants())
    del batches
    wait_until(lambda: descendants() == ["penstock-start"])
    assert num_open() <= num_files


def test_a_loader_that_nobody_holds_takes_its_processes_along(blobs: penstock.Dataset) -> None:
    loaders = [
        penstock.Loader(blobs, batch_size=50, transform=doubled, workers=1) for _ in range(2)
    ]
    pairs = zip(*loaders, strict=True)
    one, other = next(pairs)
    assert_same(dict(one), dict(other))
    assert descendants().count("penstock-engine") == 2
    del pairs, loaders
    gc.collect()
    wait_until(lambda: "penstock-engine" not in descendants())


def test_a_forked_child_has_its_own_engine_and_leaves_the_parents_alone(
    blobs: penstock.Dataset,
) -> None:
    loader = penstock.Loader(blobs, batch_size=50, transform=doubled, workers=1, seed=1)
    batches = iter(loader)
    first = next(batches).ids.tolist()

    def child() -> Any:
        return next(iter([batch.ids.tolist() for batch in loader]))

    assert in_child(child) == first
    assert len(list(batches)) == 5
    loader.close()


def test_a_forked_child_keeps_the_batch_that_it_sees(blobs: penstock.Dataset) -> None:
    options: dict[str, Any] = {"batch_size": 20, "epochs": 8, "transform": large, "workers": 1}
    loader = penstock.Loader(blobs, look_ahead="1KB", output="numpy", **options)
    batches = iter(loader)
    batch = next(batches)
    expected = batch["x"].copy()
    wait, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(wait, 1)
        os._exit(int(not np.array_equal(batch["x"], expected)))
    os.close(wait)
    try:
        del batch
        for _ in batches:
            pass  # Its memory would be used for one of these.
    finally:
        os.close(go)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    loader.close()


LOOP = """
    import penstock, sys, time
    def transform(sample):
        time.sleep(0.002)
        return {"n": sample["cls"]}
    dataset = penstock.open(sys.argv[1])
    options = dict(batch_size=4, workers=2, epochs=None, transform=transform)
    for batch in penstock.Loader(dataset, **options):
        print("going", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_killed_training_process_takes_engine_and_workers_along(
    blobs: penstock.Dataset, number: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LOOP), blobs.uri],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline() == "going\n"
    mine = [pid for pid in all_pids() if str(process.pid) in command_of(pid)]
    assert len(mine) >= 4, "starter, spawner, engine, workers"
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == -number
    wait_until(lambda: not any(str(process.pid) in command_of(pid) for pid in all_pids()))
    assert "Traceback" not in errors or number == signal.SIGINT
    assert errors.count("Traceback") <= 1


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def all_pids() -> list[int]:
    return [int(p.name) for p in Path("/proc").glob("[0-9]*")]


def command_of(pid: int) -> list[str]:
    """The command line of our own processes names the training process that they belong to."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return []
    return words if "penstock.engine.spawner" in " ".join(words) and state != "Z" else []


# -- memory ----------------------------------------------------------------------------------


def large(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.full(16_384, sample["cls"], np.float32), "raw": sample["bin"]}


def test_memory_is_bounded_by_the_look_ahead(blobs: penstock.Dataset) -> None:
    batch_bytes, look_ahead = 20 * 65_536, 8 << 20
    options: dict[str, Any] = {"batch_size": 20, "transform": large, "epochs": 30, "workers": 2}
    with penstock.Loader(blobs, look_ahead=look_ahead, **options) as loader:
        private = []
        for n, batch in enumerate(loader):
            assert batch["x"][3, 5] == batch["raw"][3].shape[0] - 1000
            if n % 100 == 99:
                time.sleep(0.2)  # Time to make as much ahead as allowed.
                memory = loader.stats().memory
                assert memory is not None
                assert memory.num_processes == 3
                # A buffer has up to an eighth to spare, and eight are kept on top.
                assert memory.shared_bytes <= 1.125 * (look_ahead + 9 * batch_bytes) + (2 << 20)
                private.append(memory.private_bytes)
        assert private[-1] <= private[0] + look_ahead
        assert sum(private) > 0


# -- the choice ------------------------------------------------------------------------------


def test_a_loader_can_be_pickled_while_it_iterates(blobs: penstock.Dataset) -> None:
    loader = penstock.Loader(blobs, batch_size=50, transform=doubled, workers=1, seed=4)
    batches = iter(loader)
    next(batches)
    copy = pickle.loads(pickle.dumps(loader))
    assert copy.state_dict() == loader.state_dict()
    copy.load_state_dict(copy.state_dict())
    assert [b.ids.tolist() for b in copy] == [b.ids.tolist() for b in batches]
    loader.close()
    copy.close()


def test_a_loader_says_where_batches_are_made(blobs: penstock.Dataset) -> None:
    loader = penstock.Loader(blobs, batch_size=50)
    assert "batches made in this process (the data set is small" in repr(loader)
    loader = penstock.Loader(blobs, batch_size=50, transform=doubled)
    assert "batches made by an engine and workers of their own (there is a transform" in repr(
        loader
    )
