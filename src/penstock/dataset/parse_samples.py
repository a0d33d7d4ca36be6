"""The bytes of samples, cut and decoded in a parser process.

What comes is an excerpt of the index with the bytes of its samples. What goes back are the samples
themselves (for `pack`), or what is wrong with them (for `verify`). Functions of the user's never
run here: fields that have one go back encoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.dataset.bound import BoundPart
from penstock.dataset.columns import parse_columns
from penstock.dataset.formats import FORMATS
from penstock.dataset.formats.base import Sample
from penstock.dataset.parse_child import ParserCall, text_of
from penstock.dataset.parse_format import CallerStore
from penstock.dataset.parse_values import pack_value, unpickled
from penstock.dataset.part import part_of
from penstock.errors import MissingPackageError


@dataclass(frozen=True, kw_only=True)
class ExcerptPart(BoundPart):
    """Samples of an excerpt, with the numbers that they have in their data set."""

    numbers: Sequence[int]
    names: Sequence[str]

    def number(self, local_id: int) -> int:
        """Return the number of a sample in the data set."""
        return self.numbers[local_id]

    def where(self, local_id: int) -> str:
        """Return words that name a sample to a person."""
        return self.names[local_id] if self.names else super().where(local_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesRequest:
    """What is wanted of some samples."""

    uri: str
    """Of the store, for messages."""
    numbers: Sequence[int]
    """Of the excerpt's samples in their data set, for messages."""
    names: Sequence[str]
    """What they are called in messages, where their numbers and objects do not say it best."""
    rows: Sequence[int]
    """Samples of the excerpt that are wanted."""
    decoded: frozenset[str]
    """Fields to decode; the others are handed back as they are."""
    wanted: frozenset[str]
    """Fields to hand back."""


def _opened(call: ParserCall) -> tuple[SamplesRequest, ExcerptPart, list[memoryview]]:
    request, format = unpickled(call.data[0])
    part = part_of(parse_columns(call.data[1], "an excerpt"))
    if format:
        FORMATS[part.format] = unpickled(format)
    store: Any = CallerStore(call, uri=request.uri, source="memory", can_list=False)
    bound = ExcerptPart(
        store=store,
        part=part,
        first=0,
        decoders={},
        numbers=request.numbers,
        names=request.names,
    )
    return request, bound, call.data[2:]


def _samples(
    call: ParserCall, bound: ExcerptPart, rows: Sequence[int], raws: list[memoryview]
) -> Iterator[Any]:
    """Yield each sample, still encoded, or the error that it has."""
    block = None
    if bound.by_block:
        call.begin_sample()
        extents = bound.part.tables[0].extents(np.zeros(1, np.int64))
        block = bound.unpack_raw(0, int(extents.offset[0]), raws[0])
    width = len(bound.part.tables)
    for number, row in enumerate(rows):
        call.begin_sample()
        try:
            if block is not None:
                yield block.sample(row)
            else:
                mine = raws[number * width : (number + 1) * width]
                yield bound.split(np.array([row], np.int64), [mine])[0]
        except MissingPackageError:
            raise
        except Exception as error:
            yield error


def _finished(bound: ExcerptPart, sample: Sample, row: int, request: SamplesRequest) -> Sample:
    """Return the fields that are wanted of a sample, some of them decoded."""
    chosen = {name: value for name, value in sample.items() if name in request.decoded}
    values = {**sample, **{n: v for n, v in bound.views(chosen, row).items() if n in chosen}}
    return {name: value for name, value in values.items() if name in request.wanted}


def answer_samples(call: ParserCall) -> bytes:
    """Return samples; the first error ends it."""
    request, bound, raws = _opened(call)
    out = []
    for row, sample in zip(request.rows, _samples(call, bound, request.rows, raws), strict=True):
        if isinstance(sample, Exception):
            raise sample
        out.append(_finished(bound, sample, row, request))
    return pack_value(out)


def answer_verdicts(call: ParserCall) -> bytes:
    """Return rows with the error that they have, or with the fields that are wanted of them.

    A row that has neither is left out: a small block may claim billions of rows of nothing.
    """
    request, bound, raws = _opened(call)
    out: list[tuple[int, Any]] = []
    for row, sample in zip(request.rows, _samples(call, bound, request.rows, raws), strict=True):
        try:
            if isinstance(sample, Exception):
                raise sample
            found = _finished(bound, sample, row, request)
            if found:
                out.append((row, found))
        except MissingPackageError:
            raise
        except Exception as error:
            out.append((row, f"{type(error).__name__}: {text_of(error)}"))
    return pack_value(out)
