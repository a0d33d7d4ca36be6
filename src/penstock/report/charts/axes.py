"""Axes, marks, and the texts of numbers that stand on them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from penstock.units import show_bytes, show_seconds

ACCENT = -1
"""The colour of what stands out, for the `colour` of a series."""
MUTED = -2
"""The colour of what stands back, such as a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What a direction of a chart means."""

    name: str
    """In words, such as "time since the start"."""
    unit: str = ""
    """"s", "bytes", "bytes/s" and "share" are printed with prefixes; any other as it is."""
    log: bool = False
    """Whether the scale is logarithmic; values that are not positive are then not drawn."""
    low: float | None = None
    """Where the axis begins; by default the library chooses from the values."""
    high: float | None = None
    """Where the axis ends."""

    def __post_init__(self) -> None:
        if self.log and self.low is not None and self.low <= 0:
            raise ValueError(f"a logarithmic axis cannot begin at {self.low:g}")

    def spec(self) -> dict[str, Any]:
        """Return the axis as the page's script reads it."""
        given = {"low": self.low, "high": self.high}
        said = {key: value for key, value in given.items() if value is not None}
        return {"name": self.name, "unit": self.unit, "log": self.log, **said}

    def text(self, value: float) -> str:
        """Return a number as people read it.

        >>> Axis(name="", unit="share").text(0.251), Axis(name="", unit="bytes/s").text(2e9)
        ('25.1%', '2 GB/s')
        >>> Axis(name="", unit="images").text(1234.5), Axis(name="").text(float("nan"))
        ('1,234 images', '–')
        """
        if not math.isfinite(value):
            return "–"
        match self.unit:
            case "s":
                return show_seconds(value) if value >= 0 else f"-{show_seconds(-value)}"
            case "bytes":
                return show_bytes(value)
            case "bytes/s":
                return f"{show_bytes(value)}/s"
            case "share":
                return f"{100 * value:.3g}%"
        number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        return f"{number} {self.unit}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A dashed line across a chart, at a place on one of the axes."""

    label: str
    """What is there."""
    x: float | None = None
    """Where an upright line stands."""
    y: float | None = None
    """Where a level line lies."""

    def __post_init__(self) -> None:
        if (self.x is None) == (self.y is None):
            raise ValueError(f"mark {self.label!r} needs either x or y")

    def spec(self) -> dict[str, Any]:
        """Return the mark as the page's script reads it."""
        at = {"x": self.x} if self.x is not None else {"y": self.y}
        return {"label": self.label, **at}
