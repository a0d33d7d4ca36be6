from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock
from penstock.dataset.columns import map_columns, write_columns
from penstock.dataset.verify import VerifyProgress, verify
from penstock.dataset.writer import Writer
from penstock.errors import OptionError
from penstock.storage import FolderStore, MemoryStore


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def memory() -> Iterator[MemoryStore]:
    store = MemoryStore(uuid.uuid4().hex)
    yield store
    store.clear()


def write(uri: str | Path, *, format: Any = "tar", count: int = 30) -> None:
    with Writer(uri, format=format, shard_size=6000) as writer:
        for number in range(count):
            writer.write({"x.npy": np.arange(60) + number, "cls": number})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "d")
    return tmp_path / "d"


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def place_of(dataset: penstock.Dataset, sample_id: int) -> tuple[str, int, int]:
    table = dataset.parts[0].tables[0]
    extents = table.extents(np.array([sample_id]))
    return table.key(extents.object[0]), int(extents.offset[0]), int(extents.length[0])


@pytest.mark.parametrize("format", ["tar", "npy"])
def test_nothing_is_wrong_with_what_was_just_written(memory: MemoryStore, format: Any) -> None:
    write(memory.uri, format=format)
    report = verify(memory.uri)
    assert report.problems == ()
    assert report.ok
    assert (report.num_samples, report.num_checksums) == (30, 30)
    dataset = penstock.open(memory.uri)
    assert (report.size_bytes, report.num_objects) == (
        dataset.size_bytes,
        dataset.parts[0].tables[0].num_objects,
    )
    assert verify(dataset, decode=False).ok


def test_a_flipped_byte_names_sample_key_and_shard(folder: Path) -> None:
    key, offset, length = place_of(penstock.open(folder), 17)
    flip(folder / key, offset + length // 2)
    report = verify(folder)
    (problem,) = report.problems
    assert not report.ok
    assert (problem.kind, problem.sample_id, problem.key) == ("checksum", 17, "000000017")
    assert (problem.object, problem.offset) == (key, offset)
    said = f"sample 17 (000000017) in {folder}/{key}, bytes {offset} to {offset + length}: checksum"
    assert problem.message.startswith(said)
    assert " expected, " in problem.message
    assert report.num_samples == 30


def test_every_byte_of_every_sample_counts(folder: Path) -> None:
    dataset = penstock.open(folder)
    for sample_id in range(3):
        key, offset, length = place_of(dataset, sample_id)
        for at in (offset, offset + length - 1):
            flip(folder / key, at)
            assert [p.sample_id for p in verify(folder, decode=False).problems] == [sample_id]
            flip(folder / key, at)
    assert verify(folder).ok


def test_a_damaged_header_between_samples_is_found(folder: Path) -> None:
    key, offset, _ = place_of(penstock.open(folder), 6)
    flip(folder / key, offset - 512)
    (problem,) = verify(folder).problems
    assert (problem.kind, problem.object) == ("format", key)
    assert f"{folder}/{key} is not a tar archive, or is damaged, at byte {offset - 512}" in str(
        problem
    )


def test_a_member_that_was_renamed_is_found(folder: Path) -> None:
    key, offset, _ = place_of(penstock.open(folder), 6)
    data = bytearray((folder / key).read_bytes())
    header = data[offset - 512 : offset]
    # 000000006 becomes 000000015: the sum of its bytes, and so its checksum, stays.
    header[:9] = b"000000015"
    data[offset - 512 : offset] = header
    (folder / key).write_bytes(data)
    (problem,) = verify(folder).problems
    assert problem.kind == "format"
    assert "their names or places differ" in problem.message


def test_a_truncated_shard_is_named_with_what_is_lost(folder: Path) -> None:
    dataset = penstock.open(folder)
    key, offset, length = place_of(dataset, 10)
    size = (folder / key).stat().st_size
    with (folder / key).open("r+b") as file:
        file.truncate(offset + length - 1)
    firsts = dataset.parts[0].tables[0].first_sample
    lost = int(firsts[np.searchsorted(firsts, 10, side="right")]) - 10
    assert lost > 1
    (problem,) = verify(folder).problems
    assert problem.message == (
        f"{folder}/{key} has {offset + length - 1} bytes, {size} when indexed; "
        f"{lost} samples are lost, the first is sample 10 (000000010)"
    )
    assert verify(folder).num_samples == 30 - lost


def test_a_missing_shard_is_named_with_what_is_lost(folder: Path) -> None:
    dataset = penstock.open(folder)
    first, stop = dataset.parts[0].tables[0].first_sample[1:3].tolist()
    (folder / "shard-000001.tar").unlink()
    report = verify(folder)
    (problem,) = report.problems
    assert f"{folder}/shard-000001.tar is not there" in problem.message
    assert f"{stop - first} samples are lost, the first is sample {first} " in problem.message
    assert report.num_samples == 30 - (stop - first)


def test_an_object_with_another_mark_is_named(memory: MemoryStore) -> None:
    write(memory.uri)
    data = bytearray(memory.read("shard-000000.tar"))
    data[-1] = 1
    memory.write("shard-000000.tar", bytes(data))
    (problem,) = verify(memory.uri).problems
    assert (problem.kind, problem.object) == ("object", "shard-000000.tar")
    assert "has the mark " in problem.message


def test_all_problems_are_counted_and_some_are_kept(folder: Path) -> None:
    dataset = penstock.open(folder)
    for sample_id in range(30):
        key, offset, _ = place_of(dataset, sample_id)
        flip(folder / key, offset)
    report = verify(folder, problems_max=7)
    assert (report.num_problems, len(report.problems)) == (30, 7)
    assert [p.sample_id for p in verify(folder).problems] == list(range(30))
    with pytest.raises(OptionError, match="problems_max"):
        verify(folder, problems_max=0)


def test_a_copy_is_as_good_as_the_original(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    assert verify(tmp_path / "copy").ok


def index_of(folder: Path) -> Path:
    (path,) = (folder / ".penstock" / "all" / "parts").glob("*.idx")
    return path


def damaged(path: Path, name: str, place: Any, value: int) -> None:
    columns = map_columns(path)
    arrays = {n: np.array(a) for n, a in columns.items()}
    arrays[name][place] = value
    write_columns(path, arrays, columns.meta)


def test_a_damaged_index_is_said_to_be(folder: Path) -> None:
    key, _, _ = place_of(penstock.open(folder), 4)
    damaged(index_of(folder), "t0.offset", 4, 10**6)
    problems = verify(folder).problems
    assert "its columns give the fingerprint" in problems[0].message
    said = f"{key}: the object has {(folder / key).stat().st_size}"
    assert any(p.sample_id == 4 and said in p.message for p in problems)


def test_offsets_that_fall_are_found(folder: Path) -> None:
    damaged(index_of(folder), "t0.offset", 1, 0)
    messages = [p.message for p in verify(folder).problems]
    assert any("sample 1 (000000001) at bytes 0 to" in m and "out of order" in m for m in messages)


def test_a_member_outside_of_its_sample_is_found(folder: Path) -> None:
    damaged(index_of(folder), "member.length", (2, 0), 10**6)
    messages = [p.message for p in verify(folder).problems]
    assert any("field 'x.npy' of sample 2 (000000002) up to byte 1000000" in m for m in messages)


def test_counts_that_make_no_sense_stop_nothing_else(folder: Path) -> None:
    with Writer(folder, append=True) as writer:
        writer.write({"x.npy": np.arange(3), "cls": 30})
    paths = (folder / ".penstock" / "all" / "parts").glob("*.idx")
    first = max(paths, key=lambda path: path.stat().st_size)
    damaged(first, "t0.object.first", 1, 10**6)
    report = verify(folder)
    assert "do not rise from 0" in report.problems[0].message
    assert report.num_samples == 1


def test_a_wrong_checksum_in_the_index_is_found_like_a_wrong_byte(folder: Path) -> None:
    damaged(index_of(folder), "checksum", 9, 1)
    (problem,) = verify(folder).problems
    assert (problem.sample_id, problem.kind) == (9, "checksum")
    assert "checksum 0000000000000001 expected" in problem.message


def test_what_cannot_be_decoded_is_found_without_checksums(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "d")
    for number in range(5):
        store.write(f"{number}.json", b'{"a": 1}' if number != 3 else b'{"a": ')
    report = verify(tmp_path / "d", extensions=["json"])
    (problem,) = report.problems
    assert (problem.kind, problem.sample_id, problem.object) == ("decode", 3, "3.json")
    assert "cannot be decoded: DecodeError: field 'json'" in problem.message
    assert report.num_checksums == 0
    assert verify(tmp_path / "d", decode=False, extensions=["json"]).ok


def test_a_block_that_cannot_be_unpacked_is_found(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    path = tmp_path / "d" / "a.parquet"
    pq.write_table(pa.table({"a": list(range(1000))}), path, row_group_size=100)
    assert verify(tmp_path / "d").num_samples == 1000
    key, offset, length = place_of(penstock.open(tmp_path / "d"), 500)
    data = bytearray(path.read_bytes())
    data[offset : offset + length] = b"\xff" * length
    path.write_bytes(data)
    (problem,) = verify(tmp_path / "d").problems
    assert (problem.kind, problem.sample_id, problem.object) == ("block", 500, key)
    assert f"the block from sample 500 in {path}, bytes {offset}" in problem.message


def test_arrays_side_by_side_are_checked_too(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name in ("x", "y"):
        np.save(tmp_path / "d" / f"a.{name}.npy", np.arange(100))
    assert verify(tmp_path / "d").num_samples == 100
    path = tmp_path / "d" / "a.y.npy"
    path.write_bytes(path.read_bytes()[:-8])
    report = verify(tmp_path / "d")
    (problem,) = report.problems
    assert "1 sample is lost, the first is sample 99" in problem.message
    assert report.num_samples == 99


def test_progress_ends_with_everything(folder: Path) -> None:
    progress: list[VerifyProgress] = []
    report = verify(folder, report=progress.append)
    assert progress[-1].samples_done == progress[-1].num_samples == report.num_samples


def test_progress_of_many_small_files_is_seen(tmp_path: Path) -> None:
    for number in range(4000):
        (tmp_path / f"{number:04}.txt").write_text("x")
    progress: list[VerifyProgress] = []
    verify(tmp_path, report=progress.append)
    done = [state.samples_done for state in progress]
    assert {state.num_samples for state in progress} == {4000}
    assert max(np.diff([0, *done])) <= 4000 / 50
    assert done[-1] == 4000


def test_objects_and_samples_are_checked_in_turn(tmp_path: Path) -> None:
    with Writer(tmp_path / "d", shard_size="10KB") as writer:
        for number in range(200):
            writer.write({"bin": bytes(900), "cls": number})
    progress: list[VerifyProgress] = []
    verify(tmp_path / "d", report=progress.append)
    half = progress[len(progress) // 2]
    assert 0.3 < half.samples_done / half.num_samples < 0.7


def test_an_older_version_is_checked_by_its_number(folder: Path) -> None:
    with Writer(folder, append=True) as writer:
        writer.write({"x.npy": np.arange(3), "cls": 30})
    assert verify(folder, version=1).num_samples == 30
    assert verify(folder).num_samples == 31
