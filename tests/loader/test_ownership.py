"""What a user gets of a sample is the user's own: it can be written to, and nobody else sees it."""

from __future__ import annotations

import copy
import io
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
import zstandard
from PIL import Image

import penstock
import penstock.torch
from penstock import Disk, Memory
from penstock.dataset.mixture import Mixture

NUM = 12
FIXTURES = Path(__file__).parents[1] / "dataset" / "formats" / "fixtures"


def image_bytes(kind: str, number: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((8, 6, 3), 10 * number, np.uint8)).save(file, kind)
    return file.getvalue()


def table() -> pa.Table:
    """Columns of every kind that becomes an array, a list or a dictionary."""
    numbers = range(NUM)
    return pa.table(
        {
            "ragged": [np.arange(n % 4 + 1, dtype=np.float32) for n in numbers],
            "bools": pa.array([[True] * (n + 1) for n in numbers], pa.list_(pa.bool_())),
            "fixed": pa.array([[n] * 5 for n in numbers], pa.list_(pa.int16(), 5)),
            "some_null": pa.array([[n, None] if n % 3 else [n] for n in numbers]),
            "struct": [{"a": [n, n], "b": {"c": [1.5] * n}} for n in numbers],
            "lists": [[[n], [n, n]] for n in numbers],
            "map": pa.array(
                [[("k", [n])] for n in numbers], pa.map_(pa.string(), pa.list_(pa.int8()))
            ),
            "png": [image_bytes("png", n) for n in numbers],
            "text": [str(n) for n in numbers],
        }
    )


def write_parquet(folder: Path) -> None:
    pq.write_table(table(), folder / "a.parquet", row_group_size=5)


def write_arrow(folder: Path) -> None:
    with pa.ipc.new_stream(folder / "a.arrow", table().schema) as writer:
        writer.write_table(table(), max_chunksize=5)


def write_feather(folder: Path) -> None:
    pyarrow.feather.write_feather(table(), str(folder / "a.feather"), chunksize=5)


def fixture(name: str) -> Callable[[Path], None]:
    return lambda folder: shutil.copytree(FIXTURES / name, folder, dirs_exist_ok=True) and None


def write_tar(folder: Path) -> None:
    with penstock.Writer(folder) as writer:
        for n in range(NUM):
            arrays = {"npy": np.arange(n + 1), "npz": {"x": np.ones(n + 1)}}
            images = {kind: image_bytes(kind.replace("jpg", "jpeg"), n) for kind in ("png", "jpg")}
            writer.write({**arrays, **images, "json": {"a": [n], "b": {}}, "cls": n})


def write_npy(folder: Path) -> None:
    np.save(folder / "a.npy", np.arange(NUM * 4).reshape(NUM, 4))


def write_records(folder: Path) -> None:
    with penstock.Writer(folder, format="npy") as writer:
        for n in range(NUM):
            writer.write({"x": np.full(3, n, np.float32), "y": np.int64(n)})


def write_jsonl(folder: Path) -> None:
    lines = "".join(f'{{"a": [{n}, 1], "b": {{"c": "{n}"}}}}\n' for n in range(NUM))
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))


def write_files(folder: Path) -> None:
    for n in range(NUM):
        (folder / f"{n:03}.png").write_bytes(image_bytes("png", n))


WRITERS: dict[str, Callable[[Path], None]] = {
    "parquet": write_parquet,
    "arrow": write_arrow,
    "feather": write_feather,
    "tar": write_tar,
    "npy": write_npy,
    "records": write_records,
    "jsonl_zst": write_jsonl,
    "files": write_files,
    "mds": fixture("mds/all"),
    "mds_zstd": fixture("mds/zstd"),
    **{
        f"litdata_{name}": fixture(f"litdata/{name}")
        for name in ("dict", "tuple", "arrow", "batch_zstd", "chunk_zstd", "sample_zstd")
    },
    "hf_parquet": fixture("hf_parquet"),
    "hf_arrow": fixture("hf_arrow/train"),
}
BLOCKS = ("parquet", "arrow", "mds_zstd", "litdata_chunk_zstd")


@pytest.fixture
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> penstock.Dataset:
    folder = tmp_path / "data"
    folder.mkdir()
    WRITERS[request.param](folder)
    options = {"split": "train"} if request.param == "hf_parquet" else {}
    return penstock.open(folder, **options)


def arrays_in(value: Any) -> Iterator[np.ndarray[Any, Any]]:
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from arrays_in(inner)


def spoil(value: Any, *, by_torch: bool = False) -> Any:
    """Change in place everything that can be changed, and return what it was."""
    before = copy.deepcopy(value)
    for array in arrays_in(value):
        assert array.flags.writeable
        if by_torch and array.dtype.str[1:] in ("f4", "f8", "i2", "i4", "i8", "u1"):
            torch.from_numpy(array).add_(1)
        elif array.dtype.kind == "b":
            np.logical_not(array, out=array)
        elif array.dtype.kind in "fiu":
            array[...] += 1
    _spoil_containers(value)
    return before


def _spoil_containers(value: Any) -> None:
    if isinstance(value, dict | list):
        for inner in list(value.values()) if isinstance(value, dict) else list(value):
            _spoil_containers(inner)
        if isinstance(value, dict):
            value["spoilt"] = True
        else:
            value.append("spoilt")
    elif isinstance(value, tuple):
        for inner in value:
            _spoil_containers(inner)


def spoil_by_numpy(sample: dict[str, Any]) -> dict[str, Any]:
    return {"value": spoil(sample)}


def spoil_by_torch(sample: dict[str, Any]) -> dict[str, Any]:
    return {"value": spoil(sample, by_torch=True)}


def epochs_of(dataset: Any, **options: Any) -> list[dict[int, Any]]:
    """Return the samples of two epochs by their number."""
    found: list[dict[int, Any]] = [{}, {}]
    options = {"batch_size": 5, "epochs": 2, "output": "numpy", **options}
    with penstock.Loader(dataset, **options) as loader:
        for batch in loader:
            values = zip(batch.ids.tolist(), batch["value"], batch.mask.tolist(), strict=True)
            found[batch.epoch].update({i: value for i, value, is_kept in values if is_kept})
    return found


def assert_same(one: Any, other: Any) -> None:
    np.testing.assert_equal(one, other)


@pytest.mark.parametrize("opened", WRITERS, indirect=True)
def test_a_transform_that_writes_in_place_changes_no_later_epoch(opened: penstock.Dataset) -> None:
    expected = {i: copy.deepcopy(opened[i]) for i in range(len(opened))}
    # In threads and in worker processes samples come out of different memory.
    here = epochs_of(opened, transform=spoil_by_numpy, workers="here")
    assert_same(here, [expected, expected])
    apart = epochs_of(opened, transform=spoil_by_torch, workers=1)
    assert_same(apart, [expected, expected])


@pytest.mark.parametrize(
    ("opened", "tier"),
    [(name, "memory") for name in (*BLOCKS, "tar", "npy", "mds")] + [("arrow", "disk")],
    indirect=["opened"],
)
def test_nor_what_lies_in_a_tier(opened: penstock.Dataset, tier: str, tmp_path: Path) -> None:
    expected = {i: copy.deepcopy(opened[i]) for i in range(len(opened))}
    folder = tmp_path / "tier"
    folder.mkdir()
    tiers = [Memory("1GB", folder=folder) if tier == "memory" else Disk(folder, "1GB")]
    for workers in (1, "here"):  # The second run finds the tier filled.
        first, second = epochs_of(opened, transform=spoil_by_numpy, tiers=tiers, workers=workers)
        assert_same(first, expected)
        assert_same(second, expected)


@pytest.mark.parametrize(
    ("opened", "with_tier"), [("parquet", True), ("mds_zstd", False)], indirect=["opened"]
)
def test_nor_in_worker_processes(opened: penstock.Dataset, with_tier: bool, tmp_path: Path) -> None:
    expected = {i: copy.deepcopy(opened[i]) for i in range(len(opened))}
    (tmp_path / "tier").mkdir()
    tiers = [Disk(tmp_path / "tier", "1GB")] if with_tier else []
    found = epochs_of(opened, transform=spoil_by_numpy, tiers=tiers, workers=1)
    assert_same(found, [expected, expected])


@pytest.mark.parametrize("opened", ["parquet", "litdata_chunk_zstd"], indirect=True)
def test_nor_what_a_mixture_draws_twice(opened: penstock.Dataset) -> None:
    mixture = Mixture([opened, opened], [0.5, 0.5])
    with penstock.Loader(
        mixture, batch_size=4, epochs=2, transform=spoil_by_numpy, output="numpy"
    ) as loader:
        for batch in loader:
            for i, value in zip(batch.ids.tolist(), batch["value"], strict=True):
                assert_same(value, opened[i % len(opened)])


@pytest.mark.parametrize("opened", WRITERS, indirect=True)
def test_samples_by_number_and_in_a_loop_share_nothing(opened: penstock.Dataset) -> None:
    expected = [spoil(opened[i]) for i in range(len(opened))]
    assert_same([spoil(sample) for sample in opened], expected)
    assert_same(opened.__getitems__(range(len(opened))), expected)


@pytest.mark.parametrize("opened", [*BLOCKS, "tar", "files"], indirect=True)
def test_a_collate_function_gets_samples_of_its_own(opened: penstock.Dataset) -> None:
    def collate(samples: list[Any]) -> dict[str, Any]:
        return {"value": [spoil(sample) for sample in samples]}

    expected = {i: copy.deepcopy(opened[i]) for i in range(len(opened))}
    assert_same(epochs_of(opened, collate=collate), [expected, expected])


@pytest.mark.parametrize(
    ("opened", "output"),
    [(name, "numpy") for name in WRITERS] + [(name, "torch") for name in BLOCKS],
    indirect=["opened"],
)
def test_batches_can_be_written_to_and_the_next_epoch_is_as_stored(
    opened: penstock.Dataset, output: str
) -> None:
    options: dict[str, Any] = {"batch_size": 5, "epochs": 2, "output": output, "shuffle": None}
    with penstock.Loader(opened, **options) as loader:
        for batch in loader:
            for name, values in batch.items():
                for i, value in zip(batch.ids.tolist(), values, strict=True):
                    array = value.numpy() if isinstance(value, torch.Tensor) else value
                    expected = opened[i][name]
                    # Bytes of a sample are uint8 in a batch.
                    is_raw = isinstance(expected, bytes)
                    assert_same(bytes(array) if is_raw else array, expected)
                    spoil(array)


@pytest.mark.parametrize("opened", ["tar", "npy", "parquet"], indirect=True)
@pytest.mark.parametrize("output", ["numpy", "torch"])
def test_batches_that_are_kept_stay_as_they_are(opened: penstock.Dataset, output: str) -> None:
    raw = opened.with_decoders(dict.fromkeys(opened.fields))
    for dataset in (opened, raw):
        with penstock.Loader(dataset, batch_size=4, epochs=20, output=output) as loader:
            kept = [(batch, copy.deepcopy(dict(batch))) for batch in loader]
        for batch, copied in kept:
            for name, values in batch.items():
                for value, was in zip(values, copied[name], strict=True):
                    is_tensor = isinstance(value, torch.Tensor)
                    assert_same(*((value.numpy(), was.numpy()) if is_tensor else (value, was)))


@pytest.mark.parametrize("opened", ["parquet", "mds_zstd", "tar"], indirect=True)
def test_a_decoder_of_the_users_gets_bytes_of_its_own(opened: penstock.Dataset) -> None:
    field = (
        "png"
        if "png" in opened.fields
        else next(name for name, f in opened.fields.items() if f.encoding != "value")
    )

    def decode(data: memoryview) -> np.ndarray[Any, Any]:
        array = np.frombuffer(data, np.uint8)
        was = array.copy()
        array += 1
        return was

    changed = opened.with_decoders({field: decode})
    first = [changed[i][field] for i in range(len(changed))]
    assert_same([changed[i][field] for i in range(len(changed))], first)
    kept = changed.with_decoders({field: None})
    assert [bytes(kept[i][field]) for i in range(len(kept))] == [a.tobytes() for a in first]


@pytest.mark.parametrize("opened", ["parquet", "mds_zstd"], indirect=True)
def test_torchs_data_loader_gets_samples_of_its_own(opened: penstock.Dataset) -> None:
    expected = {str(spoil(opened[i])) for i in range(len(opened))}
    view = penstock.torch.IterableDataset(
        opened, samples=True, batch_size=1, transform=spoil_by_numpy, output="numpy"
    )
    for _ in range(2):
        assert {str(sample["value"]) for sample in view} == expected


@pytest.mark.parametrize("opened", ["npy", "parquet"], indirect=True)
@pytest.mark.parametrize("shuffle", ["global", "blocks", None])
def test_the_numbers_of_a_batch_are_the_users_too(opened: penstock.Dataset, shuffle: Any) -> None:
    found: list[list[list[int]]] = []
    for is_spoilt in (False, True):
        found.append([])
        options = {"batch_size": 5, "epochs": 3, "shuffle": shuffle, "output": "numpy"}
        with penstock.Loader(opened, **options) as loader:
            for batch in loader:
                found[-1].append([*batch.ids.tolist(), *batch.mask.tolist()])
                for numbers in (batch.ids, batch.mask, batch.positions) if is_spoilt else ():
                    numbers[...] = 0
    assert found[0] == found[1]
