"""Batches that are made a field at a time hold what batches made sample by sample hold."""

import io
import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import penstock
from penstock.dataset.fields import COLUMN_DECODERS, is_raw
from penstock.engine.columnar import can_make_columns
from penstock.errors import DatasetError

from .conftest import write_tar

FIXTURES = Path(__file__).parents[1] / "dataset" / "formats" / "fixtures"
some = settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # To shrink takes two loaders each time.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def first_batch(dataset: penstock.Dataset, **options: Any) -> dict[str, Any]:
    options = {"shuffle": False, "output": "numpy", "threads": 1} | options
    with penstock.Loader(dataset, batch_size=len(dataset), **options) as loader:
        return dict(next(iter(loader)))


def as_they_are(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b), (a, b)
    if isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()
        assert a.flags.writeable
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        assert_same(list(a.values()), list(b.values()))
    else:
        assert repr(a) == repr(b)


def assert_same_as_by_sample(dataset: penstock.Dataset, **options: Any) -> None:
    """Compare with a loader whose transform makes it take samples one by one."""
    assert can_make_columns(dataset.bound)
    try:
        expected = first_batch(dataset, transform=as_they_are, **options)
    except DatasetError:
        messages = set()
        for i in range(len(dataset)):
            try:
                dataset[i]
            except DatasetError as error:
                messages.add((type(error), str(error)))
        with pytest.raises(DatasetError) as caught:
            first_batch(dataset, **options)
        assert (type(caught.value), str(caught.value)) in messages
        return
    assert_same(first_batch(dataset, **options), expected)


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def drawn(usual: list[bytes], odd: list[bytes]) -> st.SearchStrategy[list[bytes | None]]:
    """Columns of usual values, and columns with one or two odd ones; None is a missing member."""
    plain = st.lists(st.sampled_from(usual), min_size=6, max_size=6)
    strange = st.lists(st.sampled_from([None, *odd, *usual]), min_size=6, max_size=6)
    return st.one_of(plain, strange)


DEEP = [b"99" * 20, b'"\xff"', b"[" * 200 + b"]" * 200, b"[" * 10**5]
RARE = [
    npy(np.array(["é"])),
    npy(np.eye(3, order="F")[:, :2]),
    npy(np.arange(3, dtype=">f4")),
    b"no array",
    b"",
]
COLUMNS = st.fixed_dictionaries(
    {
        "bin": drawn([b"abc", b"", b"x" * 5000], []),
        "cls": drawn(
            [b"1", b"17", b"-5", b" 7\n", b"+3"],
            [b"1_000", b"9" * 19, b"9" * 25, b"9223372036854775808", b"1\0", b"0x1", b"", b"1.5"],
        ),
        "json": drawn(
            [b'{"a": 1}', b'{"b": [1.5, "x"]}\n', b'{\n "a": {}\n}', b"null", b'"\xc3\xa9"'],
            [b"1", b"2.5", b"true", b"1e400", b"NaN", b"[1", b"2]", b"3,4", b"", b" ", *DEEP],
        ),
        "txt": drawn([b"a", b"", "日本 é".encode(), b"x\n"], [b"\xff", b"a\0b", b"\xe6\x97"]),
        "npy": drawn(
            [npy(np.arange(3, dtype=np.float32))],
            [npy(np.arange(4)), npy(np.float64(2)), npy(np.zeros((0, 2))), *RARE],
        ),
    }
)


@some
@given(columns=COLUMNS, names=st.sets(st.sampled_from(["bin", "cls", "json", "txt", "npy"])))
def test_members_of_a_tar_are_what_they_are_one_by_one(
    tmp_path: Path, columns: dict[str, list[bytes | None]], names: set[str]
) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    samples = [
        {"key": b""} | {n: v for n in sorted(names) if (v := columns[n][i]) is not None}
        for i in range(6)
    ]
    write_tar(folder / "a.tar", samples)
    assert_same_as_by_sample(penstock.open(folder))


TABLE_KINDS = [
    "ints",
    "numbers",
    "flags",
    "texts",
    "blobs",
    "fixed",
    "vectors",
    "tokens",
    "even",
    "structs",
    "times",
    "deep",
]


def table_column(kind: str, has_nulls: bool, num_rows: int) -> Any:
    import pyarrow as pa

    def values(make: Callable[[int], Any]) -> list[Any]:
        return [None if has_nulls and i % 4 == 1 else make(i) for i in range(num_rows)]

    floats = pa.list_(pa.float32(), 3)
    return {
        "ints": lambda: pa.array(values(lambda i: i - 3), pa.int16()),
        "numbers": lambda: pa.array(values(lambda i: np.nan if i % 3 else i / 7), pa.float64()),
        "flags": lambda: pa.array(values(lambda i: i % 3 == 0), pa.bool_()),
        "texts": lambda: pa.array(values(lambda i: "é日"[: i % 3] + "x" * (i % 5)), pa.string()),
        "blobs": lambda: pa.array(values(lambda i: bytes([i]) * (i % 7)), pa.large_binary()),
        "fixed": lambda: pa.array(values(lambda i: bytes([i]) * 4), pa.binary(4)),
        "vectors": lambda: pa.array(values(lambda i: [i, i + 0.5, -i]), floats),
        "tokens": lambda: pa.array(values(lambda i: list(range(i % 4))), pa.list_(pa.int32())),
        "even": lambda: pa.array(values(lambda i: [i, 2 * i]), pa.list_(pa.uint8())),
        "structs": lambda: pa.array(values(lambda i: {"a": i, "b": [1.0] * i})),
        "times": lambda: pa.array(values(lambda i: i), pa.timestamp("ns")),
        "deep": lambda: pa.array(values(lambda i: [[i], None, [i, None]])),
    }[kind]()


@some
@given(
    kinds=st.dictionaries(st.sampled_from(TABLE_KINDS), st.booleans(), min_size=1),
    rows_a_group=st.sampled_from([1, 5, 40]),
    format=st.sampled_from(["parquet", "arrow"]),
    shuffle=st.sampled_from([False, "global"]),
)
def test_columns_of_a_table_are_what_they_are_row_by_row(
    tmp_path: Path, kinds: dict[str, bool], rows_a_group: int, format: str, shuffle: Any
) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    table = pa.table({kind: table_column(kind, nulls, 17) for kind, nulls in kinds.items()})
    if format == "parquet":
        pq.write_table(table, folder / "t.parquet", row_group_size=rows_a_group)
    else:
        with pa.ipc.new_stream(folder / "t.arrow", table.schema) as out:
            out.write_table(table, max_chunksize=rows_a_group)
    assert_same_as_by_sample(penstock.open(folder), shuffle=shuffle)


def left_as_bytes(dataset: penstock.Dataset) -> penstock.Dataset:
    """Return a data set whose images and other values without a column decoder stay bytes."""
    (bound,) = dataset.bound
    raw = {
        name: None
        for name, (_, decoder) in bound.steps.items()
        if decoder not in COLUMN_DECODERS and not is_raw(decoder)
    }
    return dataset.with_decoders(raw) if raw else dataset


@pytest.mark.parametrize(
    "name",
    [
        *("mds/all", "mds/zstd", "litdata/dict", "litdata/tuple", "litdata/batch_zstd"),
        *("litdata/chunk_zstd", "hf_parquet", "hf_arrow/train"),
    ],
)
def test_columns_of_other_libraries_files_are_what_they_are_one_by_one(name: str) -> None:
    options = {"split": "train"} if name == "hf_parquet" else {}
    dataset = left_as_bytes(penstock.open(FIXTURES / name, **options))
    assert_same_as_by_sample(dataset)


LINES = [
    *(b'{"a": 1, "b": "x"}', b'{"a": 2}', b'{"b": null, "c": 1}', b'{"a": 2.5, "b": []}'),
    *(b'{"a": NaN}', b"17", b"[1]", b'{"a": 1} {"a": 2}', b'{"a": 1,', b'"b": 2}'),
]


@some
@given(
    lines=st.lists(
        st.sampled_from(LINES),
        min_size=1,
        max_size=6,
    )
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_lines_of_json_are_what_they_are_one_by_one(
    tmp_path: Path, lines: list[bytes], is_packed: bool
) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    data = b"\n".join([b'{"a": 0, "b": "first"}', *lines])
    if is_packed:
        (folder / "a.jsonl.zst").write_bytes(zstandard.compress(data))
    else:
        (folder / "a.jsonl").write_bytes(data)
    assert_same_as_by_sample(penstock.open(folder))


def test_files_have_their_bytes_and_classes(tmp_path: Path) -> None:
    for i in range(12):
        path = tmp_path / "d" / f"class{i % 3}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text {i}")
    assert_same_as_by_sample(penstock.open(tmp_path / "d"))


def test_fields_that_only_one_part_of_a_mixture_has_are_none_elsewhere(tmp_path: Path) -> None:
    write_tar(tmp_path / "a" / "a.tar", [{"bin": b"a" * i, "cls": b"%d" % i} for i in range(9)])
    write_tar(tmp_path / "b" / "b.tar", [{"bin": b"b" * i, "txt": b"t"} for i in range(9)])
    mixture = penstock.Mixture([penstock.open(tmp_path / name) for name in "ab"], [0.5, 0.5])
    options: dict[str, Any] = {"batch_size": 8, "seed": 3, "output": "numpy"}
    assert can_make_columns(mixture.bound)
    made = penstock.Loader(mixture, **options)
    expected = penstock.Loader(mixture, transform=as_they_are, **options)
    for a, b in zip(made, expected, strict=True):
        assert_same(dict(sorted(a.items())), dict(sorted(b.items())))


def test_values_of_blocks_are_the_batch_s_own(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "d").mkdir()
    kinds = ("ints", "blobs", "vectors", "tokens", "even", "structs")
    table = pa.table({kind: table_column(kind, False, 8) for kind in kinds})
    pq.write_table(table, tmp_path / "d" / "t.parquet")
    dataset = penstock.open(tmp_path / "d")
    loader = penstock.Loader(dataset, batch_size=8, epochs=2, shuffle=False, output="numpy")
    batches = iter(loader)
    first = next(batches)
    kept = first_batch(dataset)
    for value in first.values():
        for array in value if isinstance(value, list) else [value]:
            if isinstance(array, np.ndarray):
                array[...] = 0
            else:
                array["b"][...] = 0
    assert_same(dict(next(batches)), kept)


@contextmanager
def counted_calls() -> Iterator[list[int]]:
    """Count the Python functions that the loader's threads call."""
    total = [0]

    def count(frame: Any, event: str, arg: Any) -> None:
        total[0] += event == "call"

    threading.setprofile(count)
    try:
        yield total
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]


def write_some(kind: str, folder: Path, num_samples: int) -> None:
    folder.mkdir(parents=True)
    rng = range(num_samples)
    if kind == "tar":
        array = npy(np.arange(4))
        samples = [
            {"bin": b"x" * 99, "cls": b"%d" % i, "json": b'{"a":%d}' % i, "txt": b"t", "npy": array}
            for i in rng
        ]
        write_tar(folder / "a.tar", samples)
    elif kind == "jsonl":
        lines = [json.dumps({"a": i, "b": [i], "c": "x"}) for i in rng]
        (folder / "a.jsonl").write_text("\n".join(lines))
    else:
        pa = pytest.importorskip("pyarrow")
        pq = pytest.importorskip("pyarrow.parquet")
        kinds = ("ints", "numbers", "texts", "blobs", "vectors", "tokens", "even")
        table = pa.table({k: table_column(k, False, num_samples % 200) for k in kinds})
        pq.write_table(
            pa.concat_tables([table] * (num_samples // len(table))), folder / "a.parquet"
        )


@pytest.mark.parametrize("kind", ["tar", "jsonl", "parquet"])
def test_a_larger_batch_takes_no_more_calls_of_python(tmp_path: Path, kind: str) -> None:
    calls = []
    for num_samples in (100, 1500):
        write_some(kind, tmp_path / f"{num_samples}", num_samples)
        dataset = penstock.open(tmp_path / f"{num_samples}")
        first_batch(dataset)  # What is imported and opened once is not counted.
        with counted_calls() as total:
            first_batch(dataset, threads=1)
        calls.append(total[0])
    assert calls[1] - calls[0] < 300, f"{calls} calls for 100 and 1500 samples"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("transform", [None, as_they_are])
def test_an_array_without_axes_is_one_wherever_it_stands_in_the_batch(
    tmp_path: Path, order: tuple[int, int], transform: Any
) -> None:
    values = [np.float64(2), np.eye(3)[:, :2]]
    write_tar(tmp_path / "x.tar", [{"npy": npy(values[i])} for i in order])
    found = first_batch(penstock.open(tmp_path), transform=transform)["npy"]
    assert [(type(v), v.shape) for v in found] == [(np.ndarray, values[i].shape) for i in order]
