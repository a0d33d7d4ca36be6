"""A format of your own in one class: lines of `name=value`, one file a sample set.

    python examples/custom_format.py

docs/guides/add_a_format.md explains every part of it.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import penstock
from penstock.dataset.fields import VALUE, Field
from penstock.dataset.formats import FORMATS
from penstock.dataset.formats.base import Options, Sample, SampleFormat, Unit, one_unit_each
from penstock.dataset.part import Ints, Part, Rows, make_part
from penstock.errors import FormatError
from penstock.storage.base import ObjectInfo, Store


class PairsFormat(SampleFormat):
    """Text files whose lines are `name=value name=value …`, all values numbers."""

    name = "pairs"
    options: frozenset[str] = frozenset()

    def claims(self, key: str) -> bool:
        return key.endswith(".pairs")

    def units(self, objects: Sequence[ObjectInfo], store: Store, options: Options) -> list[Unit]:
        return one_unit_each(objects)

    def scan(self, unit: Unit, store: Store, options: Options) -> Part:
        (info,) = unit.objects
        lines = bytes(store.read(info.key)).splitlines(keepends=True)
        if not lines or b"=" not in lines[0]:
            raise FormatError(f"{store.uri}{info.key} has no `name=value` in its first line")
        ends = np.cumsum([len(line) for line in lines])
        lengths = np.array([len(line.rstrip()) for line in lines])
        names = [pair.partition("=")[0] for pair in lines[0].decode().split()]
        columns = {"offset": ends - [len(line) for line in lines], "length": lengths}
        rows = Rows(objects=[info], counts=[len(lines)], addressing="extents", columns=columns)
        fields = [Field(name=n, encoding=VALUE, dtype="<f8", shape=()) for n in names]
        return make_part(format=self.name, fields=fields, tables=[rows])

    def split(self, part: Part, ids: Ints, raws: Sequence[Sequence[memoryview]]) -> list[Sample]:
        pairs = [[p.split("=") for p in str(raw, "utf-8").split()] for (raw,) in raws]
        return [{name: np.float64(value) for name, value in several} for several in pairs]


def main() -> None:
    FORMATS["pairs"] = PairsFormat()
    with tempfile.TemporaryDirectory() as name:
        for shard in range(3):
            lines = [f"x={i} y={i * i}\n" for i in range(shard * 10, shard * 10 + 10)]
            Path(name, f"{shard}.pairs").write_text("".join(lines))
        dataset = penstock.open(name)
        print(f"{dataset.format}: {len(dataset)} samples, fields {', '.join(dataset.fields)}")
        for batch in penstock.Loader(dataset, batch_size=10, seed=7, output="numpy"):
            assert np.array_equal(batch["x"] ** 2, batch["y"])
            print("  x", *batch["x"].astype(int))


if __name__ == "__main__":
    main()
