"""Formats that do to their process what their files say, as damaged files make native code do.

A file is lines. `scan:segv` ends the process that scans the file, `split:segv` (`unpack:segv`) the
one that cuts that sample (unpacks that block).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from penstock.dataset import parse_child
from penstock.dataset.formats.base import (
    BlockFormat,
    Field,
    Options,
    Sample,
    SampleFormat,
    Unit,
    block_rows,
    one_unit_each,
)
from penstock.dataset.part import Ints, Part, Rows, make_part
from penstock.errors import NotFoundError
from penstock.storage.base import ObjectInfo, Store


def act(word: str) -> None:
    """Do what a line says."""
    match word:
        case "segv":
            ctypes.string_at(0)
        case "abort":
            ctypes.CDLL(None).abort()
        case "bus":
            path = Path(os.environ["PENSTOCK_CACHE"]).parent / "mapped"
            path.write_bytes(bytes(1 << 16))
            with path.open("r+b") as file:
                view = mmap.mmap(file.fileno(), 0)
                file.truncate(0)
                view[1 << 15]
        case "stack":
            one, two = [], []  # type: ignore[var-annotated]
            for _ in range(200_000):
                one, two = [one], [two]
            sys.setrecursionlimit(1 << 30)
            assert one == two
        case "spin":
            parse_child.limit(0.05)
            while True:
                pass
        case "hang":
            parse_child.limit(0.05)  # as the child limits a step, but shorter
            ctypes.CDLL(None).pause()
        case "memory":
            bytearray(64 << 30)


def lines_of(store: Store, info: ObjectInfo) -> list[tuple[int, int, str]]:
    """Return offset, length and text of each line, after the file's first line was obeyed."""
    out, at = [], 0
    for line in bytes(store.read_range(info, 0, info.size_bytes)).splitlines(keepends=True):
        out.append((at, len(line) - 1, line.decode().strip()))
        at += len(line)
    if out[0][2].startswith("scan:"):
        act(out[0][2].removeprefix("scan:"))
    return out


class LineFormat(SampleFormat):
    """Lines, each a sample."""

    name = "lines"
    options: frozenset[str] = frozenset()

    def claims(self, key: str) -> bool:
        return key.endswith(".lines")

    def units(self, objects: Sequence[ObjectInfo], store: Store, options: Options) -> list[Unit]:
        with contextlib.suppress(NotFoundError):
            store.info("beside")
        return [Unit(objects=u.objects, note={"pid": os.getpid()}) for u in one_unit_each(objects)]

    def scan(self, unit: Unit, store: Store, options: Options) -> Part:
        (info,) = unit.objects
        lines = lines_of(store, info)
        columns = {
            "offset": np.array([at for at, _, _ in lines], np.int64),
            "length": np.array([length for _, length, _ in lines], np.int64),
        }
        rows = Rows(objects=[info], counts=[len(lines)], addressing="extents", columns=columns)
        pids = {"units": unit.note["pid"], "scan": os.getpid()}
        fields = [Field(name="text", encoding="txt")]
        return make_part(format=self.name, fields=fields, tables=[rows], options=pids)

    def split(self, part: Part, ids: Ints, raws: Sequence[Sequence[memoryview]]) -> list[Sample]:
        for (raw,) in raws:
            if bytes(raw).startswith(b"split:"):
                act(bytes(raw)[6:].decode())
        return [{"text": raw} for (raw,) in raws]


class LinePairs(BlockFormat):
    """Lines, two of which are a block."""

    name = "pairs"
    options: frozenset[str] = frozenset()

    def claims(self, key: str) -> bool:
        return key.endswith(".pairs")

    def units(self, objects: Sequence[ObjectInfo], store: Store, options: Options) -> list[Unit]:
        return one_unit_each(objects)

    def scan(self, unit: Unit, store: Store, options: Options) -> Part:
        (info,) = unit.objects
        lines = lines_of(store, info)
        blocks = [
            (one[0], two[0] + two[1] - one[0], 2)
            for one, two in zip(lines[::2], lines[1::2], strict=True)
        ]
        fields = [Field(name="text", encoding="txt")]
        return make_part(format=self.name, fields=fields, tables=[block_rows(info, blocks)])

    def unpack(self, part: Part, number: int, offset: int, raw: memoryview) -> PairBlock:
        if bytes(raw).startswith(b"unpack:"):
            act(bytes(raw).splitlines()[0][7:].decode())
        return PairBlock(raw)


class PairBlock:
    """Two lines."""

    def __init__(self, raw: memoryview) -> None:
        self.size_bytes = len(raw)
        self._lines = bytes(raw).splitlines()

    def sample(self, row: int) -> Sample:
        line = self._lines[row]
        if line.startswith(b"split:"):
            act(line[6:].decode())
        return {"text": memoryview(line)}
