"""WebDataset tar: consecutive members of one base name are one sample.

`a/0001.jpg`, `a/0001.cls` make the sample `a/0001` with the fields `jpg` and `cls`: the name is cut
at the first dot after the last slash. The index needs the headers alone; what is read to find them
is the matter of `headers`. A sample's extent runs from its first member's data to its last
member's, headers between them included, so one read brings all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.dataset.fields import MEMBERS_MAX, Field, too_many_members
from penstock.dataset.formats.base import (
    Bytes,
    Options,
    Sample,
    SampleFormat,
    Unit,
    encoding_of,
    one_unit_each,
)
from penstock.dataset.formats.headers import HeaderReader
from penstock.dataset.part import ABSENT, Ints, Part, Rows, make_part
from penstock.dataset.ragged import FieldColumns, Ragged
from penstock.errors import FormatError
from penstock.storage.base import ObjectInfo, Store

_BLOCK = 512
_LONG_NAME_BYTES_MAX = 1 << 20
"""Bytes of one PAX or GNU header: names are shorter than 4 KiB on every file system."""
_REGULAR = (b"0", b"\0", b"7")
_SKIPPED = (b"1", b"2", b"3", b"4", b"5", b"6")
_SPARSE = ("GNU.sparse.", "SCHILY.realsize")


@dataclass(frozen=True, slots=True)
class TarMember:
    """One regular file of an archive."""

    name: str
    offset: int
    size_bytes: int


class TarFormat(SampleFormat):
    """WebDataset tar archives."""

    name = "tar"
    options: frozenset[str] = frozenset()

    def claims(self, key: str) -> bool:
        """Return whether the name is that of a tar, compressed ones included: to refuse them."""
        return key.lower().endswith((".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz"))

    def units(self, objects: Sequence[ObjectInfo], store: Store, options: Options) -> list[Unit]:
        """Return a unit for each archive."""
        for info in objects:
            if not info.key.lower().endswith(".tar"):
                raise FormatError(
                    f"{store.uri}{info.key} is a compressed tar: its samples cannot be addressed. "
                    "Decompress it (`gunzip FILE.tar.gz`); images gain nothing from the compression"
                )
        return one_unit_each(objects)

    def scan(self, unit: Unit, store: Store, options: Options) -> Part:
        """Return where the samples of one archive lie."""
        (info,) = unit.objects
        samples = _SampleGatherer(f"{store.uri}{info.key}")
        for member in members_of(store, info):
            samples.add(member)
        return samples.part(info)

    def split(self, part: Part, ids: Ints, raws: Sequence[Sequence[memoryview]]) -> list[Sample]:
        """Return the members of each sample."""
        offsets = part.columns["member.offset"][ids].tolist()
        lengths = part.columns["member.length"][ids].tolist()
        names = [f.name for f in part.fields]
        absent = int(ABSENT)
        return [
            {
                name: raw[0][at : at + size]
                for name, at, size in zip(names, starts, sizes, strict=True)
                if size != absent
            }
            for raw, starts, sizes in zip(raws, offsets, lengths, strict=True)
        ]

    def columns(
        self, part: Part, ids: Ints, data: Bytes, starts: Ints, lengths: Ints
    ) -> FieldColumns:
        """Return the members of all samples."""
        offsets = part.columns["member.offset"][ids].astype(np.int64)
        sizes = part.columns["member.length"][ids].astype(np.int64)
        is_absent = sizes == int(ABSENT)
        offsets[is_absent], sizes[is_absent] = 0, -1
        # A member may claim more than its sample has; a slice of single samples ends there too.
        rest = lengths[:, None] - offsets
        sizes = np.where(is_absent, -1, np.clip(sizes, 0, np.maximum(rest, 0)))
        return {
            f.name: Ragged(data, starts + offsets[:, i], sizes[:, i])
            for i, f in enumerate(part.fields)
        }


class _SampleGatherer:
    """Members of one archive, gathered into samples."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._keys: list[str] = []
        self._offsets: list[int] = []
        self._ends: list[int] = []
        self._field_numbers: dict[str, int] = {}
        self._members: list[tuple[int, int, int, int]] = []
        self._seen: set[str] = set()

    def add(self, member: TarMember) -> None:
        key, name = split_name(member.name)
        if not name:
            return
        if not self._keys or key != self._keys[-1]:
            self._keys.append(key)
            self._offsets.append(member.offset)
            self._ends.append(member.offset)
            self._seen.clear()
        if name in self._seen:
            raise FormatError(
                f"{self._where}: sample {key!r} has two members {name!r}; give each sample a name "
                "of its own"
            )
        self._seen.add(name)
        number = self._field_numbers.setdefault(name, len(self._field_numbers))
        if number >= MEMBERS_MAX:
            raise too_many_members(self._where, name)
        inside = member.offset - self._offsets[-1]
        self._members.append((len(self._keys) - 1, number, inside, member.size_bytes))
        self._ends[-1] = member.offset + member.size_bytes

    def part(self, info: ObjectInfo) -> Part:
        num_samples, num_fields = len(self._keys), len(self._field_numbers)
        table = np.array(self._members, np.int64).reshape(-1, 4)
        if len(table) and int(table[:, 2:].max()) >= int(ABSENT):
            raise FormatError(f"{self._where}: a sample of 4 GiB or more cannot be indexed")
        offsets = np.zeros((num_samples, num_fields), np.uint32)
        lengths = np.full((num_samples, num_fields), ABSENT, np.uint32)
        offsets[table[:, 0], table[:, 1]] = table[:, 2]
        lengths[table[:, 0], table[:, 1]] = table[:, 3]
        start = np.array(self._offsets, np.int64)
        return make_part(
            format="tar",
            fields=[
                Field(
                    name=name,
                    encoding=encoding_of(name),
                    optional=bool((lengths[:, number] == ABSENT).any()),
                )
                for name, number in self._field_numbers.items()
            ],
            tables=[
                Rows(
                    objects=[info],
                    counts=[num_samples],
                    addressing="extents",
                    columns={"offset": start, "length": np.array(self._ends, np.int64) - start},
                )
            ],
            keys=self._keys,
            members=(offsets, lengths),
        )


def split_name(name: str) -> tuple[str, str]:
    """Return key and field of a member's name.

    >>> split_name("train/n01.5/0001.seg.png"), split_name("README")
    (('train/n01.5/0001', 'seg.png'), ('README', ''))
    """
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return folder + slash + stem, extension.lower() if stem else ""


def members_of(store: Store, info: ObjectInfo) -> Iterator[TarMember]:
    """Yield the regular files of an archive, header by header."""
    reader = HeaderReader(store, info, walks=True)
    where = f"{store.uri}{info.key}"
    at = 0
    long_name: str | None = None
    long_size: int | None = None
    while at + _BLOCK <= info.size_bytes:
        header = bytes(reader.read(at, _BLOCK))
        if header.count(0) == _BLOCK:
            return
        size_bytes, kind = _parse(header, where, at)
        data = at + _BLOCK
        if kind in (b"L", b"x"):
            text = bytes(reader.read(data, _checked(size_bytes, where, at)))
            if kind == b"L":
                long_name = text.rstrip(b"\0").decode("utf-8", "surrogateescape")
            else:
                records = _pax(text, where, at)
                long_name = records.get("path", long_name)
                long_size = _pax_size(records, where, at)
        elif kind in _REGULAR:
            size_bytes = size_bytes if long_size is None else long_size
            yield TarMember(long_name or _name(header), data, size_bytes)
            long_name = long_size = None
        elif kind in _SKIPPED:
            long_name = long_size = None
        elif kind not in (b"g", b"K"):
            raise _unreadable(kind, where, at)
        # Sizes are never negative, so every turn comes nearer to the end.
        at = data + -(-size_bytes // _BLOCK) * _BLOCK
    if at > info.size_bytes:
        raise FormatError(
            f"{where} is cut off: its last member ends at {at}, the object at {info.size_bytes}"
        )


def _unreadable(kind: bytes, where: str, at: int) -> FormatError:
    if kind == b"S":
        return _sparse(where, at)
    return FormatError(
        f"{where}: member type {kind!r} at byte {at} cannot be read in place; write the archive "
        "anew with plain files only"
    )


def _sparse(where: str, at: int) -> FormatError:
    return FormatError(
        f"{where}: the member at byte {at} is sparse: its holes are left out, so its bytes cannot "
        "be read in place; unpack the archive and write it anew without `tar --sparse`"
    )


def _parse(header: bytes, where: str, at: int) -> tuple[int, bytes]:
    """Return size and type of a member."""
    total = sum(header[:148]) + sum(header[156:]) + 8 * 32
    if _octal(header[148:156]) != total:
        found = f": it starts with {header[:8]!r}" if at == 0 else ""
        raise FormatError(f"{where} is not a tar archive, or is damaged, at byte {at}{found}")
    size_bytes: int | None
    if header[124] & 0x80:  # Base 256, of which the first bit is the sign.
        size_bytes = int.from_bytes(header[125:136], "big") if header[124] == 0x80 else None
    else:
        size_bytes = _octal(header[124:136])
    if size_bytes is None:
        raise FormatError(
            f"{where} is damaged: the member at byte {at} has the size {header[124:136]!r}; "
            "copy it anew"
        )
    return size_bytes, header[156:157]


def _octal(field: bytes) -> int | None:
    """Return an octal number of a header, or None. int() alone would accept `-7` and `1_0`.

    >>> _octal(b"0000644\\0"), _octal(b"\\0\\0"), _octal(b"-7 ")
    (420, 0, None)
    """
    digits = field.strip(b"\0 ")
    return int(digits or b"0", 8) if not digits.strip(b"01234567") else None


def _name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0":
        prefix = header[345:500].split(b"\0", 1)[0]
        name = prefix + b"/" + name if prefix else name
    return name.decode("utf-8", "surrogateescape")


def _pax(text: bytes, where: str, at: int) -> dict[str, str]:
    """Return the records of a PAX header: `LENGTH key=value\\n`, the length counting itself."""
    records: dict[str, str] = {}
    start = 0
    while start < len(text) and text[start]:
        digits = text[start : start + 20].partition(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        record = text[start + len(digits) + 1 : start + max(length - 1, 0)]
        key, equals, value = record.partition(b"=")
        # A record is longer than nothing, so every turn comes nearer to the end.
        if not equals or start + length > len(text):
            raise FormatError(
                f"{where} is damaged: the PAX header at byte {at} has "
                f"{text[start : start + 40]!r}, which is not a record; copy it anew"
            )
        records[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        start += length
    if any(key.startswith(_SPARSE) for key in records):
        raise _sparse(where, at)
    return records


def _pax_size(records: dict[str, str], where: str, at: int) -> int | None:
    """Return the size that a PAX header gives to the next member."""
    text = records.get("size")
    # No object has more than 18 digits of bytes, and int() refuses texts of thousands.
    if text is not None and not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise FormatError(
            f"{where} is damaged: the PAX header at byte {at} gives a member the size "
            f"{text[:40]!r}; copy it anew"
        )
    return None if text is None else int(text)


def _checked(size_bytes: int, where: str, at: int) -> int:
    if size_bytes > _LONG_NAME_BYTES_MAX:
        raise FormatError(f"{where}: a name of {size_bytes} bytes at byte {at}; it is damaged")
    return size_bytes
