from __future__ import annotations

import io
import tarfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dataset.formats.tar import TarFormat, members_of, split_name
from penstock.errors import FormatError
from penstock.storage.base import ObjectInfo
from penstock.storage.memory import MemoryStore

FORMAT = TarFormat()
Members = list[tuple[str, bytes]]


def tar(members: Members, format: int = tarfile.PAX_FORMAT, folders: bool = False) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as archive:
        for name, data in members:
            if folders and "/" in name:
                folder = tarfile.TarInfo(name.rpartition("/")[0])
                folder.type = tarfile.DIRTYPE
                archive.addfile(folder)
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


PAIRS = [
    ("a/001.jpg", b"J" * 700),
    ("a/001.cls", b"3"),
    ("a/002.cls", b"44"),
    ("a/002.jpg", b"K" * 512),
    ("a/003.jpg", b""),
]


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
@pytest.mark.parametrize("folders", [False, True])
def test_members_of_one_name_are_one_sample(shelf: Any, format: int, folders: bool) -> None:
    shelf.put("x.tar", tar(PAIRS, format, folders and format != tarfile.USTAR_FORMAT))
    part = shelf.index(FORMAT)
    assert [part.key(i) for i in range(part.num_samples)] == ["a/001", "a/002", "a/003"]
    assert {f.name: f.optional for f in part.fields} == {"jpg": False, "cls": True}
    found = [
        {name: bytes(value) for name, value in sample.items()}
        for sample in shelf.encoded(FORMAT, part)
    ]
    assert found == [
        {"jpg": b"J" * 700, "cls": b"3"},
        {"cls": b"44", "jpg": b"K" * 512},
        {"jpg": b""},
    ]


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_and_foreign_names_are_read(shelf: Any, format: int) -> None:
    names = [f"{'d' * 60}/{'e' * 90}/{i:03}-{'ü' * 40}" for i in range(3)]
    shelf.put("x.tar", tar([(f"{name}.txt", name.encode()) for name in names], format))
    part = shelf.index(FORMAT)
    assert [part.key(i) for i in range(3)] == names
    assert [s["txt"] for s in shelf.samples(FORMAT)] == names


def test_a_ustar_prefix_is_part_of_the_name(shelf: Any) -> None:
    name = "p" * 80 + "/" + "q" * 80
    shelf.put("x.tar", tar([(name + ".txt", b"")], tarfile.USTAR_FORMAT))
    assert shelf.index(FORMAT).key(0) == name


def test_a_size_in_a_pax_header_wins(shelf: Any) -> None:
    info = tarfile.TarInfo("1.txt")
    info.size = 5
    info.pax_headers = {"size": "5"}
    data = bytearray(info.tobuf(tarfile.PAX_FORMAT) + b"hello".ljust(512, b"\0") + bytes(1024))
    shelf.put("x.tar", bytes(data))
    assert shelf.samples(FORMAT) == [{"txt": "hello"}]


def test_a_size_of_many_gigabytes_is_read_in_base_256() -> None:
    size_bytes = 20 << 30
    info = tarfile.TarInfo("1.bin")
    info.size = size_bytes
    header = info.tobuf(tarfile.GNU_FORMAT)
    assert header[124] & 0x80

    class Sparse(MemoryStore):
        """Holds a header and then nothing, without holding it."""

        def read_range(self, info: ObjectInfo, offset: int, length: int) -> memoryview:
            return memoryview(header if offset == 0 else b"")[:length].cast("B")

    store = Sparse("sparse")
    whole = store.write("x.tar", header)
    big = type(whole)(key="x.tar", size_bytes=512 + size_bytes)
    (member,) = members_of(store, big)
    assert (member.offset, member.size_bytes) == (512, size_bytes)


def test_only_headers_are_read_from_a_remote_store(shelf: Any) -> None:
    shelf.put("x.tar", tar([(f"{i}.bin", bytes(3 << 20)) for i in range(8)]))
    shelf.store.is_remote = True
    part = shelf.index(FORMAT)
    assert part.num_samples == 8
    assert shelf.store.num_bytes < 2 << 20


def test_small_members_are_read_along_in_few_requests(shelf: Any) -> None:
    shelf.put("x.tar", tar([(f"{i}.bin", bytes(1000)) for i in range(500)]))
    shelf.store.is_remote = True
    requests: list[int] = []
    read_range = shelf.store.read_range
    shelf.store.read_range = lambda info, offset, length: (
        requests.append(length) or read_range(info, offset, length)
    )
    assert shelf.index(FORMAT).num_samples == 500
    assert len(requests) <= 2


def test_several_archives_are_read_in_order(shelf: Any) -> None:
    shelf.put("1.tar", tar([("b.txt", b"1")]))
    shelf.put("0.tar", tar([("a.txt", b"0"), ("a.json", b"{}")]))
    part = shelf.index(FORMAT)
    assert [part.key(i) for i in range(2)] == ["a", "b"]
    assert {f.name: f.optional for f in part.fields} == {"txt": False, "json": True}
    assert shelf.samples(FORMAT) == [{"txt": "0", "json": {}}, {"txt": "1"}]


def test_names_without_extension_and_links_are_passed_over(shelf: Any) -> None:
    link = tarfile.TarInfo("link.txt")
    link.type, link.linkname = tarfile.SYMTYPE, "1.txt"
    start = tar([("README", b"x" * 600)])[:1536]
    shelf.put("x.tar", start + link.tobuf() + tar([("1.txt", b"one")]))
    assert shelf.samples(FORMAT) == [{"txt": "one"}]


@pytest.mark.parametrize("name", ["x.tar.gz", "x.tgz", "x.tar.zst"])
def test_compressed_archives_are_refused_with_a_way_out(shelf: Any, name: str) -> None:
    shelf.put(name, b"\x1f\x8b")
    with pytest.raises(FormatError, match=r"is a compressed tar.*gunzip"):
        shelf.index(FORMAT)


def test_a_duplicate_member_is_refused(shelf: Any) -> None:
    shelf.put("x.tar", tar([("1.txt", b"a"), ("1.txt", b"b")]))
    with pytest.raises(FormatError, match="sample '1' has two members 'txt'"):
        shelf.index(FORMAT)


@pytest.mark.parametrize("cut", [600, 1024 + 512 + 10])
def test_an_archive_that_is_cut_off_is_refused_with_both_numbers(shelf: Any, cut: int) -> None:
    shelf.put("x.tar", tar([("1.bin", bytes(400)), ("2.bin", bytes(900))])[:cut])
    with pytest.raises(FormatError, match=f"cut off: .* the object at {cut}"):
        shelf.index(FORMAT)


@pytest.mark.parametrize("at", [0, 1024])
def test_garbage_is_refused_with_its_place(shelf: Any, at: int) -> None:
    data = bytearray(tar([("1.bin", bytes(400)), ("2.bin", bytes(900))]))
    data[at : at + 512] = b"\xa5" * 512
    shelf.put("x.tar", bytes(data))
    with pytest.raises(FormatError, match=f"not a tar archive, or is damaged, at byte {at}"):
        shelf.index(FORMAT)


def test_a_damaged_long_name_is_not_read_for_ever(shelf: Any) -> None:
    info = tarfile.TarInfo("@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 30
    shelf.put("x.tar", info.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    with pytest.raises(FormatError, match="a name of 1073741824 bytes at byte 0"):
        shelf.index(FORMAT)


@pytest.mark.parametrize(("kind", "words"), [(b"S", "at byte 0 is sparse"), (b"M", "type b'M' at")])
def test_a_kind_of_member_that_cannot_be_read_in_place_is_refused(
    shelf: Any, kind: bytes, words: str
) -> None:
    info = tarfile.TarInfo("1.txt")
    info.type = kind
    shelf.put("x.tar", info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(FormatError, match=words):
        shelf.index(FORMAT)


_NAMES = st.text(st.characters(exclude_characters="/.\0", codec="utf-8"), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(
    stems=st.lists(_NAMES, min_size=1, max_size=5, unique=True),
    fields=st.lists(st.sampled_from(["jpg", "cls", "seg.png", "json"]), min_size=1, unique=True),
    sizes=st.lists(st.integers(0, 1200), min_size=1, max_size=20),
    format=st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
)
def test_what_tarfile_writes_is_found_again(
    stems: list[str], fields: list[str], sizes: list[int], format: int
) -> None:
    names = [(stem, field) for stem in stems for field in fields]
    datas = [bytes([i % 251]) * sizes[i % len(sizes)] for i in range(len(names))]
    store = MemoryStore("found again")
    archive = tar([(f"{s}.{f}", d) for (s, f), d in zip(names, datas, strict=True)], format)
    store.write("x.tar", archive)
    (unit,) = FORMAT.units(list(store.list()), store, {})
    part = FORMAT.scan(unit, store, {})
    ids = np.arange(part.num_samples)
    e = part.tables[0].extents(ids)
    raws = [
        [memoryview(archive)[at : at + length]]
        for at, length in zip(e.offset.tolist(), e.length.tolist(), strict=True)
    ]
    found = [
        (part.key(i), name, bytes(value))
        for i, sample in enumerate(FORMAT.split(part, ids, raws))
        for name, value in sample.items()
    ]
    assert found == [(*name, data) for name, data in zip(names, datas, strict=True)]


def test_the_key_ends_at_the_first_dot_of_the_last_part() -> None:
    assert split_name("a.b/c.seg.PNG") == ("a.b/c", "seg.png")
    assert split_name("a/.hidden") == ("a/", "")
