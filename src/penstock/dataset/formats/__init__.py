"""The formats that are read in place, one file each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.dataset.formats.arrow import ArrowFormat
from penstock.dataset.formats.base import Format
from penstock.dataset.formats.checked import CheckedFormat
from penstock.dataset.formats.files import FilesFormat
from penstock.dataset.formats.jsonl import JsonlFormat
from penstock.dataset.formats.litdata import LitDataFormat
from penstock.dataset.formats.mds import MdsFormat
from penstock.dataset.formats.npy import NpyFormat
from penstock.dataset.formats.parquet import ParquetFormat
from penstock.dataset.formats.parser_process import ParserProcessFormat
from penstock.dataset.formats.tar import TarFormat
from penstock.errors import OptionError
from penstock.storage.base import ObjectInfo

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        MdsFormat(),
        LitDataFormat(),
        TarFormat(),
        ParquetFormat(),
        ArrowFormat(),
        JsonlFormat(),
        NpyFormat(),
        FilesFormat(),
    )
}
"""All formats by name; where two claim the same bytes, the first wins."""
_OURS = dict(FORMATS)


class AddedFormats:
    """Formats that the user has added; unpickled in another process, they are added there."""

    def __init__(self, formats: dict[str, Format] | None = None) -> None:
        added = {name: f for name, f in FORMATS.items() if _OURS.get(name) is not f}
        self._formats = added if formats is None else formats

    def __reduce__(self) -> tuple[Any, ...]:
        return _added, (self._formats,)


def _added(formats: dict[str, Format]) -> AddedFormats:
    FORMATS.update(formats)
    return AddedFormats(formats)


def format_named(name: str) -> CheckedFormat:
    """Return a format by its name."""
    if name not in FORMATS:
        raise OptionError(f"there is no format {name!r}; there are: {', '.join(FORMATS)}")
    return ParserProcessFormat(FORMATS[name])


def format_of(objects: Sequence[ObjectInfo]) -> CheckedFormat:
    """Return the format that claims most bytes of some objects.

    A README beside the shards or a list of labels beside the images does not change what a data set
    is.
    """
    assert objects
    others = [f for f in FORMATS.values() if f.name != "files"]
    claimed = {f.name: sum(o.size_bytes + 1 for o in objects if f.claims(o.key)) for f in others}
    claimed["files"] = sum(
        o.size_bytes + 1 for o in objects if not any(f.claims(o.key) for f in others)
    )
    return format_named(max(claimed, key=lambda name: claimed[name]))
