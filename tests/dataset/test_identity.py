"""A data set is its names, whole and in order, its format and its options; nothing else is it."""

from __future__ import annotations

import io
import itertools
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.dataset.catalog import EVERYTHING_SPEC, cache_folder
from penstock.dataset.open import look_up, write_index
from penstock.errors import DatasetError, OptionError


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))


def tar_of(*texts: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for text in texts:
            member = tarfile.TarInfo(f"{text}.txt")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return out.getvalue()


@pytest.fixture
def folds(tmp_path: Path) -> Path:
    folder = tmp_path / "folds"
    folder.mkdir()
    for name in "abcdef":
        (folder / f"{name}.tar").write_bytes(tar_of(name))
    return folder


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """A folder that is tar by its bytes and has an array beside."""
    folder = tmp_path / "both"
    folder.mkdir()
    (folder / "a.tar").write_bytes(tar_of("a"))
    np.save(folder / "x.npy", np.arange(7))
    return folder


def texts(dataset: penstock.Dataset) -> str:
    return "".join(sample["txt"] for sample in dataset)


def test_lists_that_begin_alike_and_are_as_long_are_different_sets(folds: Path) -> None:
    for chosen in ("abcdf", "abcef", "abced", "abcdf"):
        dataset = penstock.open([folds / f"{name}.tar" for name in chosen])
        assert texts(dataset) == chosen


def test_every_choice_of_shards_in_every_order_is_a_set_of_its_own(folds: Path) -> None:
    choices = list(itertools.permutations("abcd", 3))
    for chosen in choices + choices[::-1]:
        assert texts(penstock.open([folds / f"{name}.tar" for name in chosen])) == "".join(chosen)


def test_a_list_is_the_same_however_it_is_written(folds: Path) -> None:
    first = penstock.open([folds / "b.tar", folds / "a.tar"])
    again = penstock.open(f"{folds}/{{b,a}}.tar")
    assert first.origin is not None
    assert again.origin is not None
    assert first.origin.catalog.uri == again.origin.catalog.uri
    assert texts(again) == "ba"


def test_a_file_named_like_a_pattern_is_not_the_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "x1.tar").write_bytes(tar_of("1"))
    (folder / "x2.tar").write_bytes(tar_of("2"))
    assert texts(penstock.open(f"{folder}/x*.tar")) == "12"
    (folder / "x*.tar").write_bytes(tar_of("star"))
    assert texts(penstock.open(f"{folder}/x*.tar")) == "star"


@pytest.mark.parametrize("order", list(itertools.permutations([None, "npy", "tar"])))
def test_a_format_that_is_named_is_the_one_that_is_opened(
    both: Path, order: tuple[str | None, ...]
) -> None:
    for check in (True, False):
        for format in order:
            dataset = penstock.open(both, format=format, check=check)
            assert dataset.format == (format or "tar")
            assert len(dataset) == (7 if format == "npy" else 1)


@pytest.mark.parametrize("order", list(itertools.permutations([None, 2, 3])))
def test_options_that_are_given_are_those_that_count(tmp_path: Path, order: Any) -> None:
    folder = tmp_path / "tokens"
    folder.mkdir()
    np.save(folder / "x.npy", np.arange(12, dtype=np.uint16))
    for length in order * 2:
        given = {} if length is None else {"sequence_length": length}
        assert len(penstock.open(folder, check=False, **given)) == 12 // (length or 1)


def test_the_index_of_a_folder_stays_its_format_when_other_files_arrive(folds: Path) -> None:
    penstock.open(folds)
    np.save(folds / "large.npy", np.zeros(100_000))
    assert penstock.open(folds).format == "tar"
    assert len(penstock.open(folds, format="npy")) == 100_000
    assert look_up(folds).format.name == "tar"


def test_a_writer_may_have_options_that_nobody_need_repeat(tmp_path: Path) -> None:
    with penstock.Writer(tmp_path / "rows", format="npy") as writer:
        writer.write({"tokens": np.arange(4)})
    assert list(penstock.open(tmp_path / "rows").fields) == ["tokens"]
    with penstock.Writer(tmp_path / "rows", format="npy", append=True) as writer:
        writer.write({"tokens": np.arange(4)})
    np.save(tmp_path / "rows" / "shard-000002.npy", np.arange(4)[None])
    _, manifest = write_index(look_up(tmp_path / "rows"))
    assert (manifest.version, manifest.num_samples) == (3, 3)
    assert list(penstock.open(tmp_path / "rows").fields) == ["tokens"]


def manifest_of(folder: Path) -> Path:
    return folder / ".penstock" / "all" / "v000001.json"


def test_a_catalog_that_somebody_copied_is_not_taken_for_another_set(
    folds: Path, both: Path
) -> None:
    write_index(look_up([folds / "a.tar", folds / "b.tar"]))
    (theirs,) = (p for p in (folds / ".penstock").iterdir() if p.name != "all")
    write_index(look_up([folds / "c.tar", folds / "d.tar"]))
    (own,) = (p for p in (folds / ".penstock").iterdir() if p.name not in ("all", theirs.name))
    shutil.rmtree(own)
    shutil.copytree(theirs, own)
    assert texts(penstock.open([folds / "c.tar", folds / "d.tar"])) == "cd"
    assert texts(penstock.open([folds / "c.tar", folds / "d.tar"], check=False)) == "cd"
    _, manifest = write_index(look_up([folds / "c.tar", folds / "d.tar"]))
    assert manifest.version == 2, "it is committed after the other set's"
    with pytest.raises(OptionError, match="has no version 1; it has: 2"):
        penstock.open([folds / "c.tar", folds / "d.tar"], version=1)


def test_the_manifest_says_of_what_it_is_a_version(folds: Path) -> None:
    write_index(look_up(folds))
    said = json.loads(manifest_of(folds).read_text())
    assert (said["spec"], said["format"], said["options"]) == (EVERYTHING_SPEC, "tar", {})
    assert said["parts"][0]["uri"] == f"{folds}/"


def forget_spec(folder: Path) -> None:
    """Make a manifest one of an older Penstock."""
    said = json.loads(manifest_of(folder).read_text())
    del said["spec"], said["replaces"], said["parts"][0]["uri"]
    manifest_of(folder).write_text(json.dumps(said))


def test_an_older_manifest_of_a_whole_folder_is_still_read(
    folds: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_index(look_up(folds))
    forget_spec(folds)
    monkeypatch.setattr("penstock.dataset.publish.build", None)
    assert texts(penstock.open(folds)) == "abcdef"
    assert texts(penstock.open(folds, check=False)) == "abcdef"


def test_an_older_manifest_in_a_format_that_somebody_named_is_not_the_folder(both: Path) -> None:
    found = look_up(both, format="npy")
    catalog, manifest = write_index(found)
    shutil.move(both / ".penstock" / catalog.prefix.split("/")[1], both / ".penstock" / "all")
    forget_spec(both)
    assert penstock.open(both).format == "tar"
    assert penstock.open(both, format="npy").fingerprint == manifest.fingerprint


def test_another_version_of_another_set_is_not_this_one(folds: Path) -> None:
    write_index(look_up(folds))
    dataset = penstock.open(folds)
    said = json.loads(manifest_of(folds).read_text()) | {"version": 2, "format": "npy"}
    manifest_of(folds).with_name("v000002.json").write_text(json.dumps(said))
    with pytest.raises(DatasetError, match=r"version 2 is npy.*another data set"):
        dataset.latest()


def test_options_must_be_plain(folds: Path) -> None:
    with pytest.raises(OptionError, match="plain values"):
        penstock.open(folds, format="files", extensions=object())


def test_two_lists_build_in_one_cache_and_leave_nothing_half(folds: Path) -> None:
    for chosen in ("ab", "cd"):
        penstock.open([folds / f"{name}.tar" for name in chosen])
    assert not [p for p in (cache_folder() / "work").rglob("*") if p.is_file()]
