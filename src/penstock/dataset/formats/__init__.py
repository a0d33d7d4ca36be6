"""The formats that are read in place, one file each."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.dataset.formats.apart import ApartFormat
from penstock.dataset.formats.arrow import ArrowFormat
from penstock.dataset.formats.base import Format
from penstock.dataset.formats.files import FilesFormat
from penstock.dataset.formats.jsonl import JsonlFormat
from penstock.dataset.formats.litdata import LitDataFormat
from penstock.dataset.formats.mds import MdsFormat
from penstock.dataset.formats.npy import NpyFormat
from penstock.dataset.formats.parquet import ParquetFormat
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


def format_named(name: str) -> Format:
    """Return a format by its name."""
    if name not in FORMATS:
        raise OptionError(f"there is no format {name!r}; there are: {', '.join(FORMATS)}")
    return ApartFormat(FORMATS[name])


def format_of(objects: Sequence[ObjectInfo]) -> Format:
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
