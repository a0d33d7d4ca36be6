"""What a batch holds: arrays, ragged lists, padding, bytes; and that nothing is overwritten."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.engine.block_cache import BlockCache
from penstock.engine.buffers import BufferPool
from penstock.errors import DecodeError, OptionError
from penstock.trace import Kind, read_trace

from .conftest import MakeRows, write_tar


def test_rows_arrive_as_one_contiguous_array(make_rows: MakeRows) -> None:
    for batch in penstock.Loader(make_rows(100), batch_size=16, output="numpy"):
        assert batch["data"].shape == (16, 16)
        assert batch["data"].dtype == np.int32
        assert batch["data"].flags.c_contiguous
        assert (batch["data"][:, 0] == batch.ids * 16).all()


def test_torch_gets_tensors_of_the_same_memory(make_rows: MakeRows) -> None:
    torch = pytest.importorskip("torch")
    batch = next(iter(penstock.Loader(make_rows(100), batch_size=16)))
    assert batch["data"].dtype == torch.int32
    assert batch.ids.dtype == torch.int64
    assert batch.mask.dtype == torch.bool
    assert batch["data"][:, 0].tolist() == (batch.ids * 16).tolist()


def test_decoded_numbers_are_an_array_and_ragged_bytes_a_list(blobs: penstock.Dataset) -> None:
    for batch in penstock.Loader(blobs, batch_size=32, output="numpy"):
        assert batch["cls"].tolist() == batch.ids.tolist()
        assert [len(b) for b in batch["bin"]] == [1000 + i for i in batch.ids]
        assert all(set(b) == {i % 251} for b, i in zip(batch["bin"], batch.ids, strict=True))


def test_bytes_that_need_no_work_are_views_of_one_buffer(blobs: penstock.Dataset) -> None:
    raw = blobs.with_decoders({"cls": None})
    for batch in penstock.Loader(raw, batch_size=32, output="numpy"):
        for data, text, i in zip(batch["bin"], batch["cls"], batch.ids.tolist(), strict=True):
            assert bytes(text) == str(i).encode()
            assert len(data) == 1000 + i
            assert (data == i % 251).all()


def test_batches_that_are_kept_are_never_overwritten(make_rows: MakeRows) -> None:
    dataset = make_rows(5000)
    kept = list(penstock.Loader(dataset, batch_size=512, output="numpy", epochs=4))
    for batch in kept:
        assert (batch["data"] == batch.ids[:, None] * 16 + np.arange(16)).all()


@given(sizes=st.lists(st.integers(1, 300_000), min_size=1, max_size=20), data=st.data())
def test_a_buffer_is_leased_to_one_holder_at_a_time(sizes: list[int], data: Any) -> None:
    pool = BufferPool(size_bytes_max=10**6)
    held: list[tuple[Any, int]] = []
    for number, size in enumerate(sizes):
        array = pool.array((size,), np.uint8)
        array.fill(number)
        held.append((array[size // 2 :], number))
        if data.draw(st.booleans()):
            held.pop(data.draw(st.integers(0, len(held) - 1)))
        for view, mark in held:
            assert (view == mark).all()


def test_a_buffer_returns_when_its_last_view_is_gone() -> None:
    pool = BufferPool(size_bytes_max=10**7)
    first = pool.array((1 << 20,), np.uint8)
    place = first.ctypes.data
    view = first[5:10].reshape(5, 1)
    del first
    gc.collect()
    assert pool.array((1 << 20,), np.uint8).ctypes.data != place
    del view
    gc.collect()
    assert pool.array((1 << 20,), np.uint8).ctypes.data == place


def test_blocks_are_loaded_once_and_dropped_by_last_use() -> None:
    stage = BlockCache(size_bytes_max=30)
    loads: list[str] = []

    def get(name: str) -> str:
        def load() -> tuple[str, int]:
            loads.append(name)
            return name.upper(), 10

        return str(stage.get(name, load))

    stage.pin(["a", "b"])
    assert [get(n) for n in "abcab"] == ["A", "B", "C", "A", "B"]
    get("d"), get("e")
    assert loads == ["a", "b", "c", "d", "e"]
    assert stage.size_bytes == 30, "c and d had to go; a and b are pinned"
    stage.unpin(["a", "b"])
    get("a"), get("f"), get("g")
    assert loads == ["a", "b", "c", "d", "e", "f", "g"]
    assert stage.size_bytes <= 30


def test_ragged_arrays_are_padded_on_request(tmp_path: Path) -> None:
    def npy(i: int) -> bytes:
        import io

        out = io.BytesIO()
        np.save(out, np.full((i % 5 + 1, 2), i, np.float32))
        return out.getvalue()

    write_tar(tmp_path / "r" / "a.tar", [{"x.npy": npy(i)} for i in range(40)])
    dataset = penstock.open(tmp_path / "r")
    ragged = next(iter(penstock.Loader(dataset, batch_size=20, output="numpy")))
    assert isinstance(ragged["x.npy"], list)
    for batch in penstock.Loader(dataset, batch_size=20, output="numpy", pad={"x.npy": -1}):
        assert batch["x.npy"].shape == (20, 5, 2)
        for i, row in zip(batch.ids.tolist(), batch["x.npy"], strict=True):
            assert (row[: i % 5 + 1] == i).all()
            assert (row[i % 5 + 1 :] == -1).all()
    with pytest.raises(OptionError, match="names a field 'y'"):
        next(iter(penstock.Loader(dataset, batch_size=20, pad={"y": 0})))


def test_transform_sees_what_dataset_i_returns(blobs: penstock.Dataset) -> None:
    seen: dict[int, Any] = {}

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        seen[sample["cls"]] = sample
        return {"n": np.int64(sample["cls"]), "size": len(sample["bin"])}

    loader = penstock.Loader(
        blobs, batch_size=50, transform=transform, output="numpy", workers="here"
    )
    for batch in loader:
        assert batch["n"].tolist() == batch.ids.tolist()
        assert batch["size"].tolist() == (batch.ids + 1000).tolist()
    assert seen[7] == blobs[7]
    assert type(seen[7]["bin"]) is type(blobs[7]["bin"]) is bytes


def test_random_numbers_belong_to_the_sample_not_to_the_thread(blobs: penstock.Dataset) -> None:
    def transform(sample: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        return {"noise": generator.standard_normal(4)}

    def noise(epoch: int, **options: Any) -> dict[int, list[float]]:
        loader = penstock.Loader(blobs, transform=transform, seed=3, output="numpy", **options)
        loader.set_epoch(epoch)
        return {
            int(i): row.tolist()
            for batch in loader
            for i, row in zip(batch.ids, batch["noise"], strict=True)
        }

    one = noise(0, batch_size=32, threads=1)
    assert one == noise(0, batch_size=7, threads=4)
    assert one != noise(1, batch_size=32)


def test_collate_decides_what_a_batch_is(blobs: penstock.Dataset) -> None:
    loader = penstock.Loader(blobs, batch_size=10, collate=lambda s: [x["cls"] for x in s])
    assert sorted(n for batch in loader for n in batch) == list(range(300))


def test_an_error_names_the_sample_and_keeps_its_traceback(tmp_path: Path) -> None:
    samples = [{"json": b'{"a": 1}' if i != 13 else b"{broken"} for i in range(20)]
    write_tar(tmp_path / "j" / "a.tar", samples)
    dataset = penstock.open(tmp_path / "j")
    with pytest.raises(DecodeError, match=r"field 'json' .* of sample 13 \(000013\) in .*a.tar"):
        list(penstock.Loader(dataset, batch_size=5))

    def fragile(sample: dict[str, Any]) -> dict[str, Any]:
        raise ZeroDivisionError("here")

    good = dataset.select([i for i in range(20) if i != 13])
    with pytest.raises(ZeroDivisionError) as caught:
        list(penstock.Loader(good, batch_size=5, transform=fragile, workers="here"))
    assert caught.traceback[-1].name == "fragile"


def test_stats_count_bytes_samples_and_time(blobs: penstock.Dataset) -> None:
    raw = blobs.with_decoders({"cls": None})
    with penstock.Loader(raw, batch_size=30, output="numpy") as loader:
        for _ in loader:
            pass
        stats = loader.stats()
    assert (stats.samples, stats.batches) == (300, 10)
    assert stats.sources["folder"].size_bytes == raw.size_bytes
    assert stats.sources["folder"].requests == 300
    assert 0 <= stats.stall_s <= stats.elapsed_s


def test_a_trace_tells_what_happened(blobs: penstock.Dataset, tmp_path: Path) -> None:
    with penstock.Loader(blobs, batch_size=30, trace=tmp_path / "run") as loader:
        list(loader)
    trace = read_trace(tmp_path / "run")
    assert trace.of(Kind.NEXT)["step"].tolist() == list(range(10))
    assert trace.of(Kind.NEXT)["count"].sum() == 300
    assert trace.of(Kind.DECODE)["count"].sum() == 300
    assert len(trace.of(Kind.PLAN)) == 10


def test_a_batch_moves_as_a_whole(make_rows: MakeRows) -> None:
    torch = pytest.importorskip("torch")
    batch = next(iter(penstock.Loader(make_rows(10), batch_size=5)))
    moved = batch.to("cpu", torch.float64)
    assert moved["data"].dtype == torch.float64
    assert (moved.epoch, moved.step) == (batch.epoch, batch.step)


def test_many_parallel_arrays_and_records_are_gathered(tmp_path: Path) -> None:
    side, records = tmp_path / "side", tmp_path / "records"
    side.mkdir(), records.mkdir()
    for shard in range(3):
        ids = np.arange(shard * 40, shard * 40 + 40)
        np.save(side / f"s-{shard}.image.npy", np.repeat(ids, 6).reshape(40, 2, 3).astype(np.uint8))
        np.save(side / f"s-{shard}.label.npy", ids.astype(np.int64))
        kind = np.dtype([("x", "<f4", (3,)), ("y", "<i8")])
        rows = np.zeros(40, kind)
        rows["x"], rows["y"] = ids[:, None] / 2, ids
        np.save(records / f"s-{shard}.npy", rows)
    for batch in penstock.Loader(penstock.open(side), batch_size=17, output="numpy"):
        assert batch["label"].tolist() == batch.ids.tolist()
        assert batch["image"].shape == (17, 2, 3)
        assert (batch["image"][:, 1, 2] == batch.ids).all()
    for batch in penstock.Loader(penstock.open(records), batch_size=17, output="numpy"):
        assert batch["y"].tolist() == batch.ids.tolist()
        assert (batch["x"][:, 2] == batch.ids / 2).all()


def test_token_windows_may_overlap(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(10_000, dtype=np.uint16))
    dataset = penstock.open(tmp_path / "tokens.npy", sequence_length=129, sequence_stride=128)
    for batch in penstock.Loader(dataset, batch_size=8, output="numpy"):
        assert (batch["data"][:, 0] == batch.ids * 128).all()
        assert (batch["data"][:, 128] == batch.ids * 128 + 128).all()
