"""A part of an index together with what is needed to read it: its store, format and decoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from penstock.dataset.checks import FirstReads, read_checked
from penstock.dataset.fields import DECODERS, VALUE, Decoder, Field, decode, decoder_of
from penstock.dataset.formats import format_named
from penstock.dataset.formats.base import Block, Bytes, Sample
from penstock.dataset.formats.checked import CheckedFormat, PlacedBlock
from penstock.dataset.ownership import CHANGEABLE, owned, writable
from penstock.dataset.part import Ints, Part
from penstock.dataset.ragged import FieldColumns
from penstock.errors import DatasetError, OptionError
from penstock.storage.base import Store

Decoders = Mapping[str, Decoder | None]


def checked_decoders(decoders: Decoders | None, parts: Sequence[Part], uri: str) -> Decoders:
    """Return what the user gave, or raise for a decoder that would never be used.

    One set of decoders may serve several data sets (`jpg`, `jpeg`, `png`), so of several that are
    named by known extensions some may have no field here, but not all.
    """
    fields = {f.name: f.encoding for part in parts for f in part.fields}
    here = fields.keys() | set(fields.values())
    unused = [name for name in decoders or {} if name not in here]
    unknown = [name for name in unused if name not in DECODERS]
    if unknown or (unused and len(unused) == len(decoders or {})):
        known = ", ".join(f"{field} ({encoding})" for field, encoding in fields.items())
        raise OptionError(
            f"decoders={{{(unknown or unused)[0]!r}: …}} is for no field of {uri}; these are, with "
            f"their extensions: {known}"
        )
    return dict(decoders or {})


@dataclass(frozen=True, kw_only=True)
class BoundPart:
    """Samples `first` … `first + num_samples - 1` of a data set, ready to be read."""

    store: Store
    part: Part
    first: int
    decoders: Decoders
    format: CheckedFormat = field(init=False)
    steps: dict[str, tuple[Field, Decoder]] = field(init=False)
    """Fields that have something to decode, with the function that does it."""
    first_reads: FirstReads = field(init=False, compare=False, repr=False)
    """Which samples of local files have been compared with their checksums."""
    given: frozenset[str] = field(init=False)
    """The fields in `steps` whose decoder is the user's own."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", format_named(self.part.format))
        steps = {
            f.name: (f, decoder_of(f, self.decoders))
            for f in self.part.fields
            if f.encoding != VALUE or self.decoders.get(f.name) is not None
        }
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "first_reads", FirstReads(self.part.num_samples))
        users = {id(decoder) for decoder in self.decoders.values() if decoder is not None}
        given = frozenset(name for name, (_, decoder) in steps.items() if id(decoder) in users)
        object.__setattr__(self, "given", given)

    @property
    def by_block(self) -> bool:
        """Whether samples can only be read a block at a time."""
        return self.part.tables[0].addressing == "blocks"

    @property
    def has_columns(self) -> bool:
        """Whether a field of many samples can be had at once."""
        return self.format.has_columns(self.part)

    def columns(
        self, local_ids: Ints, data: Bytes, starts: Ints, lengths: Ints
    ) -> FieldColumns | None:
        """Return the encoded fields of samples that lie in `data`, a column at a time.

        None where `split` must do it: a sample is damaged, and `split` says which.
        """
        return self.format.columns(self.part, local_ids, data, starts, lengths)

    def number(self, local_id: int) -> int:
        """Return the number of a sample in the data set."""
        return self.first + local_id

    def where(self, local_id: int) -> str:
        """Return words that name a sample to a person."""
        extents = self.part.tables[0].extents(_one(local_id))
        key = self.part.key(local_id)
        name = f" ({key})" if key else ""
        table = self.part.tables[0]
        return (
            f"sample {self.number(local_id)}{name} in "
            f"{self.store.uri}{table.key(int(extents.object[0]))}"
        )

    def read(self, table: int, number: int, offset: int, length: int) -> memoryview:
        """Return bytes of an object, or raise if it is no longer the one that was indexed."""
        return self.store.read_range(self.part.tables[table].info(number), offset, length)

    def read_sample(self, table: int, local_id: int) -> memoryview:
        """Return the extent of a sample, or its block, as it was indexed."""
        one = _one(local_id)
        e = self.part.tables[table].extents(one)
        number, offset, length = int(e.object[0]), int(e.offset[0]), int(e.length[0])
        read = partial(self.read, table, number, offset, length)
        return read_checked(self, one, offset, read)[0]

    def unpack(self, local_id: int, raw: memoryview | None = None) -> Block:
        """Return the block that a sample lies in."""
        extents = self.part.tables[0].extents(_one(local_id))
        number, offset = int(extents.object[0]), int(extents.offset[0])
        if raw is None:
            raw = self.read_sample(0, local_id)
        return self.unpack_raw(number, offset, raw)

    def unpack_raw(self, number: int, offset: int, raw: memoryview) -> Block:
        """Return a block from its bytes; an error names the object and the place in it.

        The block is kept and shared by batches, so it gets its bytes read-only, whoever owns them.
        """
        where = f"{self.store.uri}{self.part.tables[0].key(number)} at byte {offset}"
        try:
            block = self.format.unpack(self.part, number, offset, raw.toreadonly())
            return PlacedBlock(block, where)
        except DatasetError as error:
            raise type(error)(f"{where}: {error}") from error

    def decoded(self, encoded: Sample, local_id: int) -> dict[str, Any]:
        """Return the values of a sample's fields, the caller's own; a field it lacks is None."""
        values = self.views(encoded, local_id)
        own = owned if self.by_block else writable
        for name, value in values.items():
            if isinstance(value, memoryview):
                values[name] = bytes(value)
            elif isinstance(value, CHANGEABLE):
                # What a decoder made is not kept in the block: only a view of bytes is shared.
                values[name] = writable(value) if name in self.steps else own(value)
        return values

    def views(self, encoded: Sample, local_id: int) -> dict[str, Any]:
        """Return a sample as `decoded` does, for callers that copy it before anybody writes to it.

        Arrays may be views of memory that other samples share, and bytes are such views.
        """
        return {
            f.name: self.decoded_field(f, encoded.get(f.name), local_id) for f in self.part.fields
        }

    def decoded_field(self, f: Field, value: Any, local_id: int) -> Any:
        """Return one field of a sample as `views` does, from what the format made of it."""
        if value is None or f.name not in self.steps:
            return value
        if f.name in self.given:
            # A decoder of the user's may write to its bytes, or return a view of them.
            value = owned(value) if self.by_block else writable(value)
        return decode(f, self.steps[f.name][1], value, partial(self.where, local_id))

    def decoded_all(
        self, local_ids: Ints, raws: Sequence[Sequence[memoryview]]
    ) -> list[dict[str, Any]]:
        """Return samples that are addressed alone from their bytes."""
        encoded = self.split(local_ids, raws)
        return [self.decoded(sample, int(i)) for sample, i in zip(encoded, local_ids, strict=True)]

    def split(self, local_ids: Ints, raws: Sequence[Sequence[memoryview]]) -> list[Sample]:
        """Return the encoded fields of samples; an error names the first sample that has it."""
        try:
            return self.format.split(self.part, local_ids, raws)
        except DatasetError as error:
            for j, i in enumerate(local_ids.tolist()):
                try:
                    self.format.split(self.part, local_ids[j : j + 1], [raws[j]])
                except DatasetError as cause:
                    raise type(cause)(f"{self.where(i)}: {cause}") from error
            raise


def _one(i: int) -> Ints:
    return np.array([i], np.int64)
