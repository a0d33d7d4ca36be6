"""Where an index is written, and what becomes of it when the data is copied or rewritten."""

from __future__ import annotations

import io
import logging
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.cli.main import main
from penstock.dataset.build import build
from penstock.dataset.catalog import Catalog, cache_folder
from penstock.dataset.open import look_up, write_index
from penstock.errors import ChangedError, CorruptError, StoreError
from penstock.storage.folder import FolderStore
from penstock.storage.locate import open_store
from penstock.storage.memory import MemoryStore


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))


def tar_bytes(first: int, count: int = 10) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for i in range(first, first + count):
            member = tarfile.TarInfo(f"{i:06}.txt")
            data = f"sample {i:06}".encode()
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    folder.mkdir()
    for shard in range(3):
        (folder / f"x-{shard:03}.tar").write_bytes(tar_bytes(shard * 10))
    return folder


@pytest.fixture
def written(tmp_path: Path) -> Path:
    with penstock.Writer(tmp_path / "written", shard_size="4KB") as writer:
        for i in range(30):
            writer.write({"txt": f"sample {i:06}"})
    return tmp_path / "written"


EXPECTED = [f"sample {i:06}" for i in range(30)]


def texts(dataset: penstock.Dataset) -> list[str]:
    return [sample["txt"] for sample in dataset]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# -- a folder is not changed by opening it ------------------------------------------------------


def find_classes(folder: Path) -> list[str]:
    """What torchvision's `ImageFolder` takes for classes (datasets/folder.py, `find_classes`)."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())


def test_opening_a_folder_changes_nothing_that_other_tools_see(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        (tmp_path / "pictures" / name / "0.txt").write_text(name)
    before = tree(tmp_path / "pictures")
    for _ in range(2):
        assert [s["class"] for s in penstock.open(tmp_path / "pictures")] == [0, 1]
    penstock.open(tmp_path / "pictures", classes=False)
    penstock.open(tmp_path / "pictures", rebuild=True)
    penstock.open(f"{tmp_path}/pictures/*/*.txt", format="files")
    for verb in ("info", "verify"):
        assert main([verb, str(tmp_path / "pictures")]) == 0
    assert tree(tmp_path / "pictures") == before
    assert find_classes(tmp_path / "pictures") == ["cat", "dog"]


def test_the_index_of_a_folder_is_kept_in_the_cache_and_read_again(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = penstock.open(shards)
    monkeypatch.setattr("penstock.dataset.publish.build", None)
    again = penstock.open(shards)
    assert (again.version, again.fingerprint) == (1, first.fingerprint)
    assert texts(again) == EXPECTED


def test_what_was_opened_is_put_beside_the_data_when_that_is_asked_for(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = penstock.open(shards)
    with monkeypatch.context() as patch:
        patch.setattr("penstock.dataset.formats.tar.TarFormat.scan", None)  # nothing is read twice
        assert main(["index", str(shards)]) == 0
    assert (shards / ".penstock" / "all" / "v000001.json").exists()
    monkeypatch.setenv("PENSTOCK_CACHE", str(shards.parent / "another user"))
    monkeypatch.setattr("penstock.dataset.publish.build", None)
    again = penstock.open(shards)
    assert (again.version, again.fingerprint) == (1, first.fingerprint)


def test_an_object_store_gets_the_index_and_the_user_a_word(
    s3: Any, shards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(s3.uri, s3.options)
    for path in sorted(shards.glob("*.tar")):
        store.write(path.name, path.read_bytes())
    with caplog.at_level(logging.WARNING, logger="penstock"):
        penstock.open(s3.uri, store=s3.options)
        penstock.open(s3.uri, store=s3.options)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1
    assert f"{s3.uri}.penstock/all/, for all who open it; delete" in said[0].replace("//.", "/.")


def test_a_cache_that_cannot_be_written_is_an_error_with_a_way_out(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder, and root may write into any folder")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(StoreError, match="set PENSTOCK_CACHE to a folder"):
        penstock.open(shards)


# -- copies ----------------------------------------------------------------------------------------


def copied(folder: Path, name: str = "copy") -> Path:
    """Copy as `cp -r` does: bytes, not times; all copies have a time that nothing else has."""
    target = folder.parent / name
    shutil.copytree(folder, target, copy_function=shutil.copyfile)
    for path in target.glob("*.tar"):
        os.utime(path, ns=(5, 5))
    return target


def test_a_copy_of_what_a_writer_wrote_just_opens(
    written: Path, caplog: pytest.LogCaptureFixture
) -> None:
    original = penstock.open(written)
    copy = copied(written)
    before = tree(copy)
    with caplog.at_level(logging.WARNING, logger="penstock"):
        for check in (True, True, False):
            dataset = penstock.open(copy, check=check)
            assert dataset.fingerprint == original.fingerprint
            assert texts(dataset) == EXPECTED
    assert not caplog.records, "checksums agree: there is nothing to say"
    assert tree(copy) == before
    assert {dataset.parts[0].tables[0].info(n).mtime_ns for n in range(3)} == {5}, "current marks"
    assert texts(pickle.loads(pickle.dumps(dataset))) == EXPECTED
    batches = list(penstock.Loader(dataset, batch_size=10, epochs=1))
    assert sorted(t for b in batches for t in b["txt"]) == EXPECTED


def test_a_copy_without_checksums_is_taken_by_size_with_one_notice(
    shards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["index", str(shards)]) == 0
    copy = copied(shards)
    with caplog.at_level(logging.WARNING, logger="penstock"):
        for _ in range(3):
            assert texts(penstock.open(copy)) == EXPECTED
    (record,) = caplog.records
    assert "is a copy of" in record.getMessage()
    assert "only sizes were compared" in record.getMessage()


@pytest.mark.parametrize("kind", ["written", "shards"])
def test_an_upload_with_its_index_just_opens(s3: Any, kind: str, request: Any) -> None:
    folder: Path = request.getfixturevalue(kind)
    if kind == "shards":
        penstock.open(folder)
        assert main(["index", str(folder)]) == 0
    store = open_store(s3.uri, s3.options)
    for key, data in tree(folder).items():
        store.write(key, data)
    before = [(o.key, o.etag) for o in store.list()]
    for check in (True, False):
        dataset = penstock.open(s3.uri, store=s3.options, check=check)
        assert texts(dataset) == EXPECTED
    table = dataset.parts[0].tables[0]
    assert table.info(0).etag == store.info(table.key(0)).etag, "readers compare these"
    assert dataset.fingerprint == penstock.open(folder).fingerprint
    assert [(o.key, o.etag) for o in store.list()] == before


def test_a_copy_grows_and_stays_whole(written: Path) -> None:
    copy = copied(written)
    for number in range(18):  # enough for parts to be merged
        with penstock.Writer(copy, append=True) as writer:
            writer.write({"txt": f"more {number}"})
    want = EXPECTED + [f"more {n}" for n in range(18)]
    assert texts(penstock.open(copy)) == want
    os.utime(copy / "shard-000000.tar", ns=(7, 7))
    assert texts(penstock.open(copied(copy, "again"))) == want


def test_something_else_of_the_same_size_is_no_copy(written: Path) -> None:
    copy = copied(written)
    for path in copy.glob("*.tar"):
        path.write_bytes(path.read_bytes().replace(b"sample", b"SAMPLE"))
    with pytest.raises(ChangedError, match=r"is not a copy of .*rebuild=True"):
        penstock.open(copy)
    assert texts(penstock.open(copy, rebuild=True)) == [t.upper() for t in EXPECTED]


def test_a_copy_that_lacks_an_object_is_refused(shards: Path) -> None:
    assert main(["index", str(shards)]) == 0
    copy = copied(shards)
    (copy / "x-001.tar").unlink()
    with pytest.raises(ChangedError, match=r"x-001\.tar \(gone\)"):
        penstock.open(copy)


# -- rewritten, and built again --------------------------------------------------------------------


def test_a_rewritten_file_is_an_error_until_it_is_indexed_again(shards: Path) -> None:
    for index in (lambda: penstock.open(shards), lambda: main(["index", str(shards)])):
        shutil.rmtree(shards / ".penstock", ignore_errors=True)
        shutil.rmtree(cache_folder())
        (shards / "x-001.tar").write_bytes(tar_bytes(10))
        index()
        (shards / "x-001.tar").write_bytes(tar_bytes(70))
        os.utime(shards / "x-001.tar", ns=(9, 9))
        with pytest.raises(ChangedError, match=r"x-001\.tar .*rebuild=True"):
            penstock.open(shards)
        before = tree(shards)
        rebuilt = penstock.open(shards, rebuild=True)
        assert rebuilt.version == 2
        assert tree(shards) == before
        for _ in range(2):
            assert penstock.open(shards)[10]["txt"] == "sample 000070", "the way out has worked"
        assert penstock.open(shards, version=1, check=False).version == 1
        assert penstock.open(shards, version=2).fingerprint == rebuilt.fingerprint


def test_an_index_beside_the_data_that_is_newer_is_read_again(shards: Path) -> None:
    assert main(["index", str(shards)]) == 0
    (shards / "x-001.tar").write_bytes(tar_bytes(70))
    os.utime(shards / "x-001.tar", ns=(9, 9))
    penstock.open(shards, rebuild=True)
    assert main(["index", str(shards), "--rebuild"]) == 0
    dataset = penstock.open(shards)
    assert dataset.origin is not None
    assert dataset.origin.catalog.store == FolderStore(shards)


def test_what_was_only_touched_is_read_again_where_there_are_checksums(written: Path) -> None:
    for path in written.glob("*.tar"):
        os.utime(path, ns=(5, 5))
    for _ in range(2):
        assert texts(penstock.open(written)) == EXPECTED
    path = next(iter(sorted(written.glob("*.tar"))))
    path.write_bytes(path.read_bytes().replace(b"sample", b"SAMPLE"))
    os.utime(path, ns=(6, 6))
    with pytest.raises(ChangedError, match=path.name):
        penstock.open(written)


def test_a_damaged_index_is_repaired_by_building_it_again(shards: Path) -> None:
    assert main(["index", str(shards)]) == 0
    (part,) = (shards / ".penstock" / "all" / "parts").glob("*.idx")
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CorruptError, match="rebuild=True"):
        penstock.open(shards)
    assert texts(penstock.open(shards, rebuild=True)) == EXPECTED
    assert texts(penstock.open(shards)) == EXPECTED
    shutil.rmtree(cache_folder())
    assert main(["index", str(shards), "--rebuild"]) == 0
    assert texts(penstock.open(shards)) == EXPECTED


# -- many at once ----------------------------------------------------------------------------------

RANK = """
import pickle, sys, penstock
uri, options = pickle.load(open(sys.argv[1], "rb"))
print("ready", flush=True)
sys.stdin.readline()
dataset = penstock.open(uri, store=options)
print(dataset.version, len(dataset), dataset.fingerprint)
"""


def test_ranks_that_open_an_unindexed_bucket_at_once_share_one_version(
    s3: Any, shards: Path, tmp_path: Path
) -> None:
    store = open_store(s3.uri, s3.options)
    for path in sorted(shards.glob("*.tar")):
        store.write(path.name, path.read_bytes())
    (tmp_path / "job").write_bytes(pickle.dumps((s3.uri, s3.options)))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path / "job")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PENSTOCK_CACHE": str(tmp_path / f"node {number}")},
        )
        for number in range(4)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("go\n")
        rank.stdin.flush()
    said = [rank.communicate()[0] for rank in ranks]
    assert {rank.returncode for rank in ranks} == {0}
    assert len(set(said)) == 1
    assert said[0].startswith("1 30 ")
    assert Catalog(store, ".penstock/all/").versions() == [1]


class Slow(MemoryStore):
    """A store in which another commits between two looks of whoever is slow."""

    def list(self, prefix: str = "") -> Any:
        found = list(super().list(prefix))
        if prefix.endswith("all/v") and not found and Slow.meanwhile is not None:
            other, Slow.meanwhile = Slow.meanwhile, None
            other()
        return iter(found)

    meanwhile: Any = None


def test_a_version_that_is_committed_between_two_looks_is_not_committed_again() -> None:
    store = MemoryStore("between")
    store.write("a.tar", tar_bytes(0))
    found = look_up("memory://between/")
    catalog = Catalog(Slow("between"), ".penstock/all/")
    Slow.meanwhile = lambda: build(found.recipe, Catalog(store, ".penstock/all/"))
    assert build(found.recipe, catalog).version == 1
    assert Slow.meanwhile is None
    assert catalog.versions() == [1]


def test_building_again_what_is_the_same_makes_no_version(shards: Path) -> None:
    for _ in range(3):
        _, manifest = write_index(look_up(shards), rebuild=True)
        assert manifest.version == 1
