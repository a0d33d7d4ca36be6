"""What `pack` reads from: samples by number, their sizes known before any of them is read.

A source hands out samples as a `Writer` takes them. For tar, what is encoded already stays as it
is, byte for byte, under a name that says what it is; for `.npy` everything is decoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash

from penstock.dataset.bound import BoundPart
from penstock.dataset.dataset import Dataset
from penstock.dataset.fields import DECODERS, IMAGES, VALUE, Field
from penstock.dataset.formats.base import Sample, encoding_of, extension_of
from penstock.dataset.pack_plan import cut
from penstock.dataset.parse_values import UnsendableError
from penstock.dataset.part import Ints, Part
from penstock.dataset.samples_in_parser import SamplesInParser, own_steps, reads_in_parser
from penstock.dataset.writer_encode import clean_name
from penstock.storage.pool import ReadPool, ReadRequest

LABELS = ("cls", "label", "class", "target")
"""Fields that become `cls`, as WebDataset calls it, when they hold a whole number."""
_PLAIN = ("npy", "npz", "json", "txt", "text", "str", "cls", "cls2", "id", "index", "count")
_COPIED = frozenset((*IMAGES, *_PLAIN)) - {"pbm"}
"""Encodings that other tools know by these names; few know pbm, so it is packed as an array."""
_APART_BYTES = 16 << 20
_APART_SAMPLES = 4096
"""Samples that are sent to another process at once."""
_SHORT = {"text": "txt", "str": "txt"}
_MAGIC = (
    (rb"\xff\xd8", "jpg"),
    (rb"\x89PNG", "png"),
    (rb"RIFF....WEBP", "webp"),
    (rb"GIF8", "gif"),
    (rb"BM", "bmp"),
    (rb"II\*\x00|MM\x00\*", "tif"),
)


class DatasetSource:
    """A data set that `penstock.open` reads, or a view of one. `CsvSource` has the same methods."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    @property
    def uri(self) -> str:
        """Where the data set lies."""
        return self._dataset.uri

    @property
    def fingerprint(self) -> str:
        """The data set's own, with the marks of its objects: a changed file is another source."""
        digest = xxhash.xxh3_128(self._dataset.fingerprint.encode())
        for part in self._dataset.parts:
            for name in sorted(part.columns):
                if name.endswith(("object.etag.bytes", "object.mtime_ns")):
                    digest.update(np.ascontiguousarray(part.columns[name]).data)
        return digest.hexdigest()

    @property
    def num_fields(self) -> int:
        """Fields of a sample, at most."""
        return len(self._dataset.fields)

    @property
    def num_samples(self) -> int:
        """Samples of the data set, or of the view."""
        return len(self._dataset)

    def sizes_of(self, numbers: Ints) -> Ints:
        """Return the stored length of samples; of a block's samples, their even share."""
        out = np.zeros(len(numbers), np.int64)
        for bound, where, local in self._dataset.groups(numbers):
            for table in bound.part.tables:
                extents = table.extents(local)
                length = extents.length
                if table.addressing == "blocks":
                    length = length // np.maximum(np.diff(table.block_starts())[extents.block], 1)
                out[where] += length
        return out

    def key(self, number: int) -> str | None:
        """Return a sample's own name as a key of a tar."""
        key = self._dataset.key(number)
        return None if key is None else tar_key(key, has_extension=self._dataset.format == "files")

    def read(self, numbers: Ints, readers: ReadPool, *, decoded: bool) -> list[dict[str, Any]]:
        """Return samples, each object or block of them read once."""
        out: list[dict[str, Any]] = [{}] * len(numbers)
        for bound, where, local in self._dataset.groups(numbers):
            samples, done = encoded_samples(bound, local, readers, decoded=decoded)
            for place, number, sample in zip(where, local.tolist(), samples, strict=True):
                if decoded:
                    values = _decoded(bound, sample, number, done)
                    out[place] = {clean_name(name): value for name, value in values.items()}
                else:
                    out[place] = tar_fields(bound, sample, number, done)
        return out


def stored_bytes(part: Part) -> Ints:
    """Return the stored length of each sample of a part, over all of its tables."""
    lengths: Ints = np.sum([t.sample_bytes() for t in part.tables], axis=0, dtype=np.int64)
    return lengths


def encoded_samples(
    bound: BoundPart, local: Ints, readers: ReadPool, *, decoded: bool
) -> tuple[Iterable[Sample], frozenset[str]]:
    """Return the samples of some ids of a part, in that order, and which fields are decoded.

    None are, unless they are decoded in another process: what can end its process is. A field with
    a decoder of the user's is left to the caller.
    """
    own = own_steps(bound)
    names = own.intersection(f.name for f in bound.part.fields if decoded or _is_remade(f))
    if reads_in_parser(bound, names):
        try:
            return _from_parser(bound, local, readers, names), names
        except UnsendableError:
            pass  # A value of a class of the user's: only the caller's own format makes these.
    if bound.by_block:
        return _from_blocks(bound, local), frozenset()
    return bound.split(local, read_raws(bound, local, readers)), frozenset()


def _from_parser(
    bound: BoundPart, local: Ints, readers: ReadPool, decoded: frozenset[str]
) -> list[Sample]:
    out: list[Sample] = [{}] * len(local)
    table = bound.part.tables[0]
    if not bound.by_block:
        sizes = sum(t.extents(local).length for t in bound.part.tables)
        starts = cut(np.asarray(sizes), _APART_BYTES, _APART_SAMPLES).tolist()
        for start, stop in pairwise(starts):
            some = local[start:stop]
            sent = SamplesInParser.alone(bound, some, read_raws(bound, some, readers))
            out[start:stop] = sent.samples(range(len(some)), decoded)
        return out
    extents = table.extents(local)
    for number in np.unique(extents.block).tolist():
        places = np.flatnonzero(extents.block == number).tolist()
        raw = bound.read_sample(0, int(local[places[0]]))
        rows = extents.row[places].tolist()
        samples = SamplesInParser.of_block(bound, number, raw).samples(rows, decoded)
        for place, sample in zip(places, samples, strict=True):
            out[place] = sample
    return out


def _decoded(bound: BoundPart, sample: Sample, local: int, done: frozenset[str]) -> dict[str, Any]:
    """Return the values of a sample of which some fields are decoded already."""
    rest = bound.decoded({n: v for n, v in sample.items() if n not in done}, local)
    return {name: sample.get(name) if name in done else value for name, value in rest.items()}


def _from_blocks(bound: BoundPart, local: Ints) -> list[Sample]:
    extents = bound.part.tables[0].extents(local)
    out: list[Sample] = [{}] * len(local)
    for number in np.unique(extents.block):
        places = np.flatnonzero(extents.block == number)
        block = bound.unpack(int(local[places[0]]))
        for place in places.tolist():
            out[place] = block.sample(int(extents.row[place]))
    return out


def read_raws(bound: BoundPart, local: Ints, readers: ReadPool) -> list[list[memoryview]]:
    """Return the bytes of samples that are addressed alone, one view for each table."""
    raws: list[list[memoryview]] = [[] for _ in local]
    requests = []
    for table in bound.part.tables:
        extents = table.extents(local)
        ends = np.cumsum(extents.length).tolist()
        buffer = np.empty(ends[-1] if ends else 0, np.uint8).data
        infos = {int(n): table.info(int(n)) for n in np.unique(extents.object)}
        rows = zip(extents.object.tolist(), extents.offset.tolist(), ends, strict=True)
        start = 0
        for raw, (number, offset, end) in zip(raws, rows, strict=True):
            raw.append(buffer[start:end])
            if end > start:
                requests.append(ReadRequest(info=infos[number], offset=offset, target=raw[-1]))
            start = end
    readers.read_many(bound.store, requests)
    return raws


def tar_fields(
    bound: BoundPart, encoded: Sample, local: int, done: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Return a sample's fields under the names that a tar has them; those of `done` are decoded."""
    if bound.part.format == "tar":
        return encoded
    out: dict[str, Any] = {}
    extension = ""
    if bound.part.format == "files":
        extension = field_extension(bound.part.key(local) or "")
    for field in bound.part.fields:
        value = encoded.get(field.name)
        if value is None:
            continue
        if field.encoding == VALUE:
            out[value_name(field.name, value, out)] = value
        elif extension:
            out[extension] = value
        elif _is_remade(field):
            if field.name not in done:
                value = bound.decoded({field.name: value}, local)[field.name]
            out[value_name(field.name, value, out)] = value
        else:
            out[_encoded_name(field, value)] = value
    return out


def value_name(name: str, value: Any, taken: dict[str, Any]) -> str:
    """Return the name of a field that holds a value: `cls` for the first whole number of a label.

    >>> value_name("Label", 3, {}), value_name("label", 3, {"cls": 1}), value_name("label", "x", {})
    ('cls', 'label', 'label')
    """
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if is_whole and name.lower() in LABELS and "cls" not in taken:
        return "cls"
    return clean_name(name)


def _is_remade(field: Field) -> bool:
    """Return whether a tar holds a field in another encoding than its source."""
    is_copied = field.encoding in _COPIED or field.encoding in ("image", "bytes", "bin")
    return field.encoding in DECODERS and not is_copied


def _encoded_name(field: Field, data: memoryview) -> str:
    """Return the name under which encoded bytes are known for what they are."""
    name, encoding = clean_name(field.name), field.encoding
    if encoding == "image":
        encoding = _sniffed(bytes(data[:16]))
    if encoding not in _COPIED or encoding_of(name) == encoding:
        return name
    short = _SHORT.get(encoding, encoding)
    return short if name == "image" else f"{name}.{short}"


def _sniffed(head: bytes) -> str:
    found = (extension for magic, extension in _MAGIC if re.match(magic, head, re.DOTALL))
    return next(found, "image")


def field_extension(name: str) -> str:
    """Return the extension of a file's name as the name of a field; nothing where it has none."""
    extension = extension_of(name)
    return clean_name(extension) if extension else ""


def tar_key(name: str, *, has_extension: bool) -> str:
    """Return a key for a tar that looks like another name.

    >>> tar_key("cats/a.b.jpg", has_extension=True), tar_key("cats/1", has_extension=False)
    ('cats/a_b', 'cats/1')
    """
    folder, slash, base = name.strip("/").rpartition("/")
    if has_extension:
        base = base.rpartition(".")[0] or base
    return folder + slash + base.replace(".", "_")
