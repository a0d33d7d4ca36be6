"""Loading from a real S3 server: the same batches, few requests, each byte once where it can be."""

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.engine import stream
from penstock.errors import StoreError
from penstock.storage.locate import open_store
from penstock.testing.forks import in_child, start_child, wait_for

from .conftest import write_tar

NUM_SAMPLES = 400


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two tars of 200 samples of about 10 kB each."""
    for shard in range(2):
        first = shard * 200
        samples = [
            {"bin": bytes([i % 251]) * (10_000 + i), "cls": str(i).encode()}
            for i in range(first, first + 200)
        ]
        write_tar(tmp_path / "local" / f"x-{shard}.tar", samples, first)
    return tmp_path / "local"


@pytest.fixture
def remote(s3: Any, folder: Path) -> penstock.Dataset:
    store = open_store(s3.uri, s3.options)
    for path in sorted(folder.glob("*.tar")):
        store.write(f"set/{path.name}", path.read_bytes())
    return penstock.open(f"{s3.uri.rstrip('/')}/set/", store=s3.options)


def ids_and_checks(loader: penstock.Loader) -> list[list[int]]:
    out = []
    for batch in loader:
        assert [len(b) for b in batch["bin"]] == [10_000 + i for i in batch.ids.tolist()]
        assert [int(b[-1]) for b in batch["bin"]] == [i % 251 for i in batch.ids.tolist()]
        out.append(batch.ids.tolist())
    return out


@pytest.mark.parametrize("shuffle", ["global", "blocks", None])
@pytest.mark.parametrize("decoders", [{}, {"cls": None}])
def test_a_remote_set_gives_the_same_batches_as_a_local_one(
    remote: penstock.Dataset, folder: Path, shuffle: Any, decoders: Any
) -> None:
    options: dict[str, Any] = {"batch_size": 32, "seed": 4, "shuffle": shuffle, "output": "numpy"}
    far = remote.with_decoders(decoders)
    near = penstock.open(folder).with_decoders(decoders)
    assert far.fingerprint == near.fingerprint
    expected = ids_and_checks(penstock.Loader(near, **options))
    assert ids_and_checks(penstock.Loader(far, **options)) == expected


def test_near_samples_are_read_together(remote: penstock.Dataset) -> None:
    loader = penstock.Loader(remote, batch_size=100, shuffle=None)
    assert len(list(loader)) == 4
    assert loader.stats().sources["s3"].requests <= 4


def test_blocks_read_every_byte_once(
    remote: penstock.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "RUN_BYTES", 100_000)
    loader = penstock.Loader(remote, batch_size=16, shuffle="blocks", seed=3, output="numpy")
    seen = sorted(i for ids in ids_and_checks(loader) for i in ids)
    assert seen == list(range(NUM_SAMPLES))
    reads = loader.stats().sources["s3"]
    assert loader.order.num_blocks > 20  # type: ignore[attr-defined]
    assert reads.requests == loader.order.num_blocks  # type: ignore[attr-defined]
    # Headers between the samples of a run come along; nothing comes twice.
    assert remote.size_bytes <= reads.size_bytes <= 1.15 * remote.size_bytes


def test_rows_of_a_remote_array_are_gathered(s3: Any, tmp_path: Path) -> None:
    rows = np.arange(5000 * 8, dtype=np.int64).reshape(5000, 8)
    np.save(tmp_path / "rows.npy", rows)
    store = open_store(s3.uri, s3.options)
    store.write("rows.npy", (tmp_path / "rows.npy").read_bytes())
    for shuffle in ("global", "blocks", None):
        dataset = penstock.open(f"{s3.uri.rstrip('/')}/rows.npy", store=s3.options)
        loader = penstock.Loader(dataset, batch_size=500, shuffle=shuffle, output="numpy")
        for batch in loader:
            assert (batch["data"] == rows[batch.ids]).all()


def test_children_forked_after_the_parent_has_read_get_the_right_bytes(
    remote: penstock.Dataset,
) -> None:
    options: dict[str, Any] = {"batch_size": 40, "seed": 8, "output": "numpy"}
    expected = ids_and_checks(penstock.Loader(remote, **options))

    def child() -> list[list[int]]:
        return ids_and_checks(penstock.Loader(remote, **options))

    children = [start_child(child) for _ in range(5)]
    assert [wait_for(c) for c in children] == [expected] * 5
    assert in_child(lambda: remote[7]["cls"]) == 7


def _ids_in_a_process(dataset: penstock.Dataset) -> list[list[int]]:
    return ids_and_checks(penstock.Loader(dataset, batch_size=40, seed=8, output="numpy"))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_every_way_to_start_a_process_works(remote: penstock.Dataset, method: Any) -> None:
    expected = _ids_in_a_process(remote)
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(_ids_in_a_process, [remote] * 2) == [expected] * 2


def test_an_object_that_vanished_is_named(remote: penstock.Dataset) -> None:
    remote.store.delete("x-1.tar")
    with pytest.raises(StoreError, match=r"x-1\.tar"):
        list(penstock.Loader(remote, batch_size=40))
