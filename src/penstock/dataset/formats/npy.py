"""NumPy arrays in `.npy` files: the rows of the first axis are samples.

Nothing is stored per sample: where a row lies is arithmetic. Several files of one type and row
shape follow each other in the order of their names. A structured type gives a field for each of its
members.

Arrays that lie side by side are one data set with a field each: `a.image.npy` beside `a.label.npy`,
or any names with `fields={"x": "x.npy", "y": "y.npy"}`. A single array is the field `data`;
`field="tokens"` names it.

With `sequence_length` arrays of one axis are cut into windows; `sequence_stride` (the length,
unless given) is the distance between their starts, so 513 and 512 give each window the first token
of the next. Windows never cross files, and the tail of a file that does not fill one is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.dataset.fields import VALUE, Field
from penstock.dataset.formats.base import Options, Sample, SampleFormat, Unit
from penstock.dataset.npy_header import ArrayHeader, dtype_text, read_header
from penstock.dataset.part import Ints, Part, Rows, make_part
from penstock.errors import FormatError, OptionError
from penstock.storage.base import ObjectInfo, Store


class NpyFormat(SampleFormat):
    """Rows of `.npy` arrays."""

    name = "npy"
    options: frozenset[str] = frozenset({"field", "fields", "sequence_length", "sequence_stride"})

    def claims(self, key: str) -> bool:
        """Return whether the name ends with `.npy`."""
        return key.lower().endswith(".npy")

    def units(self, objects: Sequence[ObjectInfo], store: Store, options: Options) -> list[Unit]:
        """Return a unit for each file, or for each set of files that lie side by side.

        The headers of the first unit are read: the others must agree with them.
        """
        _sequence(options)
        names, groups = _groups(objects, store, options)
        heads = [read_header(store, info) for info in groups[0]]
        note = {
            "names": names,
            "like": groups[0][0].key,
            "rows": [[dtype_text(h.dtype), list(h.row_shape)] for h in heads],
        }
        return [Unit(objects=tuple(group), note=note) for group in groups]

    def scan(self, unit: Unit, store: Store, options: Options) -> Part:
        """Return where the rows lie; reads a header each."""
        heads = [read_header(store, info) for info in unit.objects]
        for info, head, row in zip(unit.objects, heads, unit.note["rows"], strict=True):
            if [dtype_text(head.dtype), list(head.row_shape)] != row:
                raise FormatError(
                    f"{store.uri}{info.key} has rows of {head.dtype} {head.row_shape}, "
                    f"{unit.note['like']} has {row[0]} {tuple(row[1])}; if they are fields of one "
                    'sample say so: fields={"x": "x.npy", "y": "y.npy"}; if not, open them apart'
                )
        first = unit.objects[0]
        for info, head in zip(unit.objects, heads, strict=True):
            if head.length != heads[0].length:
                raise FormatError(
                    f"{store.uri}{info.key} has {head.length} rows, {first.key} beside it has "
                    f"{heads[0].length}; fields of one data set must have the same length"
                )
        layout = [
            (table, *column)
            for table, (name, head) in enumerate(zip(unit.note["names"], heads, strict=True))
            for column in _columns(name, head, options, len(heads))
        ]
        return make_part(
            format="npy",
            fields=[
                Field(name=name, encoding=VALUE, dtype=dtype, shape=tuple(shape))
                for _, name, dtype, shape, _ in layout
            ],
            tables=[
                _rows(info, head, options) for info, head in zip(unit.objects, heads, strict=True)
            ],
            options={**options, "places": [[table, at] for table, _, _, _, at in layout]},
        )

    def split(self, part: Part, ids: Ints, raws: Sequence[Sequence[memoryview]]) -> list[Sample]:
        """Return the rows as views (as NumPy scalars where a row is one number)."""
        columns = [
            (f.name, f.shape or (), np.dtype(f.dtype), table, at)
            for f, (table, at) in zip(part.fields, part.options["places"], strict=True)
        ]
        return [
            {
                name: np.ndarray(shape, dtype, raw[table], at)[()]
                for name, shape, dtype, table, at in columns
            }
            for raw in raws
        ]


def _sequence(options: Options) -> tuple[int, int] | None:
    """Return length and stride of windows, in elements."""
    length = options.get("sequence_length")
    stride = options.get("sequence_stride", length)
    if length is None and stride is None:
        return None
    for name, value in (("sequence_length", length), ("sequence_stride", stride)):
        if not isinstance(value, int) or value < 1:
            raise OptionError(f"{name} must be a whole number of at least 1, got {value!r}")
    return int(length or 0), int(stride or 0)


def _groups(
    objects: Sequence[ObjectInfo], store: Store, options: Options
) -> tuple[list[str], list[list[ObjectInfo]]]:
    """Return the names of the arrays that lie side by side, and the files that do."""
    if "fields" in options:
        by_key = {o.key: o for o in objects}
        for name, key in options["fields"].items():
            if key not in by_key:
                raise OptionError(
                    f"fields: {name!r} is to be {key!r}, which is not among the {len(by_key)} "
                    f"arrays of {store.uri} (the first is {objects[0].key!r})"
                )
        return list(options["fields"]), [[by_key[key] for key in options["fields"].values()]]
    by_stem = {} if "field" in options else _by_stem(objects)
    names = sorted({name for group in by_stem.values() for name in group})
    if len(names) < 2 or all(len(group) < 2 for group in by_stem.values()):
        return [options.get("field", "data")], [[o] for o in objects]
    for stem, group in by_stem.items():
        missing = [name for name in names if name not in group]
        if missing:
            raise FormatError(
                f"{store.uri}{stem}.{missing[0]}.npy is not there, but {stem} has "
                f"{', '.join(sorted(group))}: {len(group)} of {len(names)} fields; add it, or pass "
                'field="data" if these are parts of one array'
            )
    return names, [[by_stem[stem][name] for name in names] for stem in sorted(by_stem)]


def _by_stem(objects: Sequence[ObjectInfo]) -> dict[str, dict[str, ObjectInfo]]:
    """Return files named `stem.field.npy` by stem and field; none where a file is not named so."""
    out: dict[str, dict[str, ObjectInfo]] = {}
    for info in objects:
        folder, slash, name = info.key[: -len(".npy")].rpartition("/")
        stem, _, field = name.rpartition(".")
        # Numbers are not fields: `tokens.0001.npy` is the second part of one array.
        if not stem or not field.isidentifier():
            return {}
        out.setdefault(folder + slash + stem, {})[field] = info
    return out


def _columns(
    name: str, head: ArrayHeader, options: Options, num_arrays: int
) -> list[tuple[str, str, list[int], int]]:
    """Return name, type, shape and place of each field that the rows of an array hold."""
    window = _sequence(options)
    if head.dtype.names is None:
        shape = head.row_shape if window is None else (window[0],)
        return [(name, head.dtype.str, list(shape), 0)]
    if window is not None or head.row_shape:
        raise FormatError(
            f"{head.where} has records in rows of shape {head.row_shape}"
            f"{' cut into windows' if window else ''}; records can be read one a row: save the "
            "members as arrays of their own (a.x.npy, a.y.npy)"
        )
    prefix = f"{name}." if num_arrays > 1 else ""
    return [(prefix + n, d, s, at) for n, d, s, at in _members(head.dtype, head.where)]


def _members(dtype: np.dtype[Any], where: str) -> list[tuple[str, str, list[int], int]]:
    out: list[tuple[str, str, list[int], int]] = []
    for name in dtype.names or ():
        assert dtype.fields is not None
        member, at = dtype.fields[name][:2]
        if member.base.names is None:
            out.append((name, member.base.str, list(member.shape), at))
        elif member.shape:
            raise FormatError(
                f"{where}: member {name!r} is an array of records ({member}); save it as an array "
                "of its own"
            )
        else:
            out += [(f"{name}.{n}", d, s, at + a) for n, d, s, a in _members(member, where)]
    return out


def _rows(info: ObjectInfo, head: ArrayHeader, options: Options) -> Rows:
    count, stride, width = head.length, head.row_bytes, head.row_bytes
    window = _sequence(options)
    if window is not None:
        if head.row_shape:
            raise FormatError(
                f"{head.where} has {1 + len(head.row_shape)} axes; sequence_length is for arrays "
                "of one: leave it out, the rows are samples already"
            )
        count = max(0, (head.length - window[0]) // window[1] + 1)
        stride, width = window[1] * head.row_bytes, window[0] * head.row_bytes
    return Rows(
        objects=[info],
        counts=[count],
        addressing="even",
        columns={
            "base": np.array([head.data_offset]),
            "stride": np.array([stride]),
            "width": np.array([width]),
        },
    )
