"""What an archive claims about itself is checked before it is believed."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.dataset.fields import MEMBERS_MAX
from penstock.dataset.formats import format_named
from penstock.errors import FormatError

FORMAT = format_named("tar")


def tar(names: list[str], pax: dict[str, str] | None = None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 5
            info.pax_headers = pax or {}
            archive.addfile(info, io.BytesIO(b"12345"))
    return out.getvalue()


@pytest.mark.parametrize("size", ["-2048", "-1", "abc", "", "1e3", "٣", "9" * 5000])
def test_a_pax_size_that_is_not_a_length_is_refused(shelf: Any, size: str) -> None:
    shelf.put("x.tar", tar(["a.txt", "b.txt"], {"size": size}))
    with pytest.raises(FormatError, match=r"x\.tar is damaged: the PAX header at byte 0 gives"):
        shelf.index(FORMAT)


def test_a_pax_size_beyond_the_object_is_refused_with_both_numbers(shelf: Any) -> None:
    data = tar(["a.txt"], {"size": str(10**15)})
    shelf.put("x.tar", data)
    with pytest.raises(FormatError, match=f"ends at 10000000000.*, the object at {len(data)}"):
        shelf.index(FORMAT)


@pytest.mark.parametrize("field", [b"-0000002000\0", b"00000_2000\0\0", b"\xff" * 12])
def test_a_size_in_the_header_that_is_not_a_length_is_refused(shelf: Any, field: bytes) -> None:
    header = bytearray(tar(["a.txt"])[:512])
    header[124:136] = field
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    shelf.put("x.tar", bytes(header) + bytes(2048))
    with pytest.raises(FormatError, match=r"the member at byte 0 has the size"):
        shelf.index(FORMAT)


@pytest.mark.parametrize("version", ["0.0", "0.1", "1.0", "old"])
def test_a_sparse_member_is_refused_and_never_read_as_its_map(tmp_path: Path, version: str) -> None:
    with (tmp_path / "a.npy").open("wb") as file:
        np.save(file, np.zeros(1 << 17, np.uint8))
        file.truncate(1 << 22)
    style = (
        ["--format=gnu"] if version == "old" else ["--format=posix", f"--sparse-version={version}"]
    )
    subprocess.run(["tar", "--sparse", *style, "-cf", "x.tar", "a.npy"], cwd=tmp_path, check=True)
    with pytest.raises(FormatError, match=r"x\.tar: the member at byte .* without `tar --sparse`"):
        penstock.open(tmp_path / "x.tar")


@pytest.mark.parametrize("text", [b"xx path=a\n", b"99 path=a\n", b"10 patha\n"])
def test_a_damaged_pax_header_is_refused(shelf: Any, text: bytes) -> None:
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, len(text)
    head = info.tobuf(tarfile.USTAR_FORMAT) + text.ljust(512, b"\0")
    shelf.put("x.tar", head + tar(["a.txt"]))
    with pytest.raises(FormatError, match="which is not a record"):
        shelf.index(FORMAT)


def test_a_name_cut_into_too_many_fields_is_refused_before_the_end(shelf: Any) -> None:
    shelf.store.is_remote = False
    names = [f"a_0.{i:05}.jpg" for i in range(20_000)]
    shelf.put("x.tar", tar(names))
    with pytest.raises(FormatError, match=r"more than 256 different fields.*first dot"):
        shelf.index(FORMAT)
    assert shelf.store.num_bytes < 2 * 1024 * (MEMBERS_MAX + 8)


def test_too_many_fields_over_several_archives_are_refused(tmp_path: Path) -> None:
    half = MEMBERS_MAX // 2 + 1
    (tmp_path / "a.tar").write_bytes(tar([f"a.{i}" for i in range(half)]))
    (tmp_path / "b.tar").write_bytes(tar([f"a.{i}" for i in range(half, 2 * half)]))
    assert len(penstock.open(tmp_path / "a.tar").fields) == half
    with pytest.raises(FormatError, match="more than 256 different fields"):
        penstock.open(tmp_path)
