"""The data sets of the planted cases: JPEG files, the same files in shards, and an array."""

import io
import json
import shutil
import timeit
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

SHARD_SAMPLES = 64
QUALITY = 90
SIDE = 96
"""Pixels of an image for the model."""


def jpeg_of(number: int, side: int) -> bytes:
    """Return a picture with coarse structure and noise."""
    rng = np.random.default_rng([7, number])
    coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC), dtype=np.int16)
    pixels = np.clip(pixels + rng.integers(-20, 20, pixels.shape), 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "jpeg", quality=QUALITY)
    return out.getvalue()


def decode_s(images: list[bytes], side: int) -> float:
    """Return how long `jobs.images` takes for some images, one after the other."""
    return min(timeit.repeat(lambda: [decoded(data, side) for data in images], number=1, repeat=3))


def decoded(data: bytes, side: int) -> torch.Tensor:
    """Decode an image as `jobs.images` does."""
    image = Image.open(io.BytesIO(data)).convert("RGB").resize((side, side))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def decoded_grey(data: bytes) -> torch.Tensor:
    """Decode an image as `jobs.ranks` does."""
    image = Image.open(io.BytesIO(data)).convert("L")
    return torch.from_numpy(np.array(image.resize((32, 32)))).float().flatten() / 255


def _resized(path: Path, pixels: float) -> bytes:
    """Return an image of so many times the pixels."""
    image, out = Image.open(path), io.BytesIO()
    side = max(16, round(image.width * pixels**0.5))
    image.resize((side, side)).save(out, "jpeg", quality=QUALITY)
    return out.getvalue()


class Sets:
    """Data sets below one folder. Each is written once and kept for later cases."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def files(self, num: int, side: int, *, large: int = 0) -> Path:
        """Return a folder of JPEG files; the first half of them has sides of `large`, if given."""

        def write(folder: Path) -> None:
            extents = []
            for i in range(num):
                data = jpeg_of(i, large if large and i < num // 2 else side)
                (folder / f"{i:05}.jpg").write_bytes(data)
                extents.append((f"{i:05}.jpg", 0, len(data)))
            (folder / "extents.json").write_text(json.dumps(extents))

        return self._once(f"files-{num}-{side}-{large}", write)

    def shards(self, files: Path) -> Path:
        """Return a folder with the same images, many in each file."""

        def write(folder: Path) -> None:
            extents = []
            names = [name for name, _, _ in json.loads((files / "extents.json").read_text())]
            for first in range(0, len(names), SHARD_SAMPLES):
                shard = folder / f"shard-{first // SHARD_SAMPLES:04}.bin"
                with shard.open("wb") as out:
                    for name in names[first : first + SHARD_SAMPLES]:
                        data = (files / name).read_bytes()
                        extents.append((shard.name, out.tell(), len(data)))
                        out.write(data)
            (folder / "extents.json").write_text(json.dumps(extents))

        return self._once(f"shards-of-{files.name}", write)

    def smaller(self, files: Path, scale: float, side: int) -> Path:
        """Return a folder with the same images, made so small that decoding takes `scale` of the
        time, resizing to `side` included. How small that is, is measured."""
        names = [name for name, _, _ in json.loads((files / "extents.json").read_text())]
        some = names[:: max(1, len(names) // 64)]
        wanted_s = scale * decode_s([(files / name).read_bytes() for name in some], side)
        low, high = 0.02, 1.0
        for _ in range(8):
            pixels = (low + high) / 2
            took_s = decode_s([_resized(files / name, pixels) for name in some], side)
            low, high = (pixels, high) if took_s < wanted_s else (low, pixels)

        def write(folder: Path) -> None:
            for name in names:
                (folder / name).write_bytes(_resized(files / name, low))
            extents = [(name, 0, (folder / name).stat().st_size) for name in names]
            (folder / "extents.json").write_text(json.dumps(extents))

        return self._once(f"{low:g}-of-{files.name}", write)

    def array(self, num: int, row_bytes: int) -> Path:
        """Return a folder with one array of `num` rows."""

        def write(folder: Path) -> None:
            rng = np.random.default_rng(7)
            np.save(folder / "rows.npy", rng.integers(0, 256, (num, row_bytes), dtype=np.uint8))

        return self._once(f"array-{num}-{row_bytes}", write)

    def _once(self, name: str, write: Callable[[Path], None]) -> Path:
        folder = self.root / name
        if not folder.exists():
            partial = self.root / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            write(partial)
            partial.rename(folder)
        return folder


def size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
