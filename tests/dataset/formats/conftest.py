"""A store that counts what is read of it, and the short way from objects to samples."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from testkit.parts import merge_parts

from penstock.dataset.fields import VALUE, decoder_of
from penstock.dataset.formats.base import Format, Sample
from penstock.dataset.part import Part, open_part
from penstock.storage.base import ObjectInfo
from penstock.storage.memory import MemoryStore

collect_ignore_glob = ["fixtures/*"]

FIXTURES = Path(__file__).parent / "fixtures"


class CountingStore(MemoryStore):
    num_bytes = 0
    is_remote = False

    @property
    def source(self) -> str:
        return "s3" if self.is_remote else "memory"

    def read(self, key: str) -> memoryview:
        self.num_bytes += self.info(key).size_bytes
        return super().read(key)

    def read_range(self, info: ObjectInfo, offset: int, length: int) -> memoryview:
        self.num_bytes += length
        return super().read_range(info, offset, length)


@dataclass
class Shelf:
    """Objects in memory, and what a format makes of them."""

    store: CountingStore
    folder: Path

    def put(self, key: str, data: bytes) -> None:
        self.store.write(key, data)

    def put_fixture(self, name: str, prefix: str = "") -> None:
        for path in sorted((FIXTURES / name).rglob("*")):
            if path.is_file():
                self.put(prefix + path.relative_to(FIXTURES / name).as_posix(), path.read_bytes())

    def index(self, format: Format, **options: Any) -> Part:
        """Return one part, as it comes back from its file."""
        objects = [o for o in self.store.list() if format.claims(o.key)]
        units = format.units(objects, self.store, options)
        merge_parts([format.scan(u, self.store, options) for u in units]).save(self.folder / "idx")
        return open_part(self.folder / "idx")

    def encoded(self, format: Format, part: Part) -> list[Sample]:
        """Return all samples as the format hands them over."""
        if part.tables[0].addressing == "blocks":
            return [self._from_block(format, part, i) for i in range(part.num_samples)]
        ids = np.arange(part.num_samples)
        extents = [t.extents(ids) for t in part.tables]
        raws = [
            [
                self.store.read_range(t.info(e.object[i]), int(e.offset[i]), int(e.length[i]))
                for t, e in zip(part.tables, extents, strict=True)
            ]
            for i in range(part.num_samples)
        ]
        return format.split(part, ids, raws)

    def _from_block(self, format: Format, part: Part, i: int) -> Sample:
        table = part.tables[0]
        e = table.extents(np.array([i]))
        number, offset, length = int(e.object[0]), int(e.offset[0]), int(e.length[0])
        raw = self.store.read_range(table.info(number), offset, length)
        return format.unpack(part, number, offset, raw).sample(int(e.row[0]))

    def samples(self, format: Format, **options: Any) -> list[dict[str, Any]]:
        """Return all samples with their fields decoded."""
        part = self.index(format, **options)
        decoders = {f.name: decoder_of(f, {}) for f in part.fields if f.encoding != VALUE}
        return [
            {n: decoders[n](v) if n in decoders else v for n, v in sample.items()}
            for sample in self.encoded(format, part)
        ]


@pytest.fixture
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shelf]:
    store = CountingStore(request.node.name)
    yield Shelf(store, tmp_path)
    store.clear()


@pytest.fixture(scope="session")
def plain() -> Callable[[Any], Any]:
    """Return the function that the expected values of fixtures were written with."""
    function: Callable[[Any], Any] = runpy.run_path(str(FIXTURES / "plain.py"))["plain"]
    return function
