"""A table beside files: a CSV with a header, one row a sample, one column the name of its file.

Names are relative to the CSV. The other columns are fields, each of one type: whole numbers where
all of its values are, else numbers, else text. Empty cells are absent, and so is `nan` among
numbers.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from penstock.dataset.bound import BoundPart
from penstock.dataset.fields import Field, decode
from penstock.dataset.formats.base import whole_objects
from penstock.dataset.part import Ints, make_part
from penstock.dataset.samples_in_parser import SamplesInParser, own_steps, reads_in_parser
from penstock.dataset.sources import DatasetSource, field_extension, tar_key, value_name
from penstock.dataset.writer_encode import clean_name
from penstock.errors import FormatError, OptionError
from penstock.storage.base import ObjectInfo, Store
from penstock.storage.keys import checked_key
from penstock.storage.locate import resolve
from penstock.storage.options import StoreOptions
from penstock.storage.pool import ReadPool, ReadRequest

FILE_COLUMNS = ("file", "path", "image", "filename", "file_name", "filepath")
"""Names by which the column of files is known, first come first served."""
_INFOS_AT_ONCE = 16

Cells = dict[str, list[str]]
"""Texts by column and row."""


class CsvSource:
    """Rows of a CSV with their files."""

    def __init__(
        self, store: Store, name: str, *, columns: Cells, files: Sequence[ObjectInfo]
    ) -> None:
        self._store = store
        self._name = name
        self._files = files
        self._columns = {name: _typed(values) for name, values in columns.items()}

    @property
    def uri(self) -> str:
        """Where the CSV lies."""
        return self._store.uri + self._name

    @property
    def fingerprint(self) -> str:
        """A hash of the rows and of the marks of their files."""
        digest = xxhash.xxh3_128(msgspec.json.encode(self._columns))
        for info in self._files:
            digest.update(f"{info.key} {info.size_bytes} {info.etag} {info.mtime_ns}\n".encode())
        return digest.hexdigest()

    @property
    def num_fields(self) -> int:
        """The file and the columns beside it."""
        return 1 + len(self._columns)

    @property
    def num_samples(self) -> int:
        """Rows of the table."""
        return len(self._files)

    def sizes_of(self, numbers: Ints) -> Ints:
        """Return the sizes of the files of some rows."""
        return np.array([self._files[n].size_bytes for n in numbers.tolist()], np.int64)

    def key(self, number: int) -> str | None:
        """Return the file's name without its extension."""
        return tar_key(self._files[number].key, has_extension=True)

    def read(self, numbers: Ints, readers: ReadPool, *, decoded: bool) -> list[dict[str, Any]]:
        """Return rows with the bytes of their files, or what those are decoded to."""
        infos = [self._files[n] for n in numbers.tolist()]
        buffers = [np.empty(info.size_bytes, np.uint8).data for info in infos]
        pairs = zip(infos, buffers, strict=True)
        requests = [ReadRequest(info=i, offset=0, target=b) for i, b in pairs if i.size_bytes]
        readers.read_many(self._store, requests)
        values: list[Any] = self._decoded(numbers, infos, buffers) if decoded else list(buffers)
        rows = zip(numbers.tolist(), infos, values, strict=True)
        return [self._sample(n, info, value) for n, info, value in rows]

    def _decoded(
        self, numbers: Ints, infos: Sequence[ObjectInfo], buffers: Sequence[memoryview]
    ) -> list[Any]:
        """Return the contents of files, those of one extension decoded together."""
        out: list[Any] = [None] * len(infos)
        kinds = [_extension(info) for info in infos]
        for kind in dict.fromkeys(kinds):
            places = [place for place, other in enumerate(kinds) if other == kind]
            names = [f"row {int(numbers[place]) + 2} of {self.uri}" for place in places]
            bound = self._bound(kind, [infos[place] for place in places])
            ids, raws = range(len(places)), [[buffers[place]] for place in places]
            if reads_in_parser(bound, [kind]):
                sent = SamplesInParser(bound, bound.part, ids, raws, names)
                samples = sent.samples(ids, own_steps(bound))
                values = [sample[kind] for sample in samples]
            else:
                step = bound.steps[kind]
                pairs = zip(raws, names, strict=True)
                values = [decode(*step, raw[0], partial(str, name)) for raw, name in pairs]
            for place, value in zip(places, values, strict=True):
                out[place] = value
        return out

    def _bound(self, kind: str, infos: Sequence[ObjectInfo]) -> BoundPart:
        """Return files of one extension as samples of their own."""
        fields = [Field(name=kind, encoding=kind)]
        part = make_part(format="files", fields=fields, tables=[whole_objects(infos)])
        return BoundPart(store=self._store, part=part, first=0, decoders={})

    def _sample(self, number: int, info: ObjectInfo, content: Any) -> dict[str, Any]:
        out: dict[str, Any] = {_extension(info): content}
        for name, values in self._columns.items():
            value = values[number]
            if value is not None:
                field_name = value_name(name, value, out)
                if field_name in out:
                    raise OptionError(
                        f"column {name!r} of {self.uri} would be the field {field_name!r}, which "
                        "the sample has already; rename the column"
                    )
                out[field_name] = value
        return out


PackSource = DatasetSource | CsvSource
"""Samples that can be packed."""


def _extension(info: ObjectInfo) -> str:
    return field_extension(info.key) or "bin"


def open_csv(uri: str | Path, options: StoreOptions | None, column: str | None) -> CsvSource:
    """Return the rows of a CSV, all of its files found."""
    located = resolve(str(uri), options)
    store, info = located.store, located.objects[0]
    where = f"{store.uri}{info.key}"
    cells = _cells(_text(store.read(info.key), where), where)
    chosen = _file_column(cells, column, where)
    folder = info.key.rpartition("/")[0]
    below = f"{folder}/" if folder else ""
    names = cells.pop(chosen)
    keys = [_file_key(below, name, number, where) for number, name in enumerate(names)]
    return CsvSource(store, info.key, columns=cells, files=_infos(store, keys, where))


def _text(data: memoryview, where: str) -> str:
    try:
        return str(data, "utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{where} is not UTF-8 text: byte {error.start} is {bytes(data[error.start :][:1])!r}; "
            "write it anew as UTF-8 (`iconv -f CP1252 -t UTF-8`)"
        ) from error


def _cells(text: str, where: str) -> Cells:
    """Return the columns of a table by name."""
    reader = csv.reader(io.StringIO(text, newline=""), dialect=_dialect(text))
    try:
        rows = list(reader)
    except csv.Error as error:
        raise FormatError(f"{where}: line {reader.line_num} is not CSV: {error}") from error
    rows = [row for row in rows if row]
    if len(rows) < 2:
        raise FormatError(f"{where} has {len(rows)} rows; a header and at least one row are needed")
    header = rows[0]
    if len({clean_name(name) for name in header}) < len(header):
        raise FormatError(f"{where} has two columns of one name: {header}; rename one of them")
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(header):
            raise FormatError(f"{where}: row {number} has {len(row)} cells, not {len(header)}")
    return {name: [row[i] for row in rows[1:]] for i, name in enumerate(header)}


def _dialect(text: str) -> type[csv.Dialect]:
    first = text.partition("\n")[0]
    return csv.excel_tab if "\t" in first and "," not in first else csv.excel


def _file_column(cells: Cells, chosen: str | None, where: str) -> str:
    by_name = {name.strip().lower(): name for name in cells}
    wanted = FILE_COLUMNS if chosen is None else (chosen.lower(),)
    found = [by_name[name] for name in wanted if name in by_name]
    if not found:
        raise OptionError(
            f"{where} has no column {' or '.join(wanted)}; it has {', '.join(cells)}: name the one "
            "that holds files with file_column="
        )
    return found[0]


def _file_key(below: str, name: str, number: int, where: str) -> str:
    try:
        return checked_key(below + name.strip().removeprefix("./"))
    except OptionError as error:
        raise OptionError(f"row {number + 2} of {where}: {error}") from None


def _infos(store: Store, keys: Sequence[str], where: str) -> list[ObjectInfo]:
    if store.can_list:
        found = {info.key: info for info in store.list()}
    else:
        with ReadPool(_INFOS_AT_ONCE) as pool:
            found = {info.key: info for info in pool.map_unordered(store.info, set(keys))}
    missing = [number for number, key in enumerate(keys) if key not in found]
    if missing:
        raise FormatError(
            f"{len(missing)} of {len(keys)} files of {where} are not there, the first is "
            f"{keys[missing[0]]!r} in row {missing[0] + 2}; names are relative to the CSV"
        )
    return [found[key] for key in keys]


def _typed(values: Sequence[str]) -> list[Any]:
    """Return the values of a column, all of one type; None where a cell is empty."""
    kinds: tuple[Callable[[str], Any], ...] = (_whole, _number)
    for kind in kinds:
        try:
            return [kind(value.strip()) if value.strip() else None for value in values]
        except ValueError:
            continue
    return [value if value else None for value in values]


def _whole(text: str) -> int:
    # int() also takes "1_000", and "007" is a name rather than a number.
    if str(int(text)) != text.removeprefix("+"):
        raise ValueError(text)
    return int(text)


def _number(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None
