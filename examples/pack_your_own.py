"""Write samples of your own, append to them, damage one, and have the damage found.

python examples/pack_your_own.py
"""

import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import penstock


def samples(first: int, last: int) -> Iterator[dict[str, Any]]:
    """Yield waves: an array, a label, and what made them."""
    for number in range(first, last):
        generator = np.random.default_rng(number)
        pitch = int(generator.integers(1, 6))
        wave = np.sin(np.linspace(0, 6.28 * pitch, 500)) + generator.normal(0, 0.1, 500)
        yield {"npy": wave.astype(np.float32), "cls": pitch, "json": {"number": number}}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "waves")
        first = penstock.pack(samples(0, 300), folder, penstock.PackOptions(shard_size="200KB"))
        print(f"version {first.version}: {first.num_samples} samples, {first.num_shards} shards")

        with penstock.Writer(folder, shard_size="200KB", append=True) as writer:
            for sample in samples(300, 400):
                writer.write(sample)
        latest, before = penstock.open(folder), penstock.open(folder, version=1)
        print(f"version {latest.version}: {len(latest)} samples; version 1 still has {len(before)}")

        # What lies there is plain tar, which any other tool reads.
        with tarfile.open(folder / "shard-000000.tar") as archive:
            print("tar has", ", ".join(archive.getnames()[:3]), "…")

        # The same as rows of one array: nothing is decoded when they are read.
        rows = [{"wave": s["npy"], "label": s["cls"]} for s in latest]
        options = penstock.PackOptions(format="npy")
        print("as .npy:", penstock.pack(rows, Path(name, "rows"), options).num_shards, "shard")

        shard = folder / "shard-000001.tar"
        data = bytearray(shard.read_bytes())
        data[1000] ^= 0x10  # one bit, in the middle of a sample
        shard.write_bytes(data)
        report = penstock.verify(folder)
        print(f"verify: {report.num_problems} problem in {report.num_samples} samples")
        print("  " + str(report.problems[0]).replace(name, ""))
        assert not report.ok


if __name__ == "__main__":
    main()
