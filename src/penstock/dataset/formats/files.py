"""Plain files: every object is a sample, and nothing but the listing is read to index them.

Objects that are images (at least half of them must be) make the field `image`; what lies among them
and is no image is left out, as torchvision's ImageFolder does. Objects of one other extension make
a field of that name; a mixture is the field `data`, as bytes. Where all objects lie in folders,
`class` is the number of the top folder among all of them, sorted by name: again as ImageFolder has
it. The names are in the data set's `options["classes"]`; `classes=False` leaves the field out,
`extensions=["png"]` says which objects to take. Tables, archives and other files of many samples
are refused unless `extensions` names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from penstock.dataset.fields import IMAGES, VALUE, Field
from penstock.dataset.formats.base import (
    Bytes,
    Options,
    Sample,
    SampleFormat,
    Unit,
    extension_of,
    whole_objects,
)
from penstock.dataset.formats.containers import refuse_containers
from penstock.dataset.part import Ints, Part, make_part
from penstock.dataset.ragged import FieldColumns, Ragged
from penstock.errors import FormatError
from penstock.storage.base import ObjectInfo, Store

_IMAGES = frozenset(IMAGES)
_UNIT_OBJECTS = 10_000
_CLASSES_MAX = 1 << 16
_CLASS = np.dtype("<u4")


class FilesFormat(SampleFormat):
    """Every object is a sample."""

    name = "files"
    options: frozenset[str] = frozenset({"classes", "extensions"})

    def claims(self, key: str) -> bool:
        """Return whether the name is not a hidden one (`.DS_Store`, `.git/…`)."""
        return not key.startswith(".") and "/." not in key

    def units(self, objects: Sequence[ObjectInfo], store: Store, options: Options) -> list[Unit]:
        """Return units of many objects each, in the order of the listing."""
        chosen = _chosen([o for o in objects if self.claims(o.key)], options)
        if not chosen:
            raise FormatError(
                f"{store.uri}: none of {len(objects)} objects can be a sample: names that start "
                f"with a dot cannot, nor can others than extensions={options.get('extensions')}"
            )
        if "extensions" not in options:
            refuse_containers(chosen, store.uri)
        names = _classes(chosen, store) if options.get("classes", True) else None
        name, encoding = _field_of({extension_of(o.key) for o in chosen})
        if names is not None and name == "class":
            name = "data"
        note = {"field": [name, encoding], "classes": names}
        return [
            Unit(objects=tuple(chosen[start : start + _UNIT_OBJECTS]), note=note)
            for start in range(0, len(chosen), _UNIT_OBJECTS)
        ]

    def scan(self, unit: Unit, store: Store, options: Options) -> Part:
        """Return each object as a sample; reads nothing."""
        objects, names = unit.objects, unit.note["classes"]
        name, encoding = unit.note["field"]
        fields = [Field(name=name, encoding=encoding)]
        if names is not None:
            fields.append(Field(name="class", encoding=VALUE, dtype="<i8", shape=()))
        rows = whole_objects(objects, None if names is None else _numbers(objects, names))
        return make_part(
            format="files",
            fields=fields,
            tables=[rows],
            keys=[o.key for o in objects],
            options={**options, "classes": names or []},
        )

    def split(self, part: Part, ids: Ints, raws: Sequence[Sequence[memoryview]]) -> list[Sample]:
        """Return each object's bytes, and the number of its class."""
        name = part.fields[0].name
        if len(part.fields) == 1:
            return [{name: raw} for (raw,) in raws]
        numbers = part.tables[0].blob_array(_CLASS)[ids].astype(np.int64)
        return [{name: raw, "class": n} for (raw,), n in zip(raws, numbers, strict=True)]

    def columns(
        self, part: Part, ids: Ints, data: Bytes, starts: Ints, lengths: Ints
    ) -> FieldColumns:
        """Return the bytes of all objects, and the numbers of their classes."""
        out: FieldColumns = {part.fields[0].name: Ragged(data, starts, lengths)}
        if len(part.fields) > 1:
            out["class"] = part.tables[0].blob_array(_CLASS)[ids].astype(np.int64)
        return out


def _chosen(objects: Sequence[ObjectInfo], options: Options) -> Sequence[ObjectInfo]:
    wanted = options.get("extensions")
    if wanted is not None:
        wanted = {str(e).lower().lstrip(".") for e in wanted}
        return [o for o in objects if extension_of(o.key) in wanted]
    images = [o for o in objects if extension_of(o.key) in _IMAGES]
    return images if len(images) * 2 >= len(objects) else objects


def _field_of(extensions: Iterable[str]) -> tuple[str, str]:
    """Return name and encoding of the field that objects of these extensions make.

    >>> _field_of({"png", "jpg"}), _field_of({"txt"}), _field_of({"txt", "json"})
    (('image', 'image'), ('txt', 'txt'), ('data', 'bytes'))
    """
    found = set(extensions)
    if found <= _IMAGES:
        return "image", "image"
    one = found.pop() if len(found) == 1 else ""
    return (one, one) if one else ("data", "bytes")


def _classes(objects: Sequence[ObjectInfo], store: Store) -> list[str] | None:
    """Return the names of all top folders, sorted; None where no object lies in one."""
    beside = [o.key for o in objects if "/" not in o.key]
    if len(beside) == len(objects):
        return None
    if beside:
        raise FormatError(
            f"{store.uri}: {len(beside)} of {len(objects)} objects lie beside the folders and so "
            f"have no class (the first is {beside[0]!r}); move them, name the objects to take with "
            "extensions=[...], or pass classes=False"
        )
    names = sorted({o.key.split("/", 1)[0] for o in objects})
    if len(names) > _CLASSES_MAX:
        raise FormatError(
            f"{store.uri}: {len(names)} top folders are too many to be classes (at most "
            f"{_CLASSES_MAX}); pass classes=False"
        )
    return names


def _numbers(objects: Sequence[ObjectInfo], names: Sequence[str]) -> list[bytes]:
    # Kept per object rather than as runs: parts are merged and numbered anew, and this survives it.
    packed: dict[str, Any] = {name: _CLASS.type(i).tobytes() for i, name in enumerate(names)}
    return [packed[o.key.split("/", 1)[0]] for o in objects]
