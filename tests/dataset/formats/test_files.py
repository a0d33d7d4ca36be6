from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image
from testkit.parts import merge_parts

from penstock.dataset.formats import files
from penstock.dataset.formats.files import FilesFormat
from penstock.errors import FormatError
from penstock.storage.base import ObjectInfo

FORMAT = FilesFormat()


def image(kind: str, value: int = 7) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((2, 3, 3), value, np.uint8)).save(out, format=kind)
    return out.getvalue()


def test_nothing_is_read_to_index(shelf: Any) -> None:
    shelf.put("a/1.jpg", bytes(1000))
    assert shelf.index(FORMAT).num_samples == 1
    assert shelf.store.num_bytes == 0


def test_images_of_many_kinds_are_one_field(shelf: Any) -> None:
    shelf.put("1.JPEG", image("JPEG"))
    shelf.put("2.png", image("PNG"))
    shelf.put("3.jpg", image("PNG"))
    part = shelf.index(FORMAT)
    assert [(f.name, f.encoding) for f in part.fields] == [("image", "image")]
    assert [part.key(i) for i in range(3)] == ["1.JPEG", "2.png", "3.jpg"]
    for sample in shelf.samples(FORMAT):
        np.testing.assert_allclose(sample["image"], np.full((2, 3, 3), 7), atol=2)


def test_what_lies_among_images_and_is_none_is_left_out(shelf: Any) -> None:
    for key in ("a/1.jpg", "b/2.jpg", "README.md", "b/labels.txt", ".DS_Store"):
        shelf.put(key, b"")
    part = shelf.index(FORMAT)
    assert [part.key(i) for i in range(part.num_samples)] == ["a/1.jpg", "b/2.jpg"]


def test_one_extension_names_the_field(shelf: Any) -> None:
    shelf.put("1.TXT", "ä".encode())
    shelf.put("2.txt", b"b")
    assert shelf.samples(FORMAT) == [{"txt": "ä"}, {"txt": "b"}]


def test_a_mixture_stays_bytes(shelf: Any) -> None:
    shelf.put("1.txt", b"a")
    shelf.put("2.xml", b"<b/>")
    shelf.put("README", b"c")
    assert [bytes(s["data"]) for s in shelf.samples(FORMAT)] == [b"a", b"<b/>", b"c"]
    assert shelf.samples(FORMAT, extensions=[".txt"]) == [{"txt": "a"}]


def test_classes_are_the_top_folders_sorted_by_name(shelf: Any) -> None:
    # In the listing "a-b/" comes before "a/"; as names, "a" comes before "a-b".
    for key in ("a/deep/1.txt", "a-b/2.txt", "c/3.txt", "a/4.txt"):
        shelf.put(key, b"")
    part = shelf.index(FORMAT)
    assert part.options["classes"] == ["a", "a-b", "c"]
    keys = [part.key(i) for i in range(4)]
    assert keys == ["a-b/2.txt", "a/4.txt", "a/deep/1.txt", "c/3.txt"]
    numbers = [s["class"] for s in shelf.samples(FORMAT)]
    assert numbers == [1, 0, 0, 2]
    assert all(n.dtype == np.int64 for n in numbers)
    assert part.fields[1].is_fixed


def test_classes_can_be_left_out(shelf: Any) -> None:
    shelf.put("a/1.txt", b"x")
    assert shelf.samples(FORMAT, classes=False) == [{"txt": "x"}]


def test_objects_beside_the_folders_are_refused(shelf: Any) -> None:
    shelf.put("a/1.txt", b"")
    shelf.put("2.txt", b"")
    with pytest.raises(FormatError, match=r"1 of 2 objects lie beside .*'2.txt'.*classes=False"):
        shelf.index(FORMAT)


def test_too_many_folders_are_not_classes(shelf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_CLASSES_MAX", 2)
    for i in range(3):
        shelf.put(f"{i}/x.txt", b"")
    with pytest.raises(FormatError, match=r"3 top folders .*at most 2"):
        shelf.index(FORMAT)
    assert shelf.index(FORMAT, classes=False).num_samples == 3


def test_files_named_class_do_not_hide_the_class(shelf: Any) -> None:
    shelf.put("a/Main.class", b"x")
    (sample,) = shelf.samples(FORMAT)
    assert sample["class"] == 0
    assert bytes(sample["data"]) == b"x"


def test_only_hidden_objects_is_an_error(shelf: Any) -> None:
    shelf.put(".git/config", b"")
    with pytest.raises(FormatError, match="none of 0 objects"):
        shelf.index(FORMAT)


def test_class_numbers_survive_units_and_merging(
    shelf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_UNIT_OBJECTS", 3)
    for i in range(10):
        shelf.put(f"c{i % 4}/{i}.txt", str(i).encode())
    units = FORMAT.units(list(shelf.store.list()), shelf.store, {})
    assert [len(u.objects) for u in units] == [3, 3, 3, 1]
    parts = [FORMAT.scan(u, shelf.store, {}) for u in units]
    # A later run of units is merged on its own, as when new objects are appended.
    for chosen in (parts, parts[2:]):
        part = merge_parts(chosen)
        for i, sample in enumerate(shelf.encoded(FORMAT, part)):
            assert part.key(i) == f"c{int(sample['class'])}/{bytes(sample['txt']).decode()}.txt"


def test_many_objects_make_few_units(shelf: Any) -> None:
    objects = [ObjectInfo(key=f"n{i // 1000:05}/{i:07}.jpg", size_bytes=i) for i in range(100_000)]
    units = FORMAT.units(objects, shelf.store, {})
    assert len(units) == 10
    parts = [FORMAT.scan(u, shelf.store, {}) for u in units]
    assert sum(p.num_samples for p in parts) == len(objects)
    ids = np.array([0, 999, 1000, 9999])
    raw = [[memoryview(b"")]] * 4
    assert [int(s["class"]) for s in FORMAT.split(parts[3], ids, raw)] == [30, 30, 31, 39]
