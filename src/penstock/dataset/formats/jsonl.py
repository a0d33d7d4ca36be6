"""JSON lines: one line, one sample; plain, or compressed with zstd.

Plain lines are addressed alone: a scan reads the object once and notes where lines start and end.
In a compressed object only frames can be read alone, so a block is a frame, or as many frames as
it takes until a line ends where a frame does. `zstd FILE` writes a single frame, which is a single
block; this writes frames of 10000 lines: `split -l 10000 --filter='zstd -c' FILE.jsonl >
FILE.jsonl.zst`.

The fields are the keys of each object's first line, or those of the option `fields`. Nothing is
known of the other lines, so every field is optional: a line that lacks one makes a sample without
it, and keys that are not among the fields are left out. Lines that are not JSON objects have one
field, `value`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import zstandard

from penstock.dataset.fields import VALUE, Field
from penstock.dataset.formats.base import Options, Sample, Unit, block_rows, one_unit_each
from penstock.dataset.part import Ints, Part, Rows, make_part
from penstock.errors import DecodeError, FormatError, OptionError
from penstock.storage.base import ObjectInfo, Store

_READ_BYTES = 8 << 20
_LINE_BYTES_MAX = 256 << 20
_BLOCK_BYTES_MAX = 512 << 20
# A few bytes of zstd can stand for 128 KiB, so what one feed becomes is bounded by feeding little.
_FEED_BYTES = 8 << 10
_BOM = b"\xef\xbb\xbf"
_PLAIN = (".jsonl", ".ndjson")
_ZSTD = tuple(plain + end for plain in _PLAIN for end in (".zst", ".zstd"))
_REFUSED = tuple(plain + end for plain in _PLAIN for end in (".gz", ".bz2", ".xz"))


class JsonlFormat:
    """JSON lines, plain and in zstd.

    Option: `fields=[...]` names the keys that samples shall have.
    """

    name = "jsonl"
    options: frozenset[str] = frozenset({"fields"})

    def claims(self, key: str) -> bool:
        """Return whether the name is that of JSON lines, compressed ones included."""
        return key.lower().endswith(_PLAIN + _ZSTD + _REFUSED)

    def units(self, objects: Sequence[ObjectInfo], store: Store, options: Options) -> list[Unit]:
        """Return a unit for each object; all plain or all compressed."""
        if isinstance(options.get("fields"), str):
            raise OptionError(f"fields must be a list of names, got {options['fields']!r}")
        for info in objects:
            if info.key.lower().endswith(_REFUSED):
                raise FormatError(
                    f"{store.uri}{info.key} is compressed in a way that allows no access to its "
                    "lines; decompress it, or write it with zstd: `gzip -dc FILE | "
                    "split -l 10000 --filter='zstd -c' > FILE.jsonl.zst`"
                )
        num_packed = sum(_is_packed(o) for o in objects)
        if 0 < num_packed < len(objects):
            raise FormatError(
                f"{store.uri} holds {len(objects) - num_packed} plain and {num_packed} compressed "
                "JSON lines objects; open one kind with a pattern such as `*.jsonl.zst`"
            )
        return one_unit_each(objects)

    def scan(self, unit: Unit, store: Store, options: Options) -> Part:
        """Return where the lines of one object lie; the whole object is read, once."""
        (info,) = unit.objects
        where = f"{store.uri}{info.key}"
        rows, first = (_scan_packed if _is_packed(info) else _scan_plain)(store, info)
        value = _decoded_first(first, where) if first else {}
        is_object = isinstance(value, dict)
        names = options.get("fields") or (list(value) if is_object else ["value"])
        return make_part(
            format=self.name,
            fields=[Field(name=name, encoding=VALUE, optional=True) for name in names],
            tables=[rows],
            options={"lines": "objects" if is_object else "values"},
        )

    def split(self, part: Part, ids: Ints, raws: Sequence[Sequence[memoryview]]) -> list[Sample]:
        """Return the fields of lines."""
        read = _LineReader(part)
        return [read(raws[j][0], partial(_place, part, ids[j : j + 1])) for j in range(len(ids))]

    def unpack(self, part: Part, number: int, offset: int, raw: memoryview) -> LineBlock:
        """Return the lines of some frames."""
        where = f"the block at byte {offset} of {part.tables[0].key(number)}"
        try:
            unpacker = zstandard.ZstdDecompressor()
            with unpacker.stream_reader(raw, read_across_frames=True) as reader:
                data = reader.readall()
        except zstandard.ZstdError as error:
            raise FormatError(f"{where} cannot be decompressed: {error}") from error
        return LineBlock(data, _LineReader(part), where)


class LineBlock:
    """Lines of a compressed object, found but not yet parsed."""

    def __init__(self, data: bytes, read: _LineReader, where: str) -> None:
        self._data = memoryview(data)
        self._read = read
        self._where = where
        self._starts, self._ends = _lines(data)

    @property
    def size_bytes(self) -> int:
        """Memory of the lines and of where they lie."""
        return len(self._data) + self._starts.nbytes + self._ends.nbytes

    def sample(self, row: int) -> Sample:
        """Return one line, parsed."""
        line = self._data[self._starts[row] : self._ends[row]]
        return self._read(line, lambda: f"line {row} of {self._where}")


class _LineReader:
    """Turns lines of one part into samples."""

    def __init__(self, part: Part) -> None:
        self._names = [f.name for f in part.fields]
        self._known = frozenset(self._names)
        self._has_objects = part.options["lines"] == "objects"

    def __call__(self, line: memoryview, where: Callable[[], str]) -> Sample:
        try:
            value = _decoded(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DecodeError(
                f"{where()} ({len(line)} bytes) is not JSON: {error}; correct it and index it again"
            ) from error
        if not self._has_objects:
            return {"value": value}
        if not isinstance(value, dict):
            raise DecodeError(
                f"{where()} is a {type(value).__name__}, the first line is an object: make all "
                "lines objects, or none"
            )
        if value.keys() <= self._known:
            return value
        return {name: value[name] for name in self._names if name in value}


def _place(part: Part, one_id: Ints) -> str:
    found = part.tables[0].extents(one_id)
    return f"the line at byte {found.offset[0]} of {part.tables[0].key(int(found.object[0]))}"


def _decoded(line: memoryview | bytes) -> Any:
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError:
        if bytes(line[:3]) == _BOM:
            return msgspec.json.decode(line[3:])
        raise


def _decoded_first(line: bytes, where: str) -> Any:
    try:
        return _decoded(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(
            f"{where}: the first line ({len(line)} bytes) is not JSON: {error}; a file that is one "
            "large array becomes lines with `jq -c '.[]'`"
        ) from error


def _is_packed(info: ObjectInfo) -> bool:
    return info.key.lower().endswith(_ZSTD)


def _is_blank(line: bytes) -> bool:
    return not line or line.isspace()


def _lines(data: bytes) -> tuple[Ints, Ints]:
    """Return start and end of all lines that are not blank, without their line ends.

    >>> [a.tolist() for a in _lines(b"1\\r\\n\\n22")]
    [[0, 4], [1, 6]]
    """
    values = np.frombuffer(data, np.uint8)
    breaks = np.flatnonzero(values == ord("\n"))
    starts = np.concatenate([[0], breaks + 1])
    ends = np.concatenate([breaks, [len(values)]])
    kept = ends > starts
    starts, ends = starts[kept], ends[kept]
    ends -= values[ends - 1] == ord("\r")
    # Few lines start with a space or are empty by now: only these are looked at one by one.
    suspects = np.flatnonzero((ends == starts) | (values[starts] <= ord(" ")))
    blank = [i for i in suspects.tolist() if _is_blank(data[starts[i] : ends[i]])]
    return np.delete(starts, blank), np.delete(ends, blank)


def _ranges(store: Store, info: ObjectInfo) -> Iterator[memoryview]:
    for offset in range(0, info.size_bytes, _READ_BYTES):
        yield store.read_range(info, offset, min(_READ_BYTES, info.size_bytes - offset))


def _scan_plain(store: Store, info: ObjectInfo) -> tuple[Rows, bytes]:
    """Return the lines of an object, and the first of them."""
    starts, ends, first = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], b""
    rest, rest_at = b"", 0
    for piece in _ranges(store, info):
        data = rest + bytes(piece)
        is_last = rest_at + len(data) == info.size_bytes
        whole = data if is_last else data[: data.rfind(b"\n") + 1]
        begin, end = _lines(whole)
        if not first and len(begin):
            first = whole[begin[0] : end[0]]
        starts.append(begin + rest_at)
        ends.append(end + rest_at)
        rest, rest_at = data[len(whole) :], rest_at + len(whole)
        _check_line(len(rest), f"{store.uri}{info.key}", rest_at)
    offset = np.concatenate(starts)
    length = np.concatenate(ends) - offset
    rows = Rows(
        objects=[info],
        counts=[len(offset)],
        addressing="extents",
        columns={"offset": offset, "length": length},
    )
    return rows, first


def _check_line(length: int, where: str, at: int) -> None:
    if length > _LINE_BYTES_MAX:
        raise FormatError(
            f"{where}: the line at byte {at} has more than {_LINE_BYTES_MAX} bytes; "
            "a sample should be smaller, or these are not JSON lines"
        )


def _scan_packed(store: Store, info: ObjectInfo) -> tuple[Rows, bytes]:
    """Return the blocks of a compressed object, and its first line."""
    blocks = _Blocks(f"{store.uri}{info.key}")
    unpacker = zstandard.ZstdDecompressor()
    frame = unpacker.decompressobj()
    at = 0
    is_open = False
    for piece in _ranges(store, info):
        inside = 0
        while inside < len(piece):
            feed = piece[inside : inside + _FEED_BYTES]
            try:
                blocks.add(frame.decompress(feed))
            except zstandard.ZstdError as error:
                raise FormatError(
                    f"{blocks.where} is not zstd, or is damaged, near byte {at + inside}: {error}"
                ) from error
            inside += len(feed) - len(frame.unused_data)
            is_open = not frame.eof
            if frame.eof:
                blocks.end_frame(at + inside, is_last=at + inside == info.size_bytes)
                frame = unpacker.decompressobj()
        at += len(piece)
    if is_open:
        raise FormatError(f"{blocks.where} is cut off: its last frame does not end at {at} bytes")
    return block_rows(info, blocks.rows), blocks.first


class _Blocks:
    """Frames of one object, gathered until a line ends where a frame does."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.rows: list[tuple[int, int, int]] = []
        self.first = b""
        self._start = 0
        self._text = bytearray()

    def add(self, text: bytes) -> None:
        self._text += text
        if len(self._text) > _BLOCK_BYTES_MAX:
            raise FormatError(
                f"{self.where}: the block at byte {self._start} unpacks to more than "
                f"{_BLOCK_BYTES_MAX} bytes; write it in smaller frames: `zstd -dc FILE.jsonl.zst | "
                "split -l 10000 --filter='zstd -c' > NEW.jsonl.zst`"
            )

    def end_frame(self, end: int, *, is_last: bool) -> None:
        if not is_last and not self._text.endswith(b"\n"):
            return
        text = bytes(self._text)
        starts, ends = _lines(text)
        if len(starts):
            self.first = self.first or text[starts[0] : ends[0]]
            self.rows.append((self._start, end - self._start, len(starts)))
            self._start = end
            self._text.clear()
