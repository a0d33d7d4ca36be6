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

import numpy as np
import zstandard

from penstock.dataset.decode_columns import decode_jsons
from penstock.dataset.fields import VALUE, Field
from penstock.dataset.formats.base import Bytes, Options, Sample, Unit, block_rows, one_unit_each
from penstock.dataset.formats.zstd_frames import (
    BLOCK_BYTES_MAX,
    Frames,
    inflated_frames,
    unpacked_bytes_max,
)
from penstock.dataset.part import Ints, Part, Rows, make_part
from penstock.dataset.plain_json import decode_json
from penstock.dataset.ragged import FieldColumns, Ragged
from penstock.errors import DecodeError, FormatError, OptionError
from penstock.storage.base import ObjectInfo, Store

_READ_BYTES = 8 << 20
_LINE_BYTES_MAX = 256 << 20
_BLOCK_LINES_MAX = 1 << 24
"""Lines of one block: where each of them lies takes 8 bytes while the block is kept."""
_FIELDS_MAX = 4096
"""Keys of a first line: a file that is one large object by id is not JSON lines."""
_NEAR_BYTES = 4 << 10
_SEARCH_BYTES = 1 << 20
"""Text that is searched for line ends at once: short lines take 24 times their size meanwhile."""
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
        num_packed = sum(is_packed(o) for o in objects)
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
        rows, first = (_scan_packed if is_packed(info) else _scan_plain)(store, info)
        value = _decoded_first(first, where) if first else {}
        is_object = isinstance(value, dict)
        names = options.get("fields") or (list(value) if is_object else ["value"])
        if len(names) > _FIELDS_MAX:
            raise FormatError(
                f"{where}: the first line has {len(names)} keys, a sample may have {_FIELDS_MAX}; "
                "name those to read with fields=[...], or make each value a line: `jq -c '.[]'`"
            )
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

    def has_columns(self, part: Part) -> bool:
        """Return True: many lines are parsed at once."""
        return True

    def columns(
        self, part: Part, ids: Ints, data: Bytes, starts: Ints, lengths: Ints
    ) -> FieldColumns | None:
        """Return the fields of all lines."""
        return _LineReader(part).columns(Ragged(data, starts, lengths))

    def unpack(self, part: Part, number: int, offset: int, raw: memoryview) -> LineBlock:
        """Return the lines of some frames."""
        where = f"the block at byte {offset} of {part.tables[0].key(number)}"
        return LineBlock(inflated_frames(raw, BLOCK_BYTES_MAX), _LineReader(part), where)


class LineBlock:
    """Lines of a compressed object, found but not yet parsed."""

    def __init__(self, data: memoryview, read: _LineReader, where: str) -> None:
        self._data = data
        self._read = read
        self._where = where
        # A block is smaller than 4 GiB.
        found = [(a.astype(np.uint32), b.astype(np.uint32)) for a, b in _all_lines(data)]
        self._starts = np.concatenate([a for a, _ in found] or [np.zeros(0, np.uint32)])
        self._ends = np.concatenate([b for _, b in found] or [np.zeros(0, np.uint32)])

    @property
    def size_bytes(self) -> int:
        """Memory of the lines and of where they lie."""
        return len(self._data) + self._starts.nbytes + self._ends.nbytes

    def sample(self, row: int) -> Sample:
        """Return one line, parsed."""
        if row >= len(self._starts):
            raise FormatError(
                f"line {row} of {self._where} is not there: it has {len(self._starts)} lines, more "
                "were indexed; copy it anew"
            )
        line = self._data[int(self._starts[row]) : int(self._ends[row])]
        return self._read(line, lambda: f"line {row} of {self._where}")

    def columns(self, rows: Ints) -> FieldColumns | None:
        """Return some lines, parsed at once."""
        if int(rows.max()) >= len(self._starts):
            return None
        starts = self._starts[rows].astype(np.int64)
        data = np.frombuffer(self._data, np.uint8)
        return self._read.columns(Ragged(data, starts, self._ends[rows] - starts))


class _LineReader:
    """Turns lines of one part into samples."""

    def __init__(self, part: Part) -> None:
        self._names = [f.name for f in part.fields]
        self._known = frozenset(self._names)
        self._has_objects = part.options["lines"] == "objects"

    def __call__(self, line: memoryview, where: Callable[[], str]) -> Sample:
        try:
            value = decode_json(line)
        except ValueError as error:
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

    def columns(self, lines: Ragged) -> FieldColumns | None:
        values = decode_jsons(lines, np.empty)
        if values is None:
            return None
        if not self._has_objects:
            return {"value": values}
        if set(map(type, values)) != {dict}:
            return None
        return {name: [value.get(name) for value in values] for name in self._names}


def _place(part: Part, one_id: Ints) -> str:
    found = part.tables[0].extents(one_id)
    return f"the line at byte {found.offset[0]} of {part.tables[0].key(int(found.object[0]))}"


def _decoded_first(line: bytes, where: str) -> Any:
    try:
        return decode_json(line)
    except ValueError as error:
        raise FormatError(
            f"{where}: the first line ({len(line)} bytes) is not JSON: {error}; a file that is one "
            "large array becomes lines with `jq -c '.[]'`"
        ) from error


def is_packed(info: ObjectInfo) -> bool:
    """Return whether an object is compressed."""
    return info.key.lower().endswith(_ZSTD)


def _is_blank(line: bytes) -> bool:
    return not line or line.isspace()


def _lines(data: bytes | memoryview) -> tuple[Ints, Ints]:
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
    blank = [i for i in suspects.tolist() if _is_blank(bytes(data[starts[i] : ends[i]]))]
    return np.delete(starts, blank), np.delete(ends, blank)


def _all_lines(data: bytes | memoryview) -> Iterator[tuple[Ints, Ints]]:
    """Yield what `_lines` finds in a long text, piece by piece."""
    view = memoryview(data)
    start, searched = 0, 0
    while start < len(view):
        end = min(max(start, searched) + _SEARCH_BYTES, len(view))
        cut = end if end == len(view) else _last_break(view, max(start, searched), end)
        searched = end  # In a long line nothing is searched twice.
        if cut > start:
            starts, ends = _lines(view[start:cut])
            yield starts + start, ends + start
            start = cut


def _last_break(view: memoryview, start: int, end: int) -> int:
    """Return where the last line that ends in a range ends, or 0; it is mostly near the end."""
    near = max(start, end - _NEAR_BYTES)
    found = bytes(view[near:end]).rfind(b"\n")
    if found < 0 and near > start:
        near, found = start, bytes(view[start:near]).rfind(b"\n")
    return near + found + 1 if found >= 0 else 0


def _ranges(store: Store, info: ObjectInfo) -> Iterator[memoryview]:
    for offset in range(0, info.size_bytes, _READ_BYTES):
        yield store.read_range(info, offset, min(_READ_BYTES, info.size_bytes - offset))


def _scan_plain(store: Store, info: ObjectInfo) -> tuple[Rows, bytes]:
    """Return the lines of an object, and the first of them."""
    starts, lengths, first = [np.zeros(0, np.int64)], [np.zeros(0, np.uint32)], b""
    rest, rest_at = b"", 0
    for piece in _ranges(store, info):
        data = rest + bytes(piece)
        is_last = rest_at + len(data) == info.size_bytes
        whole = data if is_last else data[: data.rfind(b"\n") + 1]
        for begin, end in _all_lines(whole):
            if not first and len(begin):
                first = whole[begin[0] : end[0]]
            starts.append(begin + rest_at)
            lengths.append((end - begin).astype(np.uint32))  # A line is shorter than 4 GiB.
        rest, rest_at = data[len(whole) :], rest_at + len(whole)
        _check_line(len(rest), f"{store.uri}{info.key}", rest_at)
    offset, length = np.concatenate(starts), np.concatenate(lengths)
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
    blocks = _FrameGatherer(f"{store.uri}{info.key}", unpacked_bytes_max(info.size_bytes))
    frames = Frames()
    at = 0
    for piece in _ranges(store, info):
        try:
            for text in frames.fed(piece):
                blocks.add(text)
                if not frames.is_open:
                    end = at + frames.used
                    blocks.end_frame(end, is_last=end == info.size_bytes)
        except zstandard.ZstdError as error:
            raise FormatError(
                f"{blocks.where} is not zstd, or is damaged, near byte {at + frames.used}: {error}"
            ) from error
        at += len(piece)
    if frames.is_open:
        raise FormatError(f"{blocks.where} is cut off: its last frame does not end at {at} bytes")
    return block_rows(info, blocks.rows), blocks.first


class _FrameGatherer:
    """Frames of one object, gathered until a line ends where a frame does.

    Of the text only the last, unfinished line is kept: a block is counted, not held.
    """

    def __init__(self, where: str, size_bytes_max: int) -> None:
        self.where = where
        self.rows: list[tuple[int, int, int]] = []
        self.first = b""
        self._start = 0
        self._num_lines = 0
        self._size_bytes = 0
        self._total_bytes = 0
        self._total_bytes_max = size_bytes_max
        self._rest = bytearray()

    def add(self, text: bytes) -> None:
        self._size_bytes += len(text)
        self._total_bytes += len(text)
        cut = text.rfind(b"\n") + 1
        if cut:
            self._count(bytes(self._rest) + text[:cut])
            self._rest.clear()
        self._rest += text[cut:]
        self._refuse_large()

    def _count(self, text: bytes) -> None:
        for starts, ends in _all_lines(text):
            if len(starts) and not self.first:
                self.first = text[starts[0] : ends[0]]
            self._num_lines += len(starts)

    def _refuse_large(self) -> None:
        if self._total_bytes > self._total_bytes_max:
            raise FormatError(
                f"{self.where} unpacks to more than {self._total_bytes_max} bytes, which no lines "
                "of text do; it is damaged or made to fill memory"
            )
        if self._size_bytes > BLOCK_BYTES_MAX or self._num_lines > _BLOCK_LINES_MAX:
            raise FormatError(
                f"{self.where}: the block at byte {self._start} unpacks to more than "
                f"{BLOCK_BYTES_MAX} bytes or {_BLOCK_LINES_MAX} lines; write it in smaller frames: "
                "`zstd -dc FILE.jsonl.zst | split -l 10000 --filter='zstd -c' > NEW.jsonl.zst`"
            )

    def end_frame(self, end: int, *, is_last: bool) -> None:
        if self._rest and not is_last:
            return
        self._count(bytes(self._rest))
        self._rest.clear()
        if self._num_lines:
            self.rows.append((self._start, end - self._start, self._num_lines))
            self._start, self._num_lines, self._size_bytes = end, 0, 0
