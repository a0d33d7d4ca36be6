"""Files that hold many samples but cannot be read in place: what to do with each.

As plain files each would be one sample of bytes, which is rarely meant: a table of a million rows
is not one sample. A user who does mean it says so with `extensions=[...]`.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import FormatError
from penstock.storage.base import ObjectInfo

_PACKED = ("gz", "zst", "zstd", "bz2", "xz")
_TABLE = (
    "is a table: `penstock pack FILE DESTINATION` packs one that names a file in each row; rows "
    "alone can be read as Parquet or JSON lines (`pandas.read_csv(FILE).to_parquet(NEW)`)"
)
_JSON = (
    "is JSON: lines are read once the file is named .jsonl (so are the JSON shards of MosaicML's "
    "streaming), and a file that is one array becomes lines with `jq -c '.[]' FILE > NEW.jsonl`"
)
_RAW = (
    "is raw numbers without a header: save them as .npy "
    "(`np.save(NEW, np.fromfile(FILE, np.uint16))`) and open that, with sequence_length= for tokens"
)
_INDEX = "is an index, not data: open the data set that it belongs to"
_PICKLE = (
    "is pickled, which is never unpickled here because that runs code: save arrays as .npy and "
    "samples with `penstock.Writer`"
)
_CONTAINER = "holds many samples in a format that is not read: write them with `penstock.Writer`"
_ARCHIVE = "is an archive: unpack it, and open the folder"
_WAYS_OUT: dict[str, str] = {
    **dict.fromkeys(("csv", "tsv"), _TABLE),
    "json": _JSON,
    "bin": _RAW,
    "idx": _INDEX,
    **dict.fromkeys(("pkl", "pickle", "pt", "pth", "ckpt", "joblib"), _PICKLE),
    **dict.fromkeys(
        ("h5", "hdf5", "hdf", "tfrecord", "tfrecords", "rec", "beton", "mdb", "lmdb"), _CONTAINER
    ),
    **dict.fromkeys(("db", "sqlite", "sqlite3", "orc", "avro", "xlsx", "xls"), _CONTAINER),
    **dict.fromkeys(("zip", "7z", "rar"), _ARCHIVE),
}
"""What such a file is and how its samples can be read, by extension."""


def refuse_containers(objects: Sequence[ObjectInfo], uri: str) -> None:
    """Raise when some objects, each of which is to be one sample, are files of many samples."""
    found = [(o, way_out(o.key)) for o in objects if way_out(o.key)]
    if not found:
        return
    first, words = found[0]
    others = sorted({_extension(o.key) for o in objects if not way_out(o.key)} - {""})
    wanted = others[:4] or [_extension(first.key)]
    what = "those beside it" if others else "each file as one sample"
    raise FormatError(
        f"{uri}{first.key} ({len(found)} of {len(objects)} objects are such) {words}. To take "
        f"{what}: extensions={wanted}"
    )


def way_out(key: str) -> str:
    """Return what a file of many samples is and how it can be read; nothing for other files.

    >>> way_out("a.csv.gz")[:10], way_out("a.wav"), way_out("csv")
    ('is a table', '', '')
    """
    return _WAYS_OUT.get(_extension(key, packed=True), "")


def _extension(key: str, *, packed: bool = False) -> str:
    parts = key.rpartition("/")[2].lower().split(".")[1:]
    if packed and len(parts) > 1 and parts[-1] in _PACKED:
        parts.pop()
    return parts[-1] if parts else ""
