"""Measures how fast samples are decoded: a few hundred, held in memory, again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from penstock.dataset.bound import BoundPart
from penstock.dataset.dataset import Dataset
from penstock.dataset.fields import is_raw
from penstock.dataset.part import Ints
from penstock.machine import Curve
from penstock.simulate.probe.effort import Effort
from penstock.simulate.probe.target import random_ids
from penstock.simulate.probe.timing import curve_of, doubling, rate_of
from penstock.storage.pool import ReadPool
from penstock.units import show_bytes, show_count

_SAMPLES_MAX = 256
_HELD_BYTES_MAX = 64 << 20
_PIECE_SAMPLES = 8
"""Samples that a thread decodes at once, as in the loader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSamples:
    """Stored bytes of some samples, and the function that decodes them."""

    decode: Callable[[], object]
    size_bytes: int
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFacts:
    """A decode rate and how it was measured."""

    curve: Curve
    read_bytes: int
    num_requests: int
    note: str


def needs_decoding(dataset: Dataset) -> bool:
    """Return whether samples differ from the bytes in the store."""
    return any(
        bound.by_block or any(not is_raw(decoder) for _, decoder in bound.steps.values())
        for bound in dataset.bound
    )


def measure_decoding(
    dataset: Dataset, cores: int, in_flight: int, effort: Effort
) -> DecodeFacts | None:
    """Return stored bytes decoded a second, by threads; None where nothing has to be decoded."""
    if not needs_decoding(dataset) or not len(dataset):
        return None
    held, num_requests = _held(dataset, in_flight)
    counts = doubling(cores)
    seconds = effort.decode_s / (len(counts) * effort.repeats)

    def measure(num_threads: int) -> float:
        return rate_of(num_threads, lambda i: _decodes(held, i), seconds)

    curve = curve_of(counts, measure, effort.repeats)
    size_bytes = sum(piece.size_bytes for piece in held)
    num_samples = sum(piece.num_samples for piece in held)
    return DecodeFacts(
        curve=curve,
        read_bytes=size_bytes,
        num_requests=num_requests,
        note=f"{show_count(num_samples)} {dataset.format} samples, {show_bytes(size_bytes)}",
    )


def _decodes(held: list[StoredSamples], number: int) -> Iterator[int]:
    order = np.random.default_rng(number).permutation(len(held)).tolist()
    while True:
        for i in order:
            held[i].decode()
            yield held[i].size_bytes


def _held(dataset: Dataset, in_flight: int) -> tuple[list[StoredSamples], int]:
    """Read samples at random from all parts, with the number of requests it took."""
    ids = random_ids(len(dataset), _SAMPLES_MAX, np.random.default_rng(11))
    pieces = [
        (bound, piece)
        for bound, _, local_ids in dataset.groups(ids)
        for piece in (_blocks(bound, local_ids) if bound.by_block else _runs(local_ids))
    ]
    order = np.random.default_rng(13).permutation(len(pieces)).tolist()
    chosen, size_bytes = [], 0
    for i in order:
        chosen.append(pieces[i])
        size_bytes += _stored_bytes(*pieces[i])
        if size_bytes >= _HELD_BYTES_MAX:
            break
    with ReadPool(in_flight) as pool:
        held = list(pool.map_unordered(lambda item: _hold(*item), chosen))
    requests = (1 if b.by_block else len(piece) * len(b.part.tables) for b, piece in chosen)
    return [piece for piece in held if piece.size_bytes], sum(requests)


def _runs(local_ids: Ints) -> list[Ints]:
    return [local_ids[i : i + _PIECE_SAMPLES] for i in range(0, len(local_ids), _PIECE_SAMPLES)]


def _blocks(bound: BoundPart, local_ids: Ints) -> list[Ints]:
    """Return all samples of each block that some samples lie in."""
    table = bound.part.tables[0]
    starts = table.block_starts()
    blocks = np.unique(table.extents(local_ids).block).tolist()
    return [np.arange(starts[b], starts[b + 1], dtype=np.int64) for b in blocks]


def _stored_bytes(bound: BoundPart, local_ids: Ints) -> int:
    if bound.by_block:
        return int(bound.part.tables[0].extents(local_ids[:1]).length[0])
    return sum(int(t.extents(local_ids).length.sum()) for t in bound.part.tables)


def _hold(bound: BoundPart, local_ids: Ints) -> StoredSamples:
    """Read a piece."""
    extents = [table.extents(local_ids) for table in bound.part.tables]
    if bound.by_block:
        where = int(extents[0].object[0]), int(extents[0].offset[0])
        raw = bound.read(0, *where, int(extents[0].length[0]))
        decode = _block_decoder(bound, local_ids, where, raw)
        return StoredSamples(decode=decode, size_bytes=raw.nbytes, num_samples=len(local_ids))
    raws = [
        [bound.read(t, int(e.object[j]), int(e.offset[j]), int(e.length[j]))
         for t, e in enumerate(extents)]
        for j in range(len(local_ids))
    ]  # fmt: skip
    return StoredSamples(
        decode=lambda: bound.decoded_all(local_ids, raws),
        size_bytes=sum(raw.nbytes for one in raws for raw in one),
        num_samples=len(local_ids),
    )


def _block_decoder(
    bound: BoundPart, local_ids: Ints, where: tuple[int, int], raw: memoryview
) -> Callable[[], object]:
    def decode() -> object:
        block = bound.unpack_raw(*where, raw)
        return [bound.decoded(block.sample(row), i) for row, i in enumerate(local_ids.tolist())]

    return decode
