"""Opening data sets: found, indexed once, versioned, and never misread after a change."""

import io
import logging
import os
import pickle
import signal
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.dataset.build import BuildProgress
from penstock.dataset.catalog import cache_folder
from penstock.dataset.columns import map_columns, write_columns
from penstock.dataset.formats.tar import TarFormat
from penstock.dataset.open import look_up, write_index
from penstock.errors import ChangedError, CorruptError, DatasetError, FormatError, OptionError
from penstock.storage.folder import FolderStore
from penstock.storage.locate import open_store


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


def tar_bytes(first: int, count: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for i in range(first, first + count):
            member = tarfile.TarInfo(f"{i:06}.txt")
            data = f"sample {i}".encode()
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    folder.mkdir()
    for shard in range(3):
        (folder / f"x-{shard:03}.tar").write_bytes(tar_bytes(shard * 10, 10))
    return folder


def texts(dataset: penstock.Dataset) -> list[str]:
    return [sample["txt"] for sample in dataset]


EXPECTED = [f"sample {i}" for i in range(30)]


@pytest.mark.parametrize(
    "form", ["{0}", "{0}/", "file://{0}", "{0}/*.tar", "{0}/x-{{000..002}}.tar"]
)
def test_a_data_set_has_many_names(shards: Path, form: str) -> None:
    assert texts(penstock.open(form.format(shards))) == EXPECTED


def test_a_list_of_shards_is_a_data_set(shards: Path) -> None:
    dataset = penstock.open([shards / "x-002.tar", shards / "x-000.tar"])
    assert sorted(texts(dataset)) == sorted(EXPECTED[20:] + EXPECTED[:10])


def test_an_index_beside_the_data_is_used_first(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, manifest = write_index(look_up(shards))
    assert (shards / ".penstock" / "all" / "v000001.json").exists()
    monkeypatch.setattr("penstock.dataset.publish.build", None)
    again = penstock.open(shards)
    assert again.version == manifest.version == 1
    assert again.fingerprint == manifest.fingerprint
    assert again.origin is not None
    assert again.origin.catalog.store.uri == f"{shards}/"
    assert texts(again) == EXPECTED


def test_where_the_data_cannot_be_written_the_index_goes_to_the_users_cache(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FolderStore.write

    def refuse(self: FolderStore, key: str, *args: Any, **kwargs: Any) -> Any:
        if ".penstock" in key:
            raise PermissionError(13, "read-only", key)
        return real(self, key, *args, **kwargs)

    monkeypatch.setattr(FolderStore, "write", refuse)
    write_index(look_up(shards))
    assert not (shards / ".penstock").exists()
    assert list((cache_folder() / "indexes").rglob("v000001.json"))
    monkeypatch.setattr("penstock.dataset.publish.build", None)
    assert texts(penstock.open(shards)) == EXPECTED, "found in the cache the second time"


def test_appending_shards_makes_a_version_and_disturbs_no_reader(shards: Path) -> None:
    old = penstock.open(shards)
    (shards / "x-003.tar").write_bytes(tar_bytes(30, 5))
    _, manifest = write_index(look_up(shards))
    assert (manifest.version, manifest.num_samples, len(manifest.parts)) == (2, 35, 2)
    assert texts(old) == EXPECTED
    assert len(penstock.open(shards, version=1)) == 30
    latest = penstock.open(shards)
    assert latest.version == 2
    assert texts(latest) == [f"sample {i}" for i in range(35)]
    assert latest.fingerprint != old.fingerprint
    assert [b["txt"] for b in [latest[i] for i in (-1, 29, 30)]] == [
        "sample 34",
        "sample 29",
        "sample 30",
    ]
    with pytest.raises(OptionError, match="no version 7; it has: 1, 2"):
        penstock.open(shards, version=7)


def test_indexing_again_without_new_shards_makes_no_version(shards: Path) -> None:
    for _ in range(3):
        _, manifest = write_index(look_up(shards))
        assert manifest.version == 1


def test_many_appends_are_merged_and_still_right(shards: Path) -> None:
    for shard in range(3, 22):
        (shards / f"x-{shard:03}.tar").write_bytes(tar_bytes(shard * 10, 10))
        _, manifest = write_index(look_up(shards))
    assert manifest.version == 19
    assert len(manifest.parts) <= 16
    assert texts(penstock.open(shards)) == [f"sample {i}" for i in range(220)]


def test_new_shards_that_are_not_indexed_yet_are_pointed_out(
    shards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    penstock.open(shards)
    (shards / "x-003.tar").write_bytes(tar_bytes(30, 5))
    with caplog.at_level(logging.WARNING, logger="penstock"):
        assert len(penstock.open(shards)) == 30
    assert "x-003.tar" in caplog.text


def test_a_changed_object_is_noticed_and_named(shards: Path) -> None:
    penstock.open(shards)
    (shards / "x-001.tar").write_bytes(tar_bytes(10, 11))
    with pytest.raises(ChangedError, match=r"x-001\.tar"):
        penstock.open(shards)
    with pytest.raises(ChangedError, match="--rebuild"):
        write_index(look_up(shards))
    _, manifest = write_index(look_up(shards), rebuild=True)
    assert (manifest.version, manifest.num_samples) == (2, 31)


def test_a_change_of_the_same_size_is_noticed_too(shards: Path) -> None:
    penstock.open(shards)
    path = shards / "x-001.tar"
    data = path.read_bytes()
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    with pytest.raises(ChangedError, match=r"x-001\.tar"):
        penstock.open(shards)
    with pytest.raises(ChangedError, match=r"x-001\.tar is not the object that was indexed"):
        texts(penstock.open(shards, check=False))


def test_an_object_that_is_gone_is_named(shards: Path) -> None:
    penstock.open(shards)
    (shards / "x-002.tar").unlink()
    with pytest.raises(ChangedError, match=r"x-002\.tar \(gone\)"):
        penstock.open(shards)


def test_a_file_that_shrinks_under_a_reader_is_an_error_not_garbage(shards: Path) -> None:
    dataset = penstock.open(shards)
    os.truncate(shards / "x-001.tar", 600)
    with pytest.raises(ChangedError, match=r"x-001\.tar"):
        dataset[15]
    with pytest.raises(ChangedError, match=r"x-001\.tar"):
        list(penstock.Loader(dataset, batch_size=5))


def test_two_writers_at_once_commit_one_version(shards: Path) -> None:
    found = look_up(shards)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: write_index(found), range(8)))
    assert {manifest.version for _, manifest in results} == {1}
    assert texts(penstock.open(shards)) == EXPECTED


def test_a_build_that_was_killed_goes_on_where_it_stopped(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for shard in range(40):
        (folder / f"x-{shard:03}.tar").write_bytes(tar_bytes(shard * 10, 10))
    program = """
import os, signal, sys, penstock
def report(progress):
    if progress.units_done == 20:
        os.kill(os.getpid(), signal.SIGKILL)
penstock.open(sys.argv[1], report=report)
"""
    done = subprocess.run([sys.executable, "-c", program, str(folder)], check=False)
    assert done.returncode == -signal.SIGKILL
    kept = [p for p in (cache_folder() / "work").rglob("*.idx") if not p.name.startswith(".")]
    assert len(kept) >= 20
    scanned: list[str] = []
    real = TarFormat.scan

    def counted(self: TarFormat, unit: Any, *args: Any) -> Any:
        scanned.append(unit.objects[0].key)
        return real(self, unit, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TarFormat, "scan", counted)
        assert len(penstock.open(folder)) == 400
    assert 0 < len(scanned) <= 40 - len(kept)
    assert not [p for p in kept if p.exists()], "work is cleared after the commit"


def test_progress_is_reported(shards: Path) -> None:
    seen: list[BuildProgress] = []
    penstock.open(shards, report=seen.append)
    assert [p.units_done for p in seen] == [1, 2, 3]
    assert seen[-1].num_samples == 30
    assert seen[-1].size_bytes == sum(p.stat().st_size for p in shards.glob("*.tar"))


def test_views_select_and_keep_their_own_fingerprint(shards: Path) -> None:
    dataset = penstock.open(shards)
    assert texts(dataset[5:8]) == EXPECTED[5:8]
    assert texts(dataset[::-1][:3]) == EXPECTED[::-1][:3]
    assert texts(dataset[10:20][2:4]) == EXPECTED[12:14]
    assert texts(dataset.select([3, 1, 2])) == [EXPECTED[i] for i in (3, 1, 2)]
    mask = np.zeros(30, bool)
    mask[[4, 9]] = True
    assert texts(dataset.select(mask)[1:]) == EXPECTED[9:10]
    prints = {d.fingerprint for d in (dataset, dataset[5:8], dataset.select([5, 6, 7]))}
    assert len(prints) == 3
    assert dataset[2:4].key(1) == "000003"
    with pytest.raises(IndexError):
        dataset[30]
    with pytest.raises(OptionError, match="mask of 3"):
        dataset.select(np.ones(3, bool))
    with pytest.raises(OptionError, match="ids run from 0 to 29"):
        dataset.select([30])


@given(data=st.data())
def test_slices_of_slices_are_what_lists_say(data: Any, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "sliced"
    if not folder.exists():
        folder.mkdir()
        np.save(folder / "a.npy", np.arange(23))
    dataset, expected = penstock.open(folder), list(range(23))
    ends = st.none() | st.integers(-30, 30)
    for _ in range(3):
        step = data.draw(st.sampled_from([None, 1, 2, 3, -1, -2]))
        cut = slice(data.draw(ends), data.draw(ends), step)
        dataset, expected = dataset[cut], expected[cut]
    assert [int(s["data"]) for s in dataset] == expected


def test_a_data_set_travels_by_name_not_by_content(shards: Path) -> None:
    dataset = penstock.open(shards)[3:9]
    data = pickle.dumps(dataset)
    assert len(data) < 2000
    assert texts(pickle.loads(data)) == EXPECTED[3:9]


def test_a_version_can_be_opened_by_its_own_name(shards: Path) -> None:
    penstock.open(shards)
    (shards / "x-003.tar").write_bytes(tar_bytes(30, 5))
    write_index(look_up(shards))
    assert len(penstock.open(shards / ".penstock/all/v000001.json")) == 30
    assert len(penstock.open(shards / ".penstock/all/v000002.json")) == 35


def test_own_decoders_by_field_and_by_extension(shards: Path) -> None:
    assert penstock.open(shards, decoders={"txt": lambda d: len(d)})[12]["txt"] == 9
    assert penstock.open(shards, decoders={"txt": None})[12]["txt"] == b"sample 12"


def test_what_cannot_be_opened_says_what_to_do(tmp_path: Path, shards: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        penstock.open(tmp_path / "nowhere")
    with pytest.raises(OptionError, match="there is no format 'tarr'"):
        penstock.open(shards, format="tarr")
    with pytest.raises(OptionError, match="tar has no option 'sequence_length'"):
        penstock.open(shards, sequence_length=3)
    with pytest.raises(DatasetError, match="none of 3 objects is npy"):
        penstock.open(shards, format="npy")
    (tmp_path / "gz").mkdir()
    (tmp_path / "gz" / "a.tar.gz").write_bytes(b"x")
    with pytest.raises(FormatError, match="gunzip"):
        penstock.open(tmp_path / "gz")


def test_a_damaged_index_is_an_error_with_the_way_out(shards: Path) -> None:
    write_index(look_up(shards))
    (part,) = (shards / ".penstock" / "all" / "parts").glob("*.idx")
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(CorruptError, match=f"its name says {part.stem}.*rebuild=True"):
        penstock.open(shards)


def test_a_set_in_s3_is_indexed_beside_its_data_and_opens_elsewhere(
    s3: Any, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(s3.uri, s3.options)
    for path in sorted(shards.glob("*.tar")):
        store.write(f"deep/set/{path.name}", path.read_bytes())
    uri = f"{s3.uri.rstrip('/')}/deep/set/"
    here = penstock.open(uri, store=s3.options)
    assert texts(here) == EXPECTED
    assert here.fingerprint == penstock.open(shards).fingerprint
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "another machine"))
    monkeypatch.setattr("penstock.dataset.publish.build", None)
    assert texts(penstock.open(uri, store=s3.options)) == EXPECTED


def test_columns_survive_a_round_trip(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(7, dtype=np.uint32),
        "b": np.ones((3, 2), np.int64),
        "empty": np.zeros(0, np.uint8),
    }
    write_columns(tmp_path / "c.idx", arrays, {"n": 1})
    columns = map_columns(tmp_path / "c.idx")
    assert columns.meta == {"n": 1}
    for name, array in arrays.items():
        assert columns[name].dtype == array.dtype
        assert (columns[name] == array).all()
    (tmp_path / "d.idx").write_bytes(b"something else entirely")
    with pytest.raises(FormatError, match="not a Penstock column file"):
        map_columns(tmp_path / "d.idx")


def test_a_rebuild_leaves_older_versions_as_they_were(shards: Path) -> None:
    write_index(look_up(shards))
    parts = shards / ".penstock" / "all" / "parts"
    before = {p.name: p.read_bytes() for p in parts.glob("*.idx")}
    os.utime(shards / "x-001.tar", ns=(1, 1))
    _, manifest = write_index(look_up(shards), rebuild=True)
    assert manifest.version == 2
    after = {p.name: p.read_bytes() for p in parts.glob("*.idx")}
    assert before.items() < after.items(), "the same samples with other marks are another part"
    assert (
        penstock.open(shards).fingerprint
        == penstock.open(shards, version=1, check=False).fingerprint
    )


def test_an_index_of_a_later_layout_can_be_rebuilt(shards: Path) -> None:
    write_index(look_up(shards))
    manifest = shards / ".penstock" / "all" / "v000001.json"
    manifest.write_text(manifest.read_text().replace('"layout": 1', '"layout": 99'))
    with pytest.raises(FormatError, match="layout 99"):
        penstock.open(shards)
    _, rebuilt = write_index(look_up(shards), rebuild=True)
    assert rebuilt.version == 2
    assert texts(penstock.open(shards)) == EXPECTED


def test_a_new_class_folder_renumbers_all_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.dataset.formats.files._UNIT_OBJECTS", 4)
    for name in ("bird", "dog"):
        (tmp_path / "set" / name).mkdir(parents=True)
        for i in range(4):
            (tmp_path / "set" / name / f"{i}.txt").write_text(name)
    old = penstock.open(tmp_path / "set")
    assert [s["class"] for s in old] == [0] * 4 + [1] * 4
    (tmp_path / "set" / "cat").mkdir()
    (tmp_path / "set" / "cat" / "0.txt").write_text("cat")
    write_index(look_up(tmp_path / "set"))
    names = ["bird", "cat", "dog"]
    assert all(names[s["class"]] == s["txt"] for s in penstock.open(tmp_path / "set"))
    assert [s["class"] for s in old] == [0] * 4 + [1] * 4, "who reads the old version goes on"


def test_no_home_is_needed(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert texts(penstock.open(shards)) == EXPECTED


def test_names_need_not_be_text(tmp_path: Path) -> None:
    folder = tmp_path / "names"
    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as t:
        member = tarfile.TarInfo("caf\xe9.txt")
        member.size = 2
        t.addfile(member, io.BytesIO(b"ok"))
    dataset = penstock.open(folder)
    assert dataset[0]["txt"] == "ok"
    assert dataset.key(0) == "caf\udce9"
