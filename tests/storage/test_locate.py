from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import NotFoundError, OptionError
from penstock.storage import FolderStore, MemoryStore, open_store, resolve, split_uri
from penstock.storage.patterns import expand_braces, fixed_folder, glob_regex


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = FolderStore(tmp_path / "data")
    for key in (
        "train/000.tar",
        "train/001.tar",
        "train/deep/er/2.tar",
        "val/000.tar",
        "README.md",
    ):
        store.write(key, key.encode())
    for hidden in (".hidden", "_SUCCESS", ".penstock/index"):
        store.write(f"train/{hidden}", b"")
    return tmp_path / "data"


def _keys(located: object) -> list[str]:
    return [info.key for info in located.objects]  # type: ignore[attr-defined]


@pytest.mark.parametrize("form", ["{}/train", "{}/train/", "file://{}/train"])
def test_a_folder_means_everything_in_it_but_hidden_names(folder: Path, form: str) -> None:
    found = resolve(form.format(folder))
    assert _keys(found) == ["000.tar", "001.tar", "deep/er/2.tar"]
    assert found.is_everything
    assert found.store == FolderStore(folder / "train")


def test_paths_are_taken_as_strings_are(folder: Path) -> None:
    assert _keys(resolve(folder / "val")) == ["000.tar"]


def test_relative_paths_and_home_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    assert _keys(resolve("val")) == _keys(resolve("~/val")) == _keys(resolve("../data/val"))


def test_one_file_is_one_object_in_its_folder(folder: Path) -> None:
    found = resolve(str(folder / "train/001.tar"))
    assert _keys(found) == ["001.tar"]
    assert not found.is_everything
    assert found.store.read("001.tar") == b"train/001.tar"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("train/*.tar", ["000.tar", "001.tar"]),
        ("train/00?.tar", ["000.tar", "001.tar"]),
        ("train/00[!0].tar", ["001.tar"]),
        ("train/**", ["000.tar", "001.tar", "deep/er/2.tar"]),
        ("train/**/*.tar", ["000.tar", "001.tar", "deep/er/2.tar"]),
        ("*/000.tar", ["train/000.tar", "val/000.tar"]),
        ("**/2.tar", ["train/deep/er/2.tar"]),
    ],
)
def test_globs_match_against_a_listing(folder: Path, pattern: str, expected: list[str]) -> None:
    found = resolve(f"{folder}/{pattern}")
    assert _keys(found) == expected
    assert not found.is_everything


def test_braces_keep_their_order_and_padding(folder: Path) -> None:
    found = resolve(f"{folder}/{{val,train}}/{{000..000}}.tar")
    assert _keys(found) == ["val/000.tar", "train/000.tar"]
    assert found.names == ("object:val/000.tar", "object:train/000.tar")


def test_a_missing_name_of_braces_is_an_error(folder: Path) -> None:
    with pytest.raises(NotFoundError, match=r"train/002\.tar.*train/000\.tar|train/001\.tar"):
        resolve(f"{folder}/train/{{000..002}}.tar")


def test_a_list_of_anything_is_joined_under_its_common_folder(folder: Path) -> None:
    found = resolve([f"{folder}/val", f"{folder}/train/*.tar", f"{folder}/README.md"])
    assert _keys(found) == ["val/000.tar", "train/000.tar", "train/001.tar", "README.md"]
    assert found.store == FolderStore(folder)
    assert not found.is_everything
    assert bytes(found.store.read("README.md")) == b"README.md"


def test_names_are_whole_in_order_and_relative_to_the_root(folder: Path) -> None:
    found = resolve([f"{folder}/val", f"{folder}/train/*.tar", f"{folder}/README.md"])
    assert found.names == ("folder:val/", "glob:train/*.tar", "object:README.md")
    assert resolve(folder).names == resolve(f"{folder}/").names == ("folder:",)


@pytest.mark.parametrize("name", [None, 5, b"set", [None], ["a", 7], []])
def test_what_is_no_name_is_said_to_be_none(name: Any) -> None:
    with pytest.raises(OptionError, match="path or uri"):
        resolve(name)


def test_an_empty_folder_is_said_to_be_empty(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    with pytest.raises(NotFoundError, match="set is an empty folder"):
        resolve(tmp_path / "set")
    (tmp_path / "set" / ".hidden").write_bytes(b"x")
    with pytest.raises(NotFoundError, match="set/ holds only hidden names"):
        resolve(f"{tmp_path}/set/")


def test_an_object_named_twice_counts_once(folder: Path) -> None:
    assert _keys(resolve([f"{folder}/val/000.tar", f"{folder}/val"])) == ["000.tar"]


def test_folders_with_a_common_beginning_are_not_confused(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.write("abc/x", b"")
    store.write("abd/x", b"")
    assert _keys(resolve([f"{tmp_path}/abc", f"{tmp_path}/abd"])) == ["abc/x", "abd/x"]


def test_names_with_signs_of_patterns_are_taken_literally_where_they_exist(tmp_path: Path) -> None:
    FolderStore(tmp_path).write("data [1] {x}/a*.tar", b"1")
    assert _keys(resolve(f"{tmp_path}/data [1] {{x}}")) == ["a*.tar"]
    assert _keys(resolve(f"{tmp_path}/data [1] {{x}}/a*.tar")) == ["a*.tar"]


def test_different_stores_in_one_list_are_refused(folder: Path) -> None:
    MemoryStore("other").write("x", b"")
    with pytest.raises(OptionError, match="different stores; one data set lies in one store"):
        resolve([str(folder), "memory://other/"])
    MemoryStore("other").clear()


@pytest.mark.parametrize(
    ("name", "near"),
    [("trian", "train"), ("train/00.tar", "000.tar"), ("vall/", "val")],
)
def test_a_missing_name_brings_near_ones(folder: Path, name: str, near: str) -> None:
    with pytest.raises(NotFoundError, match=f"near it there is .*{near}"):
        resolve(f"{folder}/{name}")


def test_a_glob_without_match_says_so(folder: Path) -> None:
    with pytest.raises(NotFoundError, match="no object matches"):
        resolve(f"{folder}/train/*.zip")


def test_an_empty_folder_is_not_a_data_set(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        resolve(tmp_path)


@pytest.fixture
def memory() -> Iterator[MemoryStore]:
    store = MemoryStore("locate")
    store.write("a/0.tar", b"0")
    store.write("a/1.tar", b"1")
    yield store
    store.clear()


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("memory://locate/", ["a/0.tar", "a/1.tar"]),
        ("memory://locate", ["a/0.tar", "a/1.tar"]),
        ("memory://locate/a", ["a/0.tar", "a/1.tar"]),
        ("memory://locate/a/1.tar", ["a/1.tar"]),
        ("memory://locate/a/*.tar", ["a/0.tar", "a/1.tar"]),
    ],
)
def test_memory_stores_are_resolved_too(memory: MemoryStore, uri: str, expected: list[str]) -> None:
    found = resolve(uri)
    assert _keys(found) == expected
    assert found.store == memory


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("ftp://host/x", "there is no store for ftp://"),
        ("s3:///x", "names no bucket"),
        ("https://host/x?signature=1", "query"),
        ("", "empty name"),
    ],
)
def test_places_that_are_none_are_refused(uri: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        open_store(uri)


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(OptionError, match="empty list"):
        resolve([])


@pytest.mark.parametrize(
    ("uri", "parts"),
    [
        ("s3a://b/k", ("s3", "b", "k")),
        ("gs://b", ("gs", "b", "")),
        ("https://h:1/a%20b/c", ("https", "h:1", "a b/c")),
        ("s3://b/a%20b", ("s3", "b", "a%20b")),
        ("file:///a/b", ("file", "", "/a/b")),
        ("/a/../b/", ("file", "", "/b/")),
        ("abfss://c@acc.dfs.core.windows.net/x", ("abfs", "c@acc.dfs.core.windows.net", "x")),
    ],
)
def test_uris_are_taken_apart(uri: str, parts: tuple[str, str, str]) -> None:
    place = split_uri(uri)
    assert (place.scheme, place.container, place.path) == parts


@given(first=st.integers(0, 200), count=st.integers(1, 50), width=st.integers(1, 5))
def test_a_count_in_braces_is_padded_as_written(first: int, count: int, width: int) -> None:
    last = first + count - 1
    names = expand_braces(f"a-{{{first:0{width}d}..{last:0{width}d}}}.tar")
    # As in a shell: all numbers get the width of the widest when one of them has a leading zero.
    is_padded = len(str(first)) < width
    width = max(width, len(str(last))) if is_padded else 1
    assert names == [f"a-{number:0{width}d}.tar" for number in range(first, last + 1)]


@pytest.mark.parametrize("pattern", ["{", "a}", "{a", "{{a,b}}", "{a}", "{9..1}", "{0..99999999}"])
def test_braces_that_mean_nothing_are_refused(pattern: str) -> None:
    with pytest.raises(OptionError):
        expand_braces(pattern)


def test_globs_do_not_cross_parts_but_double_stars_do() -> None:
    assert not glob_regex("a/*.tar").fullmatch("a/b/c.tar")
    assert glob_regex("a/**/c.tar").fullmatch("a/c.tar")
    assert glob_regex("a/**/c.tar").fullmatch("a/b/d/c.tar")
    assert not glob_regex("a.tar").fullmatch("a-tar")
    assert glob_regex("[]x]").fullmatch("]")
    assert not glob_regex("[!a]").fullmatch("/")
    assert fixed_folder("a/b/c") == "a/b/"
