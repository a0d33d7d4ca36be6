"""Images that a small network can learn in a minute: eight shapes on noisy grounds.

Shapes differ in size, place, turn and colour, and may be darker or lighter than their ground, so
that a network has to look at the form. The same seed draws the same images.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from penstock.dataset.dataset import Dataset

CLASSES = ("circle", "cross", "dots", "ring", "square", "star", "stripes", "triangle")
_HELD_OUT_EVERY = 10
_QUALITY = 85
_GRID = 6
"""Cells of the noise that backgrounds are made of, in each direction."""

Random = np.random.Generator
Points = list[tuple[float, float]]


def split(dataset: Dataset) -> tuple[Dataset, Dataset]:
    """Return the samples to train on and every tenth, which is held out; both are views."""
    is_held_out = np.arange(len(dataset)) % _HELD_OUT_EVERY == 0
    return dataset.select(~is_held_out), dataset.select(is_held_out)


def draw_images(folder: Path, count: int, size: int, seed: int = 7) -> Iterator[int]:
    """Write `count` JPEG files into one folder a class; yield how many are done now and then."""
    random = np.random.default_rng(seed)
    for name in CLASSES:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        name = CLASSES[number % len(CLASSES)]
        (folder / name / f"{number:05}.jpg").write_bytes(image_of(name, size, random))
        if number % 100 == 99 or number + 1 == count:
            yield number + 1


def image_of(name: str, size: int, random: Random) -> bytes:
    """Return one image of a class as JPEG bytes."""
    from PIL import Image, ImageDraw

    noise = random.integers(70, 186, (_GRID, _GRID, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((size, size), Image.Resampling.BILINEAR)
    ground = noise.mean(axis=(0, 1))
    # Far from the ground in brightness, anything in hue.
    ink = np.clip(ground + random.choice([-1, 1]) * random.uniform(80, 128, 3), 0, 255)
    radius = random.uniform(0.28, 0.42) * size
    center = random.uniform(radius, size - radius, 2)
    pen = ImageDraw.Draw(image)
    _DRAW[name](pen, center, radius, tuple(int(v) for v in ink), random)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=_QUALITY)
    return out.getvalue()


def _around(
    center: Any, radius: float, turn: float, radii: tuple[float, ...], count: int
) -> Points:
    """Return points around a center; their distances from it repeat `radii`."""
    angles = [turn + 2 * math.pi * i / count for i in range(count)]
    return [
        (
            center[0] + radius * radii[i % len(radii)] * math.cos(a),
            center[1] + radius * radii[i % len(radii)] * math.sin(a),
        )
        for i, a in enumerate(angles)
    ]


def _polygon(count: int, radii: tuple[float, ...] = (1.0,)) -> Callable[..., None]:
    def draw(pen: Any, center: Any, radius: float, ink: Any, random: Random) -> None:
        turn = random.uniform(0, 2 * math.pi)
        pen.polygon(_around(center, radius, turn, radii, count), fill=ink)

    return draw


def _box(center: Any, radius: float) -> list[float]:
    return [center[0] - radius, center[1] - radius, center[0] + radius, center[1] + radius]


def _circle(pen: Any, center: Any, radius: float, ink: Any, random: Random) -> None:
    pen.ellipse(_box(center, radius * random.uniform(0.8, 1)), fill=ink)


def _ring(pen: Any, center: Any, radius: float, ink: Any, random: Random) -> None:
    width = round(radius * random.uniform(0.25, 0.4))
    pen.ellipse(_box(center, radius), outline=ink, width=width)


def _cross(pen: Any, center: Any, radius: float, ink: Any, random: Random) -> None:
    ends = _around(center, radius, random.uniform(0, 2 * math.pi), (1.0,), 4)
    width = round(radius * random.uniform(0.3, 0.5))
    pen.line([ends[0], ends[2]], fill=ink, width=width)
    pen.line([ends[1], ends[3]], fill=ink, width=width)


def _dots(pen: Any, center: Any, radius: float, ink: Any, random: Random) -> None:
    turn = random.uniform(0, 2 * math.pi)
    for place in _around(center, radius * 0.75, turn, (1.0,), int(random.integers(4, 7))):
        pen.ellipse(_box(place, radius * 0.22), fill=ink)


def _stripes(pen: Any, center: Any, radius: float, ink: Any, random: Random) -> None:
    turn = random.uniform(0, math.pi)
    along = (math.cos(turn) * radius, math.sin(turn) * radius)
    for offset in (-0.8, -0.27, 0.27, 0.8):
        x, y = center[0] - along[1] * offset, center[1] + along[0] * offset
        ends = [(x - along[0], y - along[1]), (x + along[0], y + along[1])]
        pen.line(ends, fill=ink, width=max(2, round(radius * 0.22)))


_DRAW: dict[str, Callable[..., None]] = {
    "circle": _circle,
    "cross": _cross,
    "dots": _dots,
    "ring": _ring,
    "square": _polygon(4),
    "star": _polygon(10, (1.0, 0.42)),
    "stripes": _stripes,
    "triangle": _polygon(3),
}
