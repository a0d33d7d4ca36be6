"""Cases that went wrong once: each of these delivered wrong bytes, stood still or fell over."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.dataset.part import Extents
from penstock.engine.buffers import BufferPool
from penstock.engine.fetcher import Fetcher
from penstock.engine.run_context import RunContext
from penstock.engine.runner import size_of
from penstock.engine.staging import Stager
from penstock.engine.stats import Counters
from penstock.flow import Flow, FlowBudget
from penstock.storage.locate import open_store
from penstock.testing.forks import start_child, wait_for

from .conftest import MakeRows, write_tar


def test_many_single_files_are_never_mixed_up(tmp_path: Path) -> None:
    for i in range(3000):
        (tmp_path / f"{i:05}.txt").write_text(f"{i:05}")
    program = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))  # far fewer than there are samples
import penstock
dataset = penstock.open(sys.argv[1])
for batch in penstock.Loader(dataset, batch_size=64, threads=16, epochs=3, output="numpy"):
    assert [int(t) for t in batch["txt"]] == batch.ids.tolist()
print("all right")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "all right\n", done.stderr


def test_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    for i in range(300):
        np.save(tmp_path / f"{i:03}.npy", np.full((4, 3), i))
    program = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
import penstock
dataset = penstock.open(sys.argv[1])
for batch in penstock.Loader(dataset, batch_size=50, epochs=2, output="numpy"):
    assert (batch["data"] == batch.ids[:, None] // 4).all()
print("all right")
"""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 128
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "all right\n", done.stderr


def test_a_forked_child_keeps_the_batch_it_was_given(make_rows: MakeRows) -> None:
    loader = penstock.Loader(make_rows(20_000), batch_size=2000, output="numpy", epochs=4)
    batches = iter(loader)
    batch = next(batches)
    expected = batch["data"].sum()

    def child() -> bool:
        os.read(go, 1)  # until the parent has used the memory of this batch for others
        return bool(batch["data"].sum() == expected)

    go, say_go = os.pipe()
    started = start_child(child)
    batch = None  # type: ignore[assignment]
    assert len(list(batches)) == 39
    os.write(say_go, b"!")
    assert wait_for(started)


def test_a_field_that_a_sample_lacks_is_none(tmp_path: Path) -> None:
    write_tar(tmp_path / "both" / "a.tar", [{"x.cls": b"1", "y.cls": b"2"}] * 20)
    write_tar(tmp_path / "one" / "a.tar", [{"x.cls": b"3"}] * 20)
    mixture = penstock.Mixture([penstock.open(tmp_path / "both"), penstock.open(tmp_path / "one")])

    def as_arrays(sample: dict[str, Any]) -> dict[str, Any]:
        return {k: np.array([v]) for k, v in sample.items() if v is not None}

    for batch in penstock.Loader(mixture, batch_size=8, transform=as_arrays, output="numpy"):
        for i, x, y in zip(batch.ids.tolist(), batch["x.cls"], batch["y.cls"], strict=True):
            assert x[0] == (1 if i < 20 else 3)
            assert (y is None) if i >= 20 else (y[0] == 2)


def test_records_with_padding_between_fields_are_gathered_right(tmp_path: Path) -> None:
    rows = np.zeros(50, np.dtype([("a", "u1"), ("b", "<i4"), ("c", "<f8", (2,))], align=True))
    rows["a"], rows["b"], rows["c"] = np.arange(50), np.arange(50) * 100, np.arange(50)[:, None]
    np.save(tmp_path / "rows.npy", rows)
    dataset = penstock.open(tmp_path)
    for batch in penstock.Loader(dataset, batch_size=8, output="numpy"):
        assert (batch["a"] == batch.ids).all()
        assert (batch["b"] == batch.ids * 100).all()
        assert (batch["c"] == batch.ids[:, None]).all()


def test_empty_files_are_samples_too(tmp_path: Path) -> None:
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text("x" * (i % 3))
    (batch,) = penstock.Loader(penstock.open(tmp_path), batch_size=10, output="numpy")
    assert [len(t) for t in batch["txt"]] == [i % 3 for i in batch.ids]


def test_a_transform_in_place_changes_nobody_elses_sample(s3: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "ones.npy", np.ones((30, 4)))
    store = open_store(s3.uri, s3.options)
    store.write("ones.npy", (tmp_path / "ones.npy").read_bytes())
    dataset = penstock.open(f"{s3.uri.rstrip('/')}/ones.npy", store=s3.options)

    def doubled(sample: dict[str, Any]) -> dict[str, Any]:
        sample["data"] *= 2
        return sample

    for shuffle in ("blocks", "global"):
        loader = penstock.Loader(
            dataset, batch_size=40, epochs=3, shuffle=shuffle, transform=doubled, output="numpy"
        )
        for batch in loader:
            assert (batch["data"] == 2).all()


def test_objects_are_told_apart_whatever_their_number() -> None:
    numbers = np.array([4_194_309, 1, 2_097_152, 5])
    extents = Extents(
        object=numbers,
        offset=np.array([0, 10, 20, 30]),
        length=np.array([5, 5, 5, 5]),
        row=np.zeros(4, np.int64),
        block=np.arange(4),
    )
    group: Any = type(
        "Group", (), {"extents": (extents,), "bound": None, "local_ids": np.arange(4)}
    )
    stager = Stager(
        BufferPool(10**6),
        RunContext(counters=Counters()),
        stage_bytes=10**6,
        runs=None,
        rates=Fetcher(Flow(budget=FlowBudget(stage_bytes_max=1)), requests_max=1),
    )
    _, reads = stager._stage_ranges(group)
    assert sorted(read._at.object for read in reads) == sorted(numbers.tolist())  # type: ignore[attr-defined]


def test_resuming_where_no_full_batch_is_left_goes_on_with_the_next_epoch(
    make_rows: MakeRows,
) -> None:
    dataset = make_rows(100)
    small = penstock.Loader(dataset, batch_size=32, drop_last=True, output="numpy")
    state = small.state_dict() | {"position": 64}
    large = penstock.Loader(dataset, batch_size=64, drop_last=True, output="numpy")
    large.load_state_dict(state)
    assert [b.epoch for b in large] == [1]
    assert [b.epoch for b in large] == [2]


def test_each_use_of_a_sample_has_random_numbers_of_its_own(make_rows: MakeRows) -> None:
    def noise(sample: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        return {"noise": generator.random()}

    mixture = penstock.Mixture([make_rows(4), make_rows(100)], [0.5, 0.5])
    seen: dict[int, list[float]] = {}
    for batch in penstock.Loader(mixture, batch_size=16, transform=noise, output="numpy"):
        for i, value in zip(batch.ids[batch.mask], batch["noise"][batch.mask], strict=True):
            seen.setdefault(int(i), []).append(float(value))
    assert len(seen[0]) >= 10
    assert len(set(seen[0])) == len(seen[0])


def test_tensors_count_towards_the_look_ahead() -> None:
    torch = pytest.importorskip("torch")
    assert size_of({"x": [torch.zeros(1000)], "y": np.zeros(10)}) == 4080


def test_a_closed_iteration_hands_out_nothing_and_moves_nothing(make_rows: MakeRows) -> None:
    loader = penstock.Loader(make_rows(1000), batch_size=10, output="numpy")
    old = iter(loader)
    next(old), next(old)
    loader.load_state_dict(loader.state_dict() | {"position": 500})
    with pytest.raises(StopIteration):
        next(old)
    assert loader.state_dict()["position"] == 500


def test_an_error_in_a_transform_names_the_sample(blobs: penstock.Dataset) -> None:
    def fails(sample: dict[str, Any]) -> Any:
        raise KeyError("nothing here")

    with pytest.raises(KeyError) as caught:
        list(penstock.Loader(blobs, batch_size=10, transform=fails))
    assert any("in the transform of sample" in note for note in caught.value.__notes__)
